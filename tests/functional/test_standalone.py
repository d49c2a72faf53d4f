"""A script that needs torch alone trains what the unpipelined model, and our own executor, train."""

import re
from pathlib import Path

import pytest
import torch

from planner.cli.main import run
from planner.files import read_run
from planner.model.load import load_model
from tests.support.cli import FAST, no_calibration
from tests.support.ranks import run_ranks
from tests.support.training import ROOT, torchrun

pytestmark = pytest.mark.slow

STEPS = 3
MODELS = {
    "mlp": (["depth=3", "width=32"], "3,4", "gpipe", "always"),
    "transformer_lm": (
        ["layers=2", "width=32", "feed_forward=64", "heads=2", "vocabulary=64", "tokens=16"],
        *("2,2", "1f1b", "except-last"),
    ),
}


def test_losses_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sample models, both schedules, recomputed; `planner` cannot be imported while the scripts run."""
    monkeypatch.chdir(tmp_path)
    no_calibration(monkeypatch)
    expected = {}
    for name, (settings, balance, schedule, recompute) in MODELS.items():
        model, folder = str(ROOT / f"sample_models/{name}.py"), tmp_path / name
        words = [word for setting in settings for word in ("--set", setting)]
        assert run(["profile", model, *FAST, *words]) == 0
        options = ["--batch", "8", "--micro-batches", "4", "--schedule", schedule, "--recompute", recompute]
        assert run(["solve", "--devices", "2", "--mem", "8GB", "--balance", balance, *options]) == 0
        assert run(["emit", "--standalone", "-o", str(folder)]) == 0
        assert run(["emit", "-o", str(tmp_path / f"own_{name}")]) == 0
        expected[name] = unpipelined(model, settings)
    scripts = [str(tmp_path / name / "train.py") for name in MODELS]
    worker = str(ROOT / "tests/support/standalone_worker.py")
    told = torchrun(2, [worker, str(STEPS), *scripts], tmp_path)
    for name, part in zip(MODELS, told.split("script ")[-len(MODELS) :], strict=True):
        losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+),", part, re.MULTILINE)]
        assert losses == pytest.approx(expected[name], abs=2e-6), name
    own = tmp_path / "own_mlp"
    run_ranks(2, [str(own / "train.py"), "--steps", str(STEPS), "--seed", "3", "--report", "run.json"], own)
    assert read_run(str(own / "run.json")).losses == pytest.approx(expected["mlp"], abs=2e-6)


def unpipelined(model: str, settings: list[str]) -> list[float]:
    """Losses of the same training in one process, without micro-batches."""
    loaded = load_model(model, settings=dict(setting.split("=") for setting in settings))
    torch.manual_seed(3)
    whole = loaded.build()
    optimizer = loaded.build_optimizer(whole.parameters())
    losses = []
    for step in range(STEPS):
        torch.manual_seed(3 * 1_000_003 + step)
        batch = loaded.example_batch(8)
        loss = loaded.loss_fn(whole(batch.inputs), batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
