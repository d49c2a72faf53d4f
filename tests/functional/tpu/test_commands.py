"""Tests of the TPU workflow without a TPU: profile, solve, show, emit, and the emitted JAX program."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from planner.core import extras
from planner.core.values.devices import accelerator
from planner.files import read_plan, read_profile, write
from planner.tpu import training
from planner.tpu.training import JaxArguments
from tests.support.chains import compiled
from tests.support.cli import EXAMPLE, HEAD, LOSS, call, environment, write_model
from tests.support.training import Case, write_balance

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

NORMALISED = """
import torch
from torch import nn

def build_model():
    layers = [nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)]
    layers[3].bias = layers[1].bias
    return nn.Sequential(*layers)

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def example_batch(size):
    return 3.0 + 2.0 * torch.randn(size, 8), torch.randn(size, 8)

loss_fn = nn.functional.mse_loss
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_model(tmp_path, MODEL)
    return tmp_path


def train(folder: Path, *arguments: str, code: int = 0) -> str:
    """Run the emitted script, check its exit code, and return its output."""
    done = subprocess.run(
        [sys.executable, "train_jax.py", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stdout


@installed
@pytest.mark.nightly
def test_the_jax_program_has_the_losses_of_torch(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compile for absent cores and train on virtual devices."""
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

    *lines, wrote = train(here, "--steps", "4", "--seed", "3", "--save", "model.pt").splitlines()
    losses = [float(line.split()[-1]) for line in lines]
    expected, model = _torch_losses(here, steps=4, seed=3)
    assert losses == pytest.approx(expected, abs=2e-4)
    assert wrote == "wrote model.pt"
    saved = torch.load("model.pt", weights_only=True)
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.allclose(saved[name], value, atol=1e-3) for name, value in model.state_dict().items())
    script = (here / "train_jax.py").read_text()
    (here / "train_jax.py").write_text(re.sub(r"LIMIT_BYTES = \d+", "LIMIT_BYTES = 1000", script))
    compiled, predicted, verdict = train(here, "--compile", "v2", code=1).splitlines()
    assert compiled.startswith("every device: ")
    assert predicted.startswith("predicted: ")
    assert verdict == "does not fit: the plan's limit is 1000 B"


@pytest.mark.parametrize(
    ("temporary", "cap", "last", "code"),
    [
        (5 * 2**30, 6 * 2**30, "fits: the plan's limit is 6.00 GiB", 0),
        (6 * 2**30, 6 * 2**30, "does not fit: the plan's limit is 6.00 GiB", 1),
        (6 * 2**30, 9 * 2**30, "fits: the memory that programs can use on a tpu:v2 is 7.48 GiB", 0),
        (7 * 2**30, 9 * 2**30, "does not fit: the memory that programs can use on a tpu:v2 is 7.48 GiB", 1),
    ],
)
def test_compiled_memory_is_compared_with_plan_and_chip(temporary: int, cap: int, last: str, code: int) -> None:
    """The exit code reports the result."""
    found = training.CompiledMemory(argument_bytes=2**30, temporary_bytes=temporary)
    printed, answer = training.fit_report(found, 2**30, plan_bytes=cap, chip=accelerator("tpu:v2"))
    assert printed.splitlines()[-1] == last
    assert answer == code


@pytest.mark.slow
@installed
def test_weights_are_loaded_and_saved_under_the_names_of_the_model(tmp_path, capsys, monkeypatch):
    """Tied weights are saved once."""
    # A script decides how many devices its process has; other tests in this one want the eight that there are.
    import jax

    from planner.tpu import trainer

    monkeypatch.setattr(trainer, "platform_devices", lambda _, num: jax.devices()[:num])
    write_model(tmp_path, NORMALISED)
    write_balance(Case(model=tmp_path / "model.py", balance=(1, 3), micro_batches=2), tmp_path / "balance.yaml")
    first = _one_step(tmp_path, seed=1, save="first.safetensors")
    assert "wrote " in capsys.readouterr().out
    with safe_open(tmp_path / "first.safetensors", "pt") as file:
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    assert "3.bias" not in state  # it is that of layer 1
    assert state["0.running_mean"] == pytest.approx(torch.full((8,), 3.0), abs=0.5)
    assert state["0.running_var"] == pytest.approx(torch.full((8,), 4.0), rel=0.4)

    again = _one_step(tmp_path, seed=1, weights="first.safetensors", save="again.pt")
    assert again < first - 1e-3
    saved = torch.load(tmp_path / "again.pt", weights_only=True)
    assert torch.equal(saved["1.bias"], saved["3.bias"])
    assert not torch.allclose(saved["1.weight"], state["1.weight"])

    write_model(tmp_path, NORMALISED.replace("nn.Tanh()", "nn.ReLU(), nn.Tanh()").replace("layers[3]", "layers[4]"))
    with pytest.raises(SystemExit) as refused:
        _one_step(tmp_path, seed=1, save="never.pt")
    assert refused.value.code == 2
    assert "the model is not the one that was planned" in capsys.readouterr().err
    assert not (tmp_path / "never.pt").exists()


def _one_step(folder: Path, *, seed: int, save: str, weights: str | None = None) -> float:
    """Train one step and return the loss before it."""
    given = JaxArguments(
        steps=1,
        seed=seed,
        device="cpu",
        compile=None,
        weights=weights and str(folder / weights),
        save=str(folder / save),
    )
    with training.jax_training(folder / "balance.yaml", given) as begun:
        ((inputs, targets),) = begun.batches(1)
        loss, state = begun.step(begun.begin(), inputs, targets, 0)
        begun.save(state, str(folder / save))
    return loss


def _torch_losses(folder: Path, *, steps: int, seed: int) -> tuple[list[float], nn.Module]:
    scope: dict[str, object] = {}
    exec((folder / "model.py").read_text(), scope)
    torch.manual_seed(seed)
    model = scope["build_model"]()
    optimizer = scope["build_optimizer"](model.parameters())
    losses = []
    for step in range(steps):
        torch.manual_seed(seed * 1_000_003 + step)
        inputs, targets = scope["example_batch"](8)
        loss = scope["loss_fn"](model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def test_profile_without_the_extra_prints_how_to_install_it(here, capsys, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    refused = call(capsys, "profile", "model.py", "--device", "tpu:v2")
    assert refused.code == 2
    assert "not installed" in refused.error
    assert "pip install 'gpipe-plan[tpu]'" in refused.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--schedule", "1f1b"), "the JAX program runs GPipe's schedule"),
        (("--replicas", "2"), "the JAX program is one pipeline, not 2 replicas"),
        ((), "the profile does not record the memory that layers need in one compiled program"),
    ],
)
def test_plans_that_jax_cannot_run_are_refused_with_a_remedy(here, capsys, options, problem):
    _hand_written(here, (10, 10, 10, 10), is_compiled=False)
    assert (
        call(capsys, "solve", "--devices", "4", "--mem", "1GB", "--batch", "8", "--micro-batches", "4", *options).code
        == 0
    )
    refused = call(capsys, "emit", "--format", "jax")
    assert refused.code == 2
    assert problem in refused.error
    assert not (here / "train_jax.py").exists()


@pytest.mark.slow
def test_stages_with_too_different_memory_are_refused(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One program reserves the maximum of parameters and activations on all devices."""
    _hand_written(here, (600, 1, 1, 1), saved=(1, 1, 1, 400))
    cut = ("--balance", "1,3", "--micro-batches", "8")
    assert call(capsys, "solve", "--devices", "2", "--mem", "4MB", "--batch", "8", *cut).code == 0
    refused = call(capsys, "emit", "--format", "jax")
    assert refused.code == 1
    assert "every device needs the largest amount of each component over all stages" in refused.error
    assert "ask the compiler (`train_jax.py --compile v2`)" in refused.err


def _hand_written(
    folder: Path,
    parameters: tuple[int, ...],
    saved: tuple[int, ...] = (1, 1, 1, 1),
    *,
    is_compiled: bool = True,
) -> None:
    """Write a profile for micro-batches of one and two samples; sizes are in kB."""
    layers = "".join(
        f"- {{name: 'l{n}', parameter_bytes: {1000 * p}, forward_us: [5, 9], backward_us: [9, 16], "
        f"output_bytes: [1000, 2000], saved_bytes: [{1000 * s}, {2000 * s}]}}\n"
        for n, (p, s) in enumerate(zip(parameters, saved, strict=True))
    )
    text = (
        "schema: gpipe-plan/profile/v1\nmodel: {source: 'model.py:build_model'}\n"
        f"device: {{kind: tpu, name: TPU v2 core}}\n"
        f"micro_batch_sizes: [1, 2]\nlayers:\n{layers}"
    )
    (folder / "profile.yaml").write_text(text)
    if is_compiled:
        write("profile.yaml", compiled(read_profile("profile.yaml")))
