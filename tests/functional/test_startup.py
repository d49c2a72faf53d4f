"""Tests that commands without measurements do not import slow packages such as torch and fvcore."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from planner import files
from planner.__main__ import main
from planner.cli.main import COMMANDS, app_for
from planner.core.values.plan import Inputs, ProfileReference
from planner.core.values.profile import Model
from planner.solve import Request, solve
from tests.support.chains import random_profile
from tests.support.cli import environment, spawn
from tests.support.clocks import is_within

HEAVY = ("torch", "fvcore", "networkx", "safetensors", "pulp")

FACES = ("planner.emit.engines", "planner.show.html", "planner.show.svg", "planner.show.trace")
HELP = (
    "numpy",
    "yaml",
    "pydantic",
    "rich",
    "planner.files",
    "planner.show",
    "planner.solve.request",
    "planner.core.cost",
    *FACES,
)
UNUSED = {
    ("--version",): (*HELP, "planner.api.options"),
    ("--help",): (*HELP, "planner.api", "planner.core.values.profile"),
    ("check", "--help"): HELP,
    ("solve", "--help"): HELP,
    # Importing all of pydantic takes longer than the check itself.
    ("check",): (
        *(*FACES, "planner.show.gate", "planner.show.terminal.tables", "rich.table"),
        *(
            "planner.solve.search_state",
            "planner.solve.explain",
            "planner.solve.questions.insight",
            "planner.solve.layers.stage_times",
        ),
        *("planner.api.options.solving", "planner.core.judge.difference", "planner.core.values.run_report"),
        *("planner.core.values.balance", "planner.core.values.links", "planner.core.values.partial"),
        *("pydantic.main", "numpy.random", "statistics"),
    ),
    ("show",): (*FACES[1:], "planner.show.gate", "pydantic.main"),
}
"""What a command does without, and does not wait for."""

_PROBE = """
import json, sys
from planner.cli.main import run
for arguments in json.loads(sys.argv[1]):
    print(json.dumps({"code": run(arguments), "modules": sorted(sys.modules)}), file=sys.stderr)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Write a profile and a plan by hand."""
    profile = replace(random_profile(1, 6), model=Model(source="model.py:build_model"))
    files.write(str(tmp_path / "profile.yaml"), profile)
    profile = files.read_profile(str(tmp_path / "profile.yaml"))
    inputs = Inputs(
        profile=ProfileReference(path="profile.yaml", digest=files.digest_of(profile)),
        devices=2,
        memory_bytes=(10**9, 10**9),
        batch=1,
    )
    files.write(str(tmp_path / "plan.yaml"), solve(profile, Request(inputs=inputs)))
    return tmp_path


def probe(folder: Path, *commands: Sequence[str]) -> list[dict[str, Any]]:
    """Run commands in one new process; return each one's exit code, and the modules that are imported after it."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, json.dumps(commands)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line) for line in done.stderr.splitlines() if line.startswith('{"code": ')]


@pytest.mark.slow
def test_only_profiling_imports_torch(here: Path) -> None:
    """A `profile` with bad options does not import it either."""
    commands = (
        ("--help",),
        ("profile", "--help"),
        ("--version",),
        ("solve", "--devices", "2", "--mem", "1GB"),
        ("solve", "--devices", "2", "--mem", "1GB", "--format", "json"),
        ("check",),
        ("check", "--format", "json"),
        ("check", "--format", "sarif"),
        ("check", "--device", "h100", "--against", "plan.yaml"),
        ("explain", "GP101"),
        ("compare", "plan.yaml", "plan.yaml"),
        ("sweep", "--devices", "1,2", "--mem", "1GB"),
        ("emit",),
        ("emit", "--force"),
        ("show",),
        ("show", "profile.yaml"),
        ("show", "--html", "report.html", "--svg", "step.svg", "--trace", "step.json"),
        ("explore",),
        ("schema", "plan"),
        ("verify", "--steps", "2"),
        ("profile", "model.py", "--format", "xml"),
    )
    for arguments, probed in zip(commands, probe(here, *commands), strict=True):
        assert probed["code"] == (2 if "xml" in arguments or "verify" in arguments else 0), arguments
        assert "planner.cli.main" in probed["modules"]
        assert [name for name in HEAVY if name in probed["modules"]] == [], arguments


@pytest.mark.slow
@pytest.mark.parametrize("arguments", UNUSED, ids=" ".join)
def test_commands_import_only_their_own_modules(here: Path, arguments: tuple[str, ...]) -> None:
    (probed,) = probe(here, arguments)
    assert [name for name in UNUSED[arguments] if name in probed["modules"]] == []


@pytest.mark.slow
def test_the_probe_detects_an_import_of_torch(here: Path) -> None:
    (here / "model.py").write_text("raise ValueError\n")
    (probed,) = probe(here, ("profile", "model.py"))
    assert probed["code"] == 2
    assert "torch" in probed["modules"]


def test_python_dash_m_planner_equals_the_command(here: Path) -> None:
    helped = spawn(["--help"], here)
    assert (helped.code, helped.err) == (0, "")
    assert helped.out.startswith("Usage: gpipe-plan [OPTIONS] COMMAND")
    assert spawn(["check"], here).code == 0
    assert spawn(["check", "--mem", "1B"], here).code == 1
    assert spawn(["check", "missing.yaml"], here).code == 2


def test_list_of_commands_has_the_first_sentences_of_their_help() -> None:
    commands = get_command(app_for([])).commands
    assert {name: command.get_short_help_str(limit=200) for name, command in commands.items()} == COMMANDS


def test_shells_complete_options_of_commands(here: Path) -> None:
    """The command line to complete is in variables, not in the arguments."""
    completed = subprocess.run(
        [sys.executable, "-m", "planner"],
        cwd=here,
        env={
            **environment(),
            "_GPIPE_PLAN_COMPLETE": "complete_bash",
            "COMP_WORDS": "gpipe-plan solve --dev",
            "COMP_CWORD": "2",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert completed.stdout.split() == ["--devices"]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are listed on Linux only")
@pytest.mark.parametrize("arguments", [("check",), ("show",), ("compare", "plan.yaml", "plan.yaml")], ids=" ".join)
def test_short_commands_start_no_threads(here: Path, arguments: tuple[str, ...]) -> None:
    """On one core, numpy never starts threads, so this test cannot fail there."""
    script = "import os, sys\nfrom planner.cli.main import run\nassert run(sys.argv[1:]) == 0\n"
    script += "print(len(os.listdir('/proc/self/task')), os.environ.get('OPENBLAS_NUM_THREADS'), file=sys.stderr)"
    own = {name: value for name, value in environment().items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=here, env=own, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "1 None"


def test_the_console_script_is_installed() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="gpipe-plan")
    assert script.value == "planner.__main__:main"


def test_main_exits_with_the_code_of_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in ((["--help"], 0), (["check", "/nowhere/plan.yaml"], 2)):
        monkeypatch.setattr(sys, "argv", ["gpipe-plan", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        assert left.value.code == code
    assert "no such file" in capsys.readouterr().err


def cpu_s(folder: Path, *arguments: str) -> float:
    """Return the CPU time of a command that succeeds, least of three."""
    times_s = []
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "planner", *arguments], cwd=folder, env=environment(), stdout=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, arguments
        times_s.append(used.ru_utime + used.ru_stime)
    return min(times_s)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timed
def test_check_of_64_stages_takes_at_most_twice_its_start_up(here: Path) -> None:
    """The start-up is a check of two stages. Without its seal, the plan is solved again, which takes longer."""
    profile = replace(random_profile(2, 96), model=Model(source="model.py:build_model"))
    (here / "large").mkdir()
    files.write(str(here / "large" / "profile.yaml"), profile)
    profile = files.read_profile(str(here / "large" / "profile.yaml"))
    inputs = Inputs(
        profile=ProfileReference(path="profile.yaml", digest=files.digest_of(profile)),
        devices=64,
        memory_bytes=(10**9,) * 64,
        batch=64,
        schedule="auto",
    )
    plan = solve(profile, Request(inputs=inputs, micro_batches=64, actions=10_000, searches_longer=False))
    assert len(plan.stages) == 64
    files.write(str(here / "large" / "plan.yaml"), files.with_seal(plan))
    assert is_within(cpu_s(here / "large", "check"), 2 * cpu_s(here, "check"))
