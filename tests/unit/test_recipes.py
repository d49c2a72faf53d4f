"""The recipes of CONTRIBUTING, performed: schedule, format, memory component, solver option, device and finding.

The first two are added to the package that runs. The others are changes of source files, so they are made in a copy of
the package, in exactly the files that the recipe names, and its commands run as a user runs them.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import planner
from planner import files
from planner.core.errors import UsageError
from planner.core.judge.verdict import judge
from planner.core.schedule import SCHEDULES, Action, Schedule, instruction_lists
from planner.core.values.profile import Device, Model
from planner.emit.engines import FORMATS
from planner.emit.layout import EngineFile, PlanLayout
from planner.emit.native import emit_native
from planner.show.terminal.plan import plan_text
from planner.show.terminal.style import Style
from planner.solve import Request, solve
from tests.support.chains import random_profile
from tests.support.house import ROOT, named_files
from tests.support.profiles import inputs_of, profile_of

Changes = Mapping[str, tuple[tuple[str, str], ...]]
"""Old and new texts by file; the old text of a new file is empty."""


class Reversed(Schedule):
    """GPipe as in its paper (arXiv:1811.06965, figure 2): backwards in the reverse order of the forwards."""

    name = "reversed"
    title = "GPipe, reversed"
    torch_name = "none"
    is_forwards_first = True

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """Return all forwards, then the backwards from the last micro-batch to the first."""
        forwards = tuple(Action(device, "F", i) for i in range(micro_batches))
        return (*forwards, *(Action(device, "B", i) for i in reversed(range(micro_batches))))


def test_added_schedule_is_planned_judged_shown_and_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is computed from its own action order.

    With `except-last`, no other backward holds the micro-batch that is not recomputed, so this schedule needs less
    recomputation than GPipe.
    """
    monkeypatch.setitem(SCHEDULES, Reversed.name, Reversed())
    profile = profile_of([10.0] * 4, [20.0] * 4, saved_bytes=100, output_bytes=10, parameter_bytes=20)
    profile = replace(profile, model=Model(source="model.py:build_model"))
    plans = {}
    for schedule in ("gpipe", Reversed.name):
        inputs = replace(inputs_of(2, 4, memory_bytes=440), schedule=schedule)
        plans[schedule] = solve(profile, Request(inputs=inputs, micro_batches=4))
        assert judge(plans[schedule], profile, profile_digest="sha256:0").fits
    gpipe, plan = plans["gpipe"], plans[Reversed.name]
    assert [stage.recompute for stage in gpipe.stages] == ["always", "always"]
    assert [stage.recompute for stage in plan.stages] == ["except-last", "except-last"]
    assert [stage.memory.total for stage in plan.stages] == [stage.memory.total for stage in gpipe.stages]
    assert gpipe.predicted.step_us - plan.predicted.step_us == 20  # of one micro-batch's forward on one stage
    assert plan.solver.status == "optimal"
    style = Style(width=100, color=False, wrap=True)
    assert plan_text(plan, (), style).startswith("GPipe, reversed, 2 stages")
    emitted = emit_native(plan, profile, folder=".", profile_folder=".")
    assert f"schedule: {Reversed.name}\n" in emitted.balance
    rows = instruction_lists(Reversed().actions(2, 2))
    assert [f"{x.do} {x.kind}{x.micro_batch}" for x in rows[1]] == [
        *("receive F0", "receive F1", "run F0", "run F1"),
        *("run B1", "send B1", "run B0", "send B0"),
    ]


def test_added_emit_format_is_accepted_and_listed_in_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def emit_lines(layout: PlanLayout) -> EngineFile:
        text = "\n".join(layer.name for stage in layout.stages for layer in stage)
        return EngineFile(name="stages.txt", text=text, notes=(), use="read stages.txt")

    monkeypatch.setitem(FORMATS, "lines", emit_lines)
    profile = profile_of([10.0] * 4, [20.0] * 4, saved_bytes=100, output_bytes=10, parameter_bytes=20)
    plan = planner.solve(profile, devices=2, mem="1MB", batch=4)
    (path,) = planner.emit(plan, profile=profile, engine="lines", output=tmp_path)
    assert path.read_text().split() == [layer.name for layer in profile.layers]
    with pytest.raises(UsageError, match="unknown `--format line`") as refused:
        planner.emit(plan, profile=profile, engine="line", output=tmp_path)
    assert "lines" in refused.value.hint


def recipe(title: str) -> set[str]:
    """Return the source files that the recipe names."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (page,) = re.findall(rf"^## Adding {title}\n(.*?)(?=^## )", text, flags=re.MULTILINE | re.DOTALL)
    return {name for name in named_files(page) if name.startswith("planner/")}


def run(folder: Path, changes: Changes, *commands: str) -> list[str]:
    """Return the outputs of commands of the changed package, run in `folder` by one process."""
    code = f"""
import sys
from planner.cli.main import run
for command in {commands}:
    if code := run(command.split()):
        sys.exit(code)
    print(end="\\f")
"""
    return run_python(folder, changes, code).split("\f")[:-1]


def run_python(folder: Path, changes: Changes, code: str) -> str:
    """Return the output of a program that imports the changed package, run in `folder`."""
    package = folder / "changed" / "planner"
    if not package.exists():
        for name in ("planner", "gpipe_plan"):
            ignored = shutil.ignore_patterns("*.pyc.*")  # caches that other tests are writing
            shutil.copytree(ROOT / name, package.parent / name, ignore=ignored)
        for name, replaced in changes.items():
            path = package.parent / name
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            for old, new in replaced:
                assert text.count(old) == 1, (name, old)
                text = text.replace(old, new)
            path.write_text(text, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(package.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


WORKSPACES: Changes = {
    "planner/core/values/profile.py": (
        (
            "    buffer_bytes: int = 0\n",
            "    buffer_bytes: int = 0\n    workspace_bytes: int = field(default=0, metadata=LEFT_OUT)\n",
        ),
    ),
    "planner/core/values/plan.py": (
        (
            "    in_flight: int = 0\n",
            "    workspaces: int = field(default=0, metadata=LEFT_OUT)\n    in_flight: int = 0\n",
        ),
    ),
    "planner/core/cost/chain_costs.py": (
        ('"buffers")\n', '"buffers", "workspaces")\n'),
        ("    buffers: FloatArray\n", "    buffers: FloatArray\n    workspaces: FloatArray\n"),
    ),
}


@pytest.mark.slow
def test_added_memory_component_is_in_plan_report_and_explorer(tmp_path: Path) -> None:
    """One stage per device and several are tried."""
    assert set(WORKSPACES) <= recipe("a memory component")
    files.write(str(tmp_path / "0.yaml"), random_profile(1, 8, exact=True))
    text = (tmp_path / "0.yaml").read_text(encoding="utf-8")
    changed = text.replace(", parameter_bytes:", ", workspace_bytes: 1000, parameter_bytes:")
    (tmp_path / "1000.yaml").write_text(changed, encoding="utf-8")
    question = "--devices 2 --mem 1GB --recompute never --batch 1"
    outputs = run(
        tmp_path,
        WORKSPACES,
        *(
            f"solve {size}.yaml {question} --schedule {schedule} -o {schedule}-{size}.yaml"
            for schedule in ("gpipe", "interleaved")
            for size in (0, 1000)
        ),
        "show interleaved-1000.yaml --html plan.html",
        "explore interleaved-1000.yaml -o explore.html",
    )
    for schedule in ("gpipe", "interleaved"):
        plans = [(tmp_path / f"{schedule}-{size}.yaml").read_text(encoding="utf-8") for size in (0, 1000)]
        before, after = (list(map(int, re.findall(r"total: (\d+)", plan))) for plan in plans)
        assert sum(after) == sum(before) + 8 * 1000
        assert sum(map(int, re.findall(r"workspaces: (\d+)", plans[1]))) == 8 * 1000
        assert "workspaces" not in plans[0]
    assert "workspaces" in outputs[-2]
    assert "m-workspaces" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert '"workspaces"' in (tmp_path / "explore.html").read_text(encoding="utf-8")


MOST_SAMPLES: Changes = {
    "planner/api/options/solving.py": (
        (
            "    schedule: Annotated[\n        str | File,",
            """\
    max_micro_batch: Annotated[
        int, Option("N", "Most samples of a micro-batch.", _BATCH, recorded=OptionConversion(texts.parse_integer))
    ] = 10**6
    schedule: Annotated[
        str | File,""",
        ),
    ),
    "planner/core/values/plan.py": (
        (
            "    extrapolate: bool = False\n",
            "    max_micro_batch: int = field(default=10**6, metadata=LEFT_OUT)\n    extrapolate: bool = False\n",
        ),
    ),
    "planner/solve/cases.py": (
        (
            "batch // m >= inputs.min_micro_batch]",
            "inputs.min_micro_batch <= batch // m <= inputs.max_micro_batch]",
        ),
    ),
}


@pytest.mark.slow
def test_added_solver_option_is_in_command_api_and_plan(tmp_path: Path) -> None:
    assert set(MOST_SAMPLES) <= recipe("a solver option")
    files.write(str(tmp_path / "profile.yaml"), random_profile(1, 8, sizes=(1, 2, 4)))
    question = "--devices 2 --mem 1GB --batch 4 --overhead 1ms --max-micro-batch 1"
    _, help_text = run(tmp_path, MOST_SAMPLES, f"solve profile.yaml {question}", "solve --help")
    plan = (tmp_path / "plan.yaml").read_text(encoding="utf-8")
    assert "max_micro_batch: 1\n" in plan
    assert "micro_batch_size: 1\n" in plan
    assert "Most samples of a micro-batch." in help_text
    code = """
import planner
from planner import files
from planner.api.question import solve_command_options
profile = files.read_profile("profile.yaml")
for given in ({}, {"max_micro_batch": 1}):
    plan = planner.solve(profile, devices=2, mem="1GB", batch=4, overhead="1ms", **given)
    options = solve_command_options(plan.inputs, profile.device)
    print(plan.micro_batch_size, *(option for option in options if "max" in option))
"""
    unlimited, limited = run_python(tmp_path, MOST_SAMPLES, code).splitlines()
    assert limited == "1 --max-micro-batch 1"
    assert unlimited == "4"


XPU: Changes = {
    "planner/device/xpu.py": (
        (
            "",
            '''"""Intel GPU."""

import torch

from planner.device.cuda import Cuda


class Xpu(Cuda):
    """GPU that torch uses through `torch.xpu`."""

    name, title, communication = "xpu", "XPU", "xccl"

    @classmethod
    def device_count(cls):
        return torch.xpu.device_count()
''',
        ),
    ),
    "planner/device/kinds.py": (
        ("from planner.device.kind import", "from planner.device.xpu import Xpu\nfrom planner.device.kind import"),
        ("(Cpu, Cuda)", "(Cpu, Cuda, Xpu)"),
    ),
    "planner/core/values/devices.py": (('("cpu", "cuda")', '("cpu", "cuda", "xpu")'),),
}


@pytest.mark.slow
def test_added_device_is_accepted_and_its_absence_is_reported(tmp_path: Path) -> None:
    assert set(XPU) - {"planner/device/xpu.py"} <= recipe("a device")
    profile = replace(random_profile(1, 8), device=Device(kind="xpu", name="Max 1550", memory_bytes=48 * 10**9))
    files.write(str(tmp_path / "profile.yaml"), replace(profile, model=Model(source="model.py:build_model")))
    commands = ("solve profile.yaml --devices 2 --batch 1", "emit plan.yaml", "profile-links --help")
    *_, help_text = run(tmp_path, XPU, *commands)
    assert "auto|cpu|cuda|xpu" in help_text
    assert "device: xpu\n" in (tmp_path / "balance.yaml").read_text(encoding="utf-8")
    code = """
import runpy, sys, torch, planner
from planner.device.kinds import kind_of
print(kind_of(torch.device("xpu", 1)).communication)
try:
    planner.profile("model.py", device="xpu")
except planner.PlannerError as error:
    print(error.message)
sys.argv = ["train.py", "--help"]
runpy.run_path("train.py", run_name="__main__")
"""
    source = "def build_model(): ...\ndef example_batch(size): ...\n"
    (tmp_path / "model.py").write_text(source, encoding="utf-8")
    name, problem, *help_lines = run_python(tmp_path, XPU, code).splitlines()
    assert (name, problem) == ("xccl", "no XPU device here for `--device xpu`")
    assert "--device {cpu,cuda,xpu}" in "\n".join(help_lines)


FEW_MICRO_BATCHES: Changes = {
    "planner/core/values/findings.py": (
        (
            '    Rule(\n        code="GP301",',
            """\
    Rule(
        code="GP209",
        severity="note",
        title="there are fewer micro-batches than stages",
        meaning="M is below K.",
        why="Most stages wait most of the time.",
        remedy="Use smaller micro-batches.",
    ),
    Rule(
        code="GP301",""",
        ),
    ),
    "planner/core/judge/verdict.py": (
        (
            "    findings.extend(_accuracy_findings(now, profile))\n",
            """\
    findings.extend(_accuracy_findings(now, profile))
    if now.micro_batches < len(now.stages):
        findings.append(finding("GP209", f"{now.micro_batches} micro-batches for {len(now.stages)} stages"))
""",
        ),
    ),
}


@pytest.mark.slow
def test_added_finding_is_reported_in_every_format(tmp_path: Path) -> None:
    assert set(FEW_MICRO_BATCHES) <= recipe("a finding")
    files.write(str(tmp_path / "profile.yaml"), random_profile(1, 8))
    formats = ("text", "json", "github", "junit", "markdown")
    for batch, is_reported in ((1, True), (4, False)):
        solve_it = f"solve profile.yaml --devices 2 --mem 1GB --batch {batch} --micro-batches {batch} --balance 4,4"
        checks = (f"check plan.yaml --format {name}" for name in formats)
        more = ("explain GP209", "check plan.yaml --format sarif")
        _, *texts, explained, sarif = run(tmp_path, FEW_MICRO_BATCHES, solve_it, *checks, *more)
        assert {name: "GP209" in text for name, text in zip(formats, texts, strict=True)} == dict.fromkeys(
            formats, is_reported
        )
        assert "Use smaller micro-batches." in explained
        assert "Use smaller micro-batches." in sarif
