"""Tests that a command and its Python function write the same bytes."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import planner
from planner import files
from planner.core.errors import PlannerError, UsageError
from planner.core.values.profile import LayerProfile, Model, Profile
from planner.emit.engines import ENGINES
from tests.support import gate
from tests.support.chains import compiled
from tests.support.cli import call, environment, no_calibration, no_proof, write_model

Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def by_both(capsys: Capsys, output: str, *arguments: str, verb: Any, **keywords: Any) -> tuple[bytes, bytes]:
    """Return the bytes that the command writes to `output`, and those of the function."""
    done = call(capsys, *arguments, "--output", output)
    assert done.code == 0, done.err
    of_command = Path(output).read_bytes()
    Path(output).unlink()
    verb(**keywords, output=output)
    return of_command, Path(output).read_bytes()


# Profiles


def untimed(text: bytes, folder: Path) -> Profile:
    """Return a profile without measured times."""

    def without(layer: LayerProfile) -> LayerProfile:
        no_times = (0.0,) * len(layer.forward_us)
        return replace(
            layer,
            forward_us=no_times,
            backward_us=no_times,
            backward_input_us=(),
            backward_weight_us=(),
            spread=(),
            optimizer_us=0.0,
        )

    (folder / "untimed.yaml").write_bytes(text)
    profile = files.read_profile(str(folder / "untimed.yaml"))
    layers = tuple(without(layer) for layer in profile.layers)
    return replace(profile, layers=layers, fast_round_ratio=1.0, slow_round_ratio=1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "output",
    [
        "sub/profile.json",
        *(pytest.param(path, marks=pytest.mark.nightly) for path in ("profile.yaml", "sub/deep/profile.yaml")),
    ],
)
def test_estimated_profiles_are_equal(here: Path, capsys: Capsys, output: str) -> None:
    """Model paths in profiles are relative to the profile."""
    write_model(here)
    fast = {"device": "estimate:h100", "batch_sizes": [1, 2], "settings": {"width": 24}, "proof_budget": "0s"}
    options = ("--device", "estimate:h100", "--batch-sizes", "1,2", "--set", "width=24", "--proof-budget", "0s")
    of_command, of_function = by_both(
        capsys, output, "profile", "model.py", *options, verb=planner.profile, model="model.py", **fast
    )
    assert of_function == of_command
    source = files.read_profile(output).model.source.rpartition(":")[0]
    assert (here / output).parent.joinpath(source).resolve() == here / "model.py"
    planner.solve(output, devices=2, output="sub/plan.yaml")
    _, script = planner.emit("sub/plan.yaml", output="emitted")
    model = files.read_balance("emitted/balance.yaml").model.source.rpartition(":")[0]
    assert script.parent.joinpath(model).samefile("model.py")


@pytest.mark.slow
def test_measured_profiles_are_equal_except_times(here: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    no_calibration(monkeypatch)
    write_model(here)
    written = by_both(
        capsys,
        "sub/profile.yaml",
        *("profile", "model.py", "--repeat", "2", "--time-budget", "0s", "--batch-sizes", "1,2"),
        verb=planner.profile,
        model="model.py",
        repeat=2,
        time_budget="0s",
        batch_sizes="1,2",
    )
    of_command, of_function = (untimed(text, here) for text in written)
    assert of_function == of_command
    assert of_function.device.executor is not None
    headers = {text.splitlines()[0] for text in written}
    assert len(headers) == 1
    assert b"Measured by `gpipe-plan profile model.py`" in headers.pop()


@pytest.mark.slow
def test_an_interrupted_profile_is_continued_from_python(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    no_calibration(monkeypatch)
    no_proof(monkeypatch)
    write_model(here)
    notes: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(import_module("planner.profile.backends.measured"), "measure_times", interrupted)
        with pytest.raises(KeyboardInterrupt):
            planner.profile("model.py", repeat=2, batch_sizes=1, output="profile.yaml")
    assert files.read_partial("profile.yaml.partial").measurements
    planner.profile("model.py", repeat=2, batch_sizes=1, output="profile.yaml", note=notes.append)
    assert "continuing from profile.yaml.partial" in notes
    assert {path.name for path in here.iterdir()} - {"__pycache__"} == {"model.py", "profile.yaml"}


@pytest.mark.slow
@pytest.mark.nightly
def test_scripts_without_main_guard_run_once(here: Path) -> None:
    """Calibration starts processes that must not run the caller's script again."""
    write_model(here)
    (here / "script.py").write_text(
        """
import planner
print("begun")
profile = planner.profile("model.py", repeat=2, time_budget="0s", batch_sizes=1, proof_budget="0s", warn=print)
print(profile.device.executor is not None)
"""
    )
    done = subprocess.run(
        [sys.executable, "script.py"],
        env=environment(XDG_CACHE_HOME=str(here / "cache")),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = [line for line in done.stdout.splitlines() if not line.startswith("other programs slow this machine down")]
    assert (said, done.stderr) == (["begun", "True"], "")


# Plans


def test_plans_are_equal(here: Path, capsys: Capsys) -> None:
    gate.write(here)
    of_command, of_function = by_both(
        capsys,
        "sub/plan.yaml",
        *("solve", "profile.yaml", "--devices", "3", "--mem", "2MB", "--batch", "4", "--link", "1GB/s", "--frontier"),
        verb=planner.solve,
        devices=3,
        mem="2MB",
        batch=4,
        link="1GB/s",
        frontier=True,
    )
    assert of_function == of_command


@pytest.mark.parametrize(
    "write",
    [
        lambda: planner.solve("profile.yaml", devices=2, mem="2MB", output="./profile.yaml"),
        lambda: planner.profile("model.py", output="model.py"),
        lambda: planner.verify("plan.yaml", calibration="plan.yaml"),
    ],
    ids=["solve", "profile", "verify"],
)
def test_functions_refuse_to_overwrite_their_input(here: Path, write: Callable[[], object]) -> None:
    gate.write(here)
    write_model(here)
    with pytest.raises(UsageError, match="would overwrite"):
        write()


# What runs a plan


def plan_for_gpipe(engine: str) -> None:
    """Return a GPipe plan of layers that Megatron-LM can express."""
    names = ("wte", "h.0", "h.1", "h.2", "h.3", "lm_head")
    of_gate = gate.profile()
    layers = tuple(replace(layer, name=name) for layer, name in zip(of_gate.layers, names, strict=True))
    profile = replace(of_gate, layers=layers, model=Model(source="model.py:build_model"))
    files.write("profile.yaml", compiled(profile) if engine == "jax" else profile)
    asked = {"devices": 2, "mem": "8GB", "recompute": "never", "schedule": "gpipe", "batch": 2}
    planner.solve("profile.yaml", output="plan.yaml", **asked)


@pytest.mark.parametrize("engine", ["native", "jax", "csv", *ENGINES])
def test_emitted_files_are_equal_in_every_format(here: Path, capsys: Capsys, engine: str) -> None:
    plan_for_gpipe(engine)
    done = call(capsys, "emit", "plan.yaml", "-o", "out", "--format", engine)
    assert done.code == 0, done.err
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    for path in before:
        path.unlink()
    paths = planner.emit("plan.yaml", output="out", engine=engine)
    assert {path: path.read_bytes() for path in paths} == before
    assert done.out.split() == [str(path) for path in paths]


def test_unknown_formats_are_refused_before_reading_the_plan(here: Path) -> None:
    with pytest.raises(PlannerError, match="unknown `--format caffe`"):
        planner.emit("nowhere.yaml", engine="caffe")
