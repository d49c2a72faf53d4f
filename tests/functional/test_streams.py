"""Tests of pipes, of closed and full streams, and of Ctrl-C at any time."""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import planner
from planner import files
from tests.support import gate
from tests.support.chains import chain, layer
from tests.support.cli import Ran, environment
from tests.support.profiles import profile_of

PYTHON = sys.executable


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a profile with unusual layer names, and its plan."""
    names = ["a", "\x7f", "😀\u2028", "l\nb", '"\\', "- {x: 1}", "\ud7ff\x85"]
    odd = chain(*(layer(name, forward_us=10.0, backward_us=20.0) for name in names))
    files.write(str(tmp_path / "profile.yaml"), odd)
    return tmp_path


def shell(script: str, folder: Path) -> Ran:
    """Run lines of bash in which `plan` is the command."""
    text = f"set -o pipefail; plan() {{ '{PYTHON}' -m planner \"$@\"; }}; {script}"
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    return Ran(done.returncode, done.stdout, done.stderr)


SOLVE = "plan solve --devices 2 --mem 8GB --batch 4 --quiet"


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        f"{SOLVE} -o - | plan check -",
        pytest.param(f"{SOLVE} -o - --format json | plan check -", marks=pytest.mark.nightly),
        f"{SOLVE} -o p.yaml; plan check <(cat p.yaml) --format github",
        pytest.param(f"{SOLVE} -o p.yaml; plan show <(cat p.yaml)", marks=pytest.mark.nightly),
        f"{SOLVE} -o p.json; cat p.json | plan show - --html r.html",
        f"{SOLVE.replace('solve', 'solve <(cat profile.yaml)')} -o p.yaml && plan check p.yaml --profile profile.yaml",
        f"{SOLVE} -o - --format json | plan compare - <({SOLVE} -o -)",
    ],
)
def test_plans_are_read_from_pipes(folder: Path, script: str) -> None:
    """The profile is found relative to the working directory."""
    ran = shell(script, folder)
    assert ran.code == 0, ran


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        "plan show plan.yaml >/dev/full",
        pytest.param("plan show plan.yaml --format json >/dev/full", marks=pytest.mark.nightly),
        "plan solve --devices 2 --mem 8GB --batch 4 -o - >/dev/full",
        pytest.param("plan show plan.yaml --html - >/dev/full", marks=pytest.mark.nightly),
        "plan --help >/dev/full",
        "plan schema plan >&-",
        "plan show plan.yaml >&-",
        "plan check - <&-",
    ],
)
def test_full_or_closed_streams_give_exit_code_2(folder: Path, script: str) -> None:
    planner.solve(folder / "profile.yaml", devices=2, mem="8GB", batch=4, output=folder / "plan.yaml")
    ran = shell(script, folder)
    assert ran.code == 2, ran
    assert len([line for line in ran.err.splitlines() if "error: " in line]) == 1, ran
    assert "Traceback" not in ran.err
    assert "bug" not in ran.err


@pytest.mark.slow
def test_closed_stderr_does_not_change_the_exit_code(folder: Path) -> None:
    for closed in ("2>&-", "2>/dev/full"):
        ran = shell(f"plan solve --devices 2 --mem 8GB --batch 4 {closed}; plan show nothing.yaml {closed}", folder)
        assert ran.code == 2
        assert "no such file" not in ran.out


@pytest.mark.slow
def test_output_of_libraries_is_not_on_stdout(folder: Path) -> None:
    """This includes text that C's `printf` buffers until the process ends."""
    script = folder / "noisy.py"
    script.write_text(
        """
import ctypes, os, sys
from planner import __main__
from planner.cli import main
run = main.run
def noisy(arguments):
    os.write(1, b"banner\\n")
    ctypes.CDLL(None).printf(b"held back\\n")
    return run(arguments)
main.run = noisy
__main__.main()
"""
    )
    for closed in ("", "2>&-", "2>/dev/null"):
        arguments = SOLVE.removeprefix("plan ")
        ran = shell(f"'{PYTHON}' noisy.py {arguments} -o p.yaml --format json {closed}", folder)
        assert ran.code == 0, ran
        assert json.loads(ran.out)["schema"].startswith("gpipe-plan/plan/")
        assert ("banner\n" in ran.err and "held back\n" in ran.err) == (not closed)


MODULES = [
    "planner.cli.main",
    "typer",
    "planner.cli.console",
    "numpy",
    "pydantic",
    "planner.api",
    "planner.core.cost.costs",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "wrapped"),
    [
        *((module, False) for module in (*MODULES, "the end")),
        *((module, True) for module in ("numpy", "pydantic")),
        *(
            pytest.param(module, True, marks=pytest.mark.nightly)
            for module in MODULES
            if module not in {"numpy", "pydantic"}
        ),
    ],
)
def test_interrupts_print_one_line_at_any_time(folder: Path, module: str, wrapped: bool) -> None:  # noqa: FBT001
    script = folder / "press.py"
    script.write_text(
        f"""
import os, signal, sys, atexit
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt as error:
                if {wrapped!r}:
                    raise ImportError("half imported") from error
                raise
sys.meta_path.insert(0, Press())
if {module!r} == "the end":
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
sys.argv = ["gpipe-plan", "solve", "--devices", "2", "--mem", "8GB", "--batch", "4"]
from planner.__main__ import main
main()
"""
    )
    ran = shell(f"'{PYTHON}' press.py", folder)
    assert ran.code == 130, ran
    assert [line for line in ran.err.splitlines() if line.startswith(("interrupted", "Trace", "error"))] == [
        "interrupted"
    ], ran
    assert "Traceback" not in ran.err


def test_interrupts_in_destructors_are_not_lost(folder: Path) -> None:
    """Python ignores exceptions in destructors after printing a traceback."""
    script = folder / "press.py"
    script.write_text(
        """
import os, signal, time
from planner import __main__
from planner.cli import main
class Torn:
    def __init__(self, error):
        self.error = error
    def __del__(self):
        if self.error:
            raise self.error
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(100):
            pass
def run(arguments):
    Torn(OSError("as ever"))
    Torn(None)
    time.sleep(10)
    return 0
main.run = run
__main__.main()
"""
    )
    ran = shell(f"'{PYTHON}' press.py", folder)
    assert ran.code == 130, ran
    assert ran.err.endswith("OSError: as ever\ninterrupted\n")
    assert ran.err.count("Traceback") == 1


def test_file_modes_are_kept(tmp_path: Path) -> None:
    """A new file has the mode of the umask."""
    path, script = tmp_path / "p.yaml", tmp_path / "train.py"
    files.write(str(path), gate.profile())
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    for mode in (0o600, 0o640, 0o755):
        path.chmod(mode)
        files.write(str(path), profile_of([1.0]))
        assert stat.S_IMODE(path.stat().st_mode) == mode
    script.write_text("x")
    script.chmod(0o700)
    files.write_text(str(script), "y")
    assert stat.S_IMODE(script.stat().st_mode) == 0o700


def test_content_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (done.append("sync"), fsync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("rename"), replace(*paths))[1])
    files.write_text(str(tmp_path / "a"), "x")
    assert done == ["sync", "rename", "sync"]


def test_the_action_imports_no_modules_of_the_checkout(tmp_path: Path) -> None:
    action = (Path(__file__).parents[2] / "action.yml").read_text()
    lines = re.findall(r"^\s*(?:run: )?(python\S* .*-m pip) ", action, re.MULTILINE)
    assert len(lines) == action.count("pip install") == 1
    for name in ("pip.py", "sitecustomize.py", "numpy.py"):
        (tmp_path / name).write_text("open('mark', 'w')\n")
    for line in lines:
        words = line.replace("python", PYTHON, 1)
        done = subprocess.run(
            ["bash", "-c", f"{words} --version"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done
        assert done.stdout.startswith("pip ")
        assert not (tmp_path / "mark").exists()
