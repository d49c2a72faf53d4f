"""Tests of `check`, `explain`, `compare` and `sweep` in CI: exit codes, pipes, signals, action and hook."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from planner import files
from planner.cli.precommit import check_files
from planner.core.errors import ExitCode
from tests.support import gate
from tests.support.cli import call, command, environment, spawn
from tests.support.docs import ROOT

Capsys = pytest.CaptureFixture[str]

FORMATS = ("text", "json", "github", "junit", "sarif", "markdown")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with profile.yaml and plan.yaml."""
    monkeypatch.chdir(tmp_path)
    gate.write(tmp_path)
    return tmp_path


# Exit codes: a table

CODES = [
    ((), 0),
    (("--mem", "900kB"), 1),
    (("--mem", "2MB"), 0),
    (("--mem", "2MB,2MB,1kB"), 1),
    (("--device", "h100"), 0),
    (("--device", "H100", "--strict"), 0),
    (("--headroom", "9%"), 0),
    (("--headroom", "9%", "--strict"), 1),
    (("--against", "plan.yaml"), 0),
    (("--against", "missing.yaml"), 2),
    (("--against", "git:main"), 2),
    (("--device", "abacus"), 2),
    (("--device", "h100", "--mem", "8GB"), 2),
    (("--mem", "8"), 2),
    (("--mem", "1GB,1GB"), 2),
    (("--headroom", "5"), 2),
    (("missing.yaml",), 2),
    (("profile.yaml",), 2),
    (("--no-such-option",), 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(
    ("arguments", "code"), CODES, ids=lambda value: " ".join(value) if value and not isinstance(value, int) else None
)
def test_the_exit_code_is_the_same_in_every_format(here, capsys, arguments, code, format_):
    """0 fits, 1 does not fit, 2 is an error: then stdout is empty and stderr has the message."""
    done = call(capsys, "check", *arguments, "--format", format_)
    assert done.code == code, done.err
    assert (done.out == "") == (code == 2)
    assert ("error:" in done.err) == (code == 2)
    if format_ in ("json", "sarif") and code < 2:
        json.loads(done.out)


OTHERS = [
    (("explain",), 0),
    (("explain", "GP101", "gp402"), 0),
    (("explain", "--format", "json"), 0),
    (("explain", "GP999"), 2),
    (("explain", "--format", "xml"), 2),
    (("compare", "plan.yaml", "plan.yaml"), 0),
    (("compare", "plan.yaml", "plan.yaml", "plan.yaml", "--format", "json"), 0),
    (("compare", "plan.yaml", "plan.yaml", "--format", "markdown"), 0),
    (("compare", "plan.yaml"), 2),
    (("compare",), 2),
    (("compare", "plan.yaml", "missing.yaml"), 2),
    (("compare", "plan.yaml", "profile.yaml"), 2),
    (("sweep", "--devices", "1,2", "--mem", "1MB,2MB", "--batch", "4"), 0),
    (("sweep", "--devices", "1,2", "--mem", "1MB,2MB", "--batch", "4", "--format", "json"), 0),
    (("sweep", "--devices", "1,2", "--mem", "1MB,2MB", "--batch", "4", "--format", "markdown"), 0),
    (("sweep", "--devices", "2", "--mem", "1kB", "--batch", "4"), 1),
    (("sweep", "--devices", "2", "--batch", "4"), 2),
    (("sweep", "--devices", "0", "--mem", "1MB"), 2),
    (("sweep", "--devices", "x", "--mem", "1MB"), 2),
    (("sweep", "--devices", "2", "--mem", "1"), 2),
    (("sweep", "missing.yaml", "--mem", "1MB"), 2),
    (("sweep", "--mem", "1MB", "--format", "xml"), 2),
]


@pytest.mark.parametrize(
    ("arguments", "code"), OTHERS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else None
)
def test_explain_compare_and_sweep_have_documented_exit_codes(here, capsys, arguments, code):
    done = call(capsys, *arguments)
    assert done.code == code, done.err
    assert (done.out == "") == (code == 2)
    if "json" in arguments:
        json.loads(done.out)


@pytest.mark.parametrize("name", ["explain", "compare", "sweep", "check"])
def test_help_of_ci_commands_lists_every_option(capsys: Capsys, name: str) -> None:
    done = call(capsys, name, "--help")
    assert (done.code, done.err) == (0, "")
    assert "--format" in done.out
    if name == "check":
        assert all(option in done.out for option in ("--device", "--against", "--strict", "--headroom", "sarif"))


def test_check_against_reports_a_grown_layer(here: Path, capsys: Capsys) -> None:
    (here / "main-plan.yaml").write_text((here / "plan.yaml").read_text())
    gate.write(here, widened=1000, cap=2_000_000)
    done = call(capsys, "check", "--against", "main-plan.yaml")
    assert done.code == 0
    assert "GP401 note: stage 1 needs 1.95 KiB more than in main-plan.yaml" in done.out
    assert "against main-plan.yaml" in done.out
    document = json.loads(call(capsys, "check", "--against", "main-plan.yaml", "--format", "json").out)
    assert [s["bytes"] - s["bytes_before"] for s in document["difference"]["stages"]] == [0, 2000, 0]


def test_annotations_point_at_the_line_of_the_stage(here: Path, capsys: Capsys) -> None:
    (here / "plan.yaml").write_text("# mine\n" + (here / "plan.yaml").read_text())
    line = next(n for n, text in enumerate((here / "plan.yaml").read_text().splitlines(), 1) if "index: 1," in text)
    out = call(capsys, "check", "--mem", "910kB", "--format", "github").out
    assert f"::error file=plan.yaml,line={line},title=GP101" in out


def test_a_sweep_writes_plans_that_check_accepts(here: Path, capsys: Capsys) -> None:
    done = call(capsys, "sweep", "--devices", "1,3", "--mem", "900kB,2MB", "--batch", "4", "-o", "out/cells")
    assert done.code == 0, done.err
    names = sorted(path.name for path in (here / "out" / "cells").iterdir())
    assert names == ["1x2MB.yaml", "3x2MB.yaml", "3x900kB.yaml"]
    for name in names:
        assert call(capsys, "check", f"out/cells/{name}", "--strict").code == 0
    assert "smallest that trains: 1 device with 2MB" in done.out


def test_compare_reads_plans_of_sweep(here: Path, capsys: Capsys) -> None:
    call(capsys, "sweep", "--devices", "1,2,3", "--mem", "2MB", "--batch", "4", "-o", "cells")
    paths = [f"cells/{count}x2MB.yaml" for count in (1, 2, 3)]
    text = call(capsys, "compare", *paths).out
    assert [line.split()[0] for line in text.splitlines() if line.startswith("cells/")][:3] == paths
    document = json.loads(call(capsys, "compare", *paths, "--format", "json").out)
    assert document["schema"] == "gpipe-plan/compare/v1"
    assert [row["recomputed"] for row in document["plans"]] == [True] * 3


# Pipes and signals


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash for `set -o pipefail`")
@pytest.mark.parametrize(
    "format_",
    [
        format_ if format_ in {"text", "sarif"} else pytest.param(format_, marks=pytest.mark.nightly)
        for format_ in FORMATS
    ],
)
def test_a_pipe_to_head_changes_no_exit_code(here: Path, format_: str) -> None:
    line = f"set -o pipefail; {shlex.join(command('check', '--mem', '900kB', '--format', format_))} | head -1"
    done = subprocess.run(["bash", "-c", line], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("explain",),
        ("compare", "plan.yaml", "plan.yaml"),
        ("sweep", "--devices", "1,2", "--mem", "2MB", "--batch", "4", "-q"),
    ],
    ids=lambda value: value[0],
)
def test_a_closed_pipe_is_no_error_in_any_format(here: Path, arguments: tuple[str, ...]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    process = subprocess.Popen(
        command(*arguments), env=environment(), text=True, stdout=write_end, stderr=subprocess.PIPE
    )
    os.close(write_end)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize("verb", ["check", "sweep"])
def test_ctrl_c_gives_exit_code_130(here: Path, verb: str) -> None:
    process = subprocess.Popen(
        command(verb, "-"),
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,  # noqa: PLW1509
    )
    # Once it waits for the rest of the file, a pipe full of it has been read.
    process.stdin.write("#" * (1 << 17))
    process.stdin.flush()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (ExitCode.INTERRUPTED, "")
    assert "Traceback" not in err


@pytest.mark.nightly
def test_check_takes_less_than_half_a_second(here: Path) -> None:
    """Use the smallest processor time of five runs, to exclude other processes."""
    spent = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert spawn(["check"], here).code == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.75, spent  # 0.25 s on a quiet machine, twice that where two processes share a core


# What CI runs

ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


def run_action(folder: Path, **inputs: str) -> tuple[subprocess.CompletedProcess[str], str, str]:
    """Run the checking step of the action as a runner does; return process, summary and outputs."""
    (step,) = [step for step in ACTION["runs"]["steps"] if step.get("id") == "check"]
    given = {name: declared["default"] for name, declared in ACTION["inputs"].items()} | inputs
    variables = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: given[found[1]], text)
        for name, text in step["env"].items()
    }
    bin_ = folder / ".bin"
    bin_.mkdir(exist_ok=True)
    (bin_ / "gpipe-plan").write_text(f'#!/bin/sh\nexec {sys.executable} -m planner "$@"\n')
    (bin_ / "gpipe-plan").chmod(0o755)
    summary, outputs = folder / ".summary", folder / ".outputs"
    for file in (summary, outputs):
        file.write_text("")
    env = environment(
        **variables,
        PATH=f"{bin_}:{os.environ['PATH']}",
        GITHUB_STEP_SUMMARY=str(summary),
        GITHUB_OUTPUT=str(outputs),
    )
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done, summary.read_text(), outputs.read_text()


def test_the_action_passes_a_plan_that_fits(here: Path) -> None:
    done, summary, outputs = run_action(here, headroom="9%")
    assert done.returncode == 0, done.stderr
    assert "::warning file=plan.yaml,line=" in done.stdout
    assert summary.startswith("### ✅ `plan.yaml`: fits (1 warning)")
    assert outputs == "fits=true\n"


@pytest.mark.slow
def test_the_action_fails_a_plan_that_does_not_fit(here: Path) -> None:
    """All output files are written."""
    (here / "my plan.yaml").write_text((here / "plan.yaml").read_text())
    done, summary, outputs = run_action(
        here,
        plan="my plan.yaml",
        profile="profile.yaml",
        mem="900kB",
        against="plan.yaml",
        strict="true",
        sarif="a b.sarif",
        junit="c.xml",
    )
    assert done.returncode == 1, done.stderr
    assert "::error file=my plan.yaml,line=" in done.stdout
    assert "does not fit" in summary
    assert outputs == "fits=false\n"
    assert json.loads((here / "a b.sarif").read_text())["version"] == "2.1.0"
    assert (here / "c.xml").read_text().startswith("<?xml")


@pytest.mark.slow
def test_the_action_reports_errors_with_exit_code_2(here: Path) -> None:
    """A missing file is not reported as `does not fit`. The name of a plan is not run as script."""
    for plan in ("missing.yaml", "$(touch pwned).yaml", "--help"):
        done, summary, outputs = run_action(here, plan=plan)
        assert (done.returncode, summary, outputs) == (2, "", ""), plan
    assert not (here / "pwned").exists()
    assert run_action(here, device="h100")[0].returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strict", "code"),
    [("True", 1), pytest.param("TRUE", 1, marks=pytest.mark.nightly), ("False", 0), ("", 0), ("yes", 2)],
)
def test_the_action_reads_strict_as_a_yaml_boolean(here: Path, strict: str, code: int) -> None:
    done, _, outputs = run_action(here, headroom="9%", strict=strict)
    assert done.returncode == code, done
    assert outputs == {0: "fits=true\n", 1: "fits=false\n", 2: ""}[code]


def test_the_action_is_a_valid_composite_action() -> None:
    """No input is interpolated into a script."""
    assert ACTION["runs"]["using"] == "composite"
    assert all(step["shell"] == "bash" for step in ACTION["runs"]["steps"])
    assert all("${{" not in step["run"] for step in ACTION["runs"]["steps"])
    text = (ROOT / "action.yml").read_text()
    for name, declared in ACTION["inputs"].items():
        assert declared["description"].endswith(".")
        assert f"inputs.{name} " in text
    assert ACTION["outputs"]["fits"]["value"] == "${{ steps.check.outputs.fits }}"


@pytest.mark.nightly
def test_the_action_installs_all_packages_of_check(here: Path) -> None:
    (install,) = [step["run"] for step in ACTION["runs"]["steps"] if step["name"] == "Install"]
    assert install.endswith(' "$GITHUB_ACTION_PATH"')  # no extra
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {re.split(r"[<>=]", requirement)[0] for requirement in project["dependencies"]}
    program = (
        f"import sys\nfrom planner.cli.main import run\nfor f in {FORMATS!r}:\n"
        "    for more in ([], ['--mem', '900kB']): run(['check', '--format', f, *more])\n"
        "import importlib.metadata as m\n"
        "tops = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted({d for top in tops for d in m.packages_distributions().get(top, ())}), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=120, check=True
    )
    used = {name.lower() for name in re.findall(r"'([^']+)'", done.stderr.splitlines()[-1])}
    assert named == {"numpy", "pydantic", "pyyaml", "rich", "typer"}
    assert (named - {"pydantic"}) | {"pydantic_core"} <= used  # its core alone, which it brings
    assert used.isdisjoint({"torch", "fvcore", "pulp", "highspy", "networkx", "scipy", "sympy"})


(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())


def test_the_hook_checks_every_committed_plan(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    """The largest exit code counts."""
    monkeypatch.chdir(here)
    assert HOOK["entry"] == f"python -I -m {check_files.__module__}"
    (here / "sub").mkdir()
    for name in ("sub/plan.yaml", "sub/profile.yaml", "big.plan.yaml"):
        (here / name).write_text((here / name.split("/")[-1].removeprefix("big.")).read_text())
    assert check_files(["plan.yaml", "sub/plan.yaml", "big.plan.yaml"]) == 0
    assert check_files(["--mem", "900kB", "plan.yaml"]) == 1
    assert check_files(["--headroom", "9%", "--strict", "--", "plan.yaml"]) == 1
    (here / "sub/plan.yaml").write_text("nothing")
    assert check_files(["plan.yaml", "sub/plan.yaml", "big.plan.yaml"]) == 2
    capsys.readouterr()
    assert check_files(["profile.yaml", "plan.yaml"]) == 0
    assert re.findall("^.*yaml:$", capsys.readouterr().out, re.MULTILINE) == ["big.plan.yaml:", "plan.yaml:"]


@pytest.mark.parametrize("name", ["plan.yaml", "profile.yaml", "sub/plan.yaml", "big.plan.yaml", "a/big.profile.json"])
def test_the_hook_selects_plans_and_profiles(name: str) -> None:
    assert re.search(HOOK["files"], name)
    assert HOOK.get("pass_filenames", True)
    assert not any(re.search(HOOK["files"], other) for other in ("model.py", "airplan.yaml", "plan.yaml.orig"))


def test_the_readme_names_every_command(capsys: Capsys) -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("check", "explain", "compare", "sweep"):
        assert f"gpipe-plan {name}" in readme
    assert files.read  # the package that reads what they write
