"""The road for TPUs without one: profile, solve, show, emit, and the emitted JAX program."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from planner.files import read_plan, read_profile
from planner.model import torchax_adapter
from tests.support.cli import EXAMPLE, HEAD, LOSS, call, environment, write_model

installed = pytest.mark.skipif(find_spec("torchax") is None, reason="needs the extra: pip install 'gpipe-plan[tpu]'")

MODEL = (
    HEAD
    + """
def build_model(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

def build_optimizer(parameters):
    return torch.optim.Adam(parameters, lr=0.01)
"""
    + EXAMPLE
    + LOSS
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_model(tmp_path, MODEL)
    return tmp_path


def train(folder: Path, *arguments: str) -> str:
    """What the emitted script prints."""
    done = subprocess.run(
        [sys.executable, "train_jax.py", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@installed
def test_from_a_model_to_a_jax_program(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Profiled and compiled for cores that are not here, and trained on virtual devices: losses are torch's."""
    profiled = call(capsys, "profile", "model.py", "--device", "tpu:v2", "--batch-sizes", "2,4")
    assert profiled.code == 0, profiled.err
    assert "solve --devices 2 --mem tpu:v2" in profiled.err
    assert read_profile("profile.yaml").device.how == "compiled"
    solved = call(capsys, "solve", "--devices", "2", "--mem", "tpu:v2", "--batch", "8", "--balance", "2,3")
    assert solved.code == 0, solved.err
    assert set(read_plan("plan.yaml").inputs.memory_bytes) == {748 * 2**30 // 100}
    assert call(capsys, "show").code == 0
    emitted = call(capsys, "emit", "--format", "jax")
    assert emitted.code == 0, emitted.err
    assert emitted.out.splitlines() == ["balance.yaml", "train_jax.py"]

    losses = [float(line.split()[-1]) for line in train(here, "--steps", "4", "--seed", "3").splitlines()]
    assert losses == pytest.approx(_torch_losses(here, steps=4, seed=3), abs=2e-4)
    told = train(here, "--compile", "v2")
    assert told.startswith("every device: ")
    assert "predicted, stage by stage: " in told


def _torch_losses(folder: Path, *, steps: int, seed: int) -> list[float]:
    import torch

    scope: dict[str, object] = {}
    exec((folder / "model.py").read_text(), scope)
    torch.manual_seed(seed)
    model = scope["build_model"]()  # type: ignore[operator]
    optimizer = scope["build_optimizer"](model.parameters())  # type: ignore[operator]
    losses = []
    for step in range(steps):
        torch.manual_seed(seed * 1_000_003 + step)
        inputs, targets = scope["example_batch"](8)  # type: ignore[operator]
        loss = scope["loss_fn"](model(inputs), targets)  # type: ignore[operator]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_without_the_extra_profile_says_what_to_install(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 2, one error, and the command."""
    monkeypatch.setattr(torchax_adapter.importlib.util, "find_spec", lambda _: None)
    refused = call(capsys, "profile", "model.py", "--device", "tpu:v2")
    assert refused.code == 2
    assert "not installed" in refused.error
    assert "pip install 'gpipe-plan[tpu]'" in refused.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--schedule", "1f1b"), "the JAX program runs GPipe's schedule"),
        (("--replicas", "2"), "the JAX program is one pipeline, not 2 side by side"),
    ],
)
def test_plans_that_one_program_cannot_run_are_refused(
    here: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], problem: str
) -> None:
    """With what to do instead; no file is written."""
    _hand_written(here, (10, 10, 10, 10))
    assert (
        call(capsys, "solve", "--devices", "4", "--mem", "1GB", "--batch", "8", "--micro-batches", "4", *options).code
        == 0
    )
    refused = call(capsys, "emit", "--format", "jax")
    assert refused.code == 2
    assert problem in refused.error
    assert not (here / "train_jax.py").exists()


def test_stages_too_unlike_for_one_program_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One has the parameters, another the activations: each fits, a device with as much of both does not."""
    _hand_written(here, (600, 1, 1, 1), saved=(1, 1, 1, 400))
    cut = ("--balance", "1,3", "--micro-batches", "8")
    assert call(capsys, "solve", "--devices", "2", "--mem", "4MB", "--batch", "8", *cut).code == 0
    refused = call(capsys, "emit", "--format", "jax")
    assert refused.code == 2
    assert "every device holds as much as the stage with most of it" in refused.error


def _hand_written(folder: Path, parameters: tuple[int, ...], saved: tuple[int, ...] = (1, 1, 1, 1)) -> None:
    """A profile in kB, of one sample per micro-batch and two."""
    layers = "".join(
        f"- {{name: l{n}, parameter_bytes: {1000 * p}, forward_us: [5, 9], backward_us: [9, 16], "
        f"output_bytes: [1000, 2000], saved_bytes: [{1000 * s}, {2000 * s}]}}\n"
        for n, (p, s) in enumerate(zip(parameters, saved, strict=True))
    )
    text = (
        "schema: gpipe-plan/profile/v1\nmodel: {source: 'model.py:build_model'}\ndevice: {kind: tpu}\n"
        f"micro_batch_sizes: [1, 2]\nlayers:\n{layers}"
    )
    (folder / "profile.yaml").write_text(text)
