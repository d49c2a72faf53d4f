"""What `pip install gpipe-plan` alone brings: commands without the packages of any extra.

They are made unimportable in one process here; `make light` installs the wheel into an empty environment.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner import files
from tests.support.chains import compiled, random_profile
from tests.support.cli import MODEL, Ran, environment
from tests.support.docs import ROOT

ABSENT = ("torch", "fvcore", "networkx", "safetensors", "pulp", "highspy", "jax", "torchax", "libtpu", "scipy")

TRAIN = "pip install 'gpipe-plan[train]'"
MILP = "pip install 'gpipe-plan[milp]'"

SOLVE = "solve --devices 3 --mem 4MB --batch 8"
UNPROVEN = (
    "solve wide.yaml --devices 6 --mem 1GB --batch 8 --micro-batches 8 --schedule zb-h1 --frontier -o unproven.yaml"
)
ANSWERED = (
    "--version",
    f"{SOLVE} --schedule gpipe",
    "check --headroom 5%",
    "show",
    "show --html report.html --svg step.svg --trace step.json",
    "compare plan.yaml plan.yaml",
    "sweep --devices 1,2 --mem 4MB --batch 8 --schedule gpipe",
    "emit",
    "solve tpu.yaml --devices 3 --mem 4MB --batch 8 -o tpu-plan.yaml",
    "emit tpu-plan.yaml --format jax -o tpu",
    *(f"emit --format {name}" for name in ("torch", "torchtitan", "automodel", "deepspeed", "device-map", "csv")),
    "schema plan",
    "explain GP101",
    UNPROVEN,
    "check unproven.yaml",
)
REFUSED = {
    "profile model.py": TRAIN,
    "profile model.py --device tpu:v2": "pip install 'gpipe-plan[tpu]'",
    "check --model model.py": TRAIN,
    "verify": TRAIN,
    "export checkpoints": TRAIN,
    f"{SOLVE} --solver milp": MILP,
}

_PROGRAM = """
import contextlib, io, json, sys
absent, lines = map(json.loads, sys.argv[1:])
sys.modules |= dict.fromkeys(absent)
from planner.cli.main import run
ran = {}
for line in lines:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run(line.split())
    ran[line] = code, out.getvalue(), err.getvalue()
print(json.dumps(ran))
"""


def without(absent: tuple[str, ...], lines: tuple[str, ...], folder: Path) -> dict[str, Ran]:
    """Return the results of commands in a process that cannot import these packages."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, json.dumps(absent), json.dumps(lines)],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return {line: Ran(*ran) for line, ran in json.loads(done.stdout).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a committed profile, a longer one and a model."""
    folder = tmp_path_factory.mktemp("light")
    profile = (ROOT / "tests" / "fuzz" / "seeds" / "profile.yaml").read_text(encoding="utf-8")
    (folder / "profile.yaml").write_text(profile, encoding="utf-8")
    files.write(str(folder / "wide.yaml"), random_profile(1, 24))
    files.write(str(folder / "tpu.yaml"), compiled(files.read_profile(str(folder / "profile.yaml"))))
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def ran(folder: Path) -> dict[str, Ran]:
    """Return the results by command line."""
    return without(ABSENT, (*ANSWERED, *REFUSED), folder)


@pytest.mark.slow
def test_commands_without_torch_succeed(ran: dict[str, Ran], folder: Path) -> None:
    assert {line: (ran[line].code, ran[line].err) for line in ANSWERED if ran[line].code} == {}
    written = {"plan.yaml", "report.html", "step.svg", "step.json", "balance.yaml", "train.py", "train_jax.py"}
    assert written <= {path.name for path in folder.rglob("*")}
    assert ran["--version"].out.endswith(f"without torch, fvcore, networkx, safetensors: {TRAIN}\n")


def test_commands_that_need_an_extra_print_how_to_install_it(ran: dict[str, Ran]) -> None:
    for line, command in REFUSED.items():
        assert ran[line].code == 2, line
        assert "not installed" in ran[line].error
        assert ran[line].err.endswith(f"\n\nhint: {command}\n"), line


def test_a_note_reports_that_highs_would_give_a_better_bound(ran: dict[str, Ran], folder: Path) -> None:
    """Proven plans have no such note. `check` reports it only if it must solve again."""
    unproven, gpipe = ran[UNPROVEN], ran[f"{SOLVE} --schedule gpipe"]
    assert unproven.err.count("highspy is not installed; with it the gap may be smaller") == 1
    assert MILP in unproven.err
    assert "highspy" not in gpipe.err
    assert ran["check unproven.yaml"].out.splitlines()[-1] == "fits"
    plan = files.read_plan(str(folder / "unproven.yaml"))
    files.write(str(folder / "unsealed.yaml"), replace(plan, seal=""))
    again = without(ABSENT, ("check unsealed.yaml",), folder)["check unsealed.yaml"]
    assert "GP205" not in again.out
    assert "not installed" in again.out


def test_emitted_scripts_print_how_to_install_an_extra(folder: Path) -> None:
    program = "import sys; sys.modules['torch'] = None; import runpy; runpy.run_path('train.py')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    last = done.stderr.splitlines()[-2:]
    assert last[0].endswith("MissingPackageError: torch is not installed, which measuring and training need")
    assert last[1] == f"hint: {TRAIN}"
