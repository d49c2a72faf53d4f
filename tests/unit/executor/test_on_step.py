"""Tests of step callbacks, and of their examples in docs/training.md."""

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from planner.executor import Pipeline, StepRecord
from tests.support.cli import MODEL
from tests.support.docs import blocks
from tests.unit.executor.test_pipeline import OPTIMIZER, balance_of

pytestmark = pytest.mark.usefixtures("one_process")

EXAMPLES = [block for block in blocks("docs/training.md", "python") if "def on_step" in block]


def train(path: Path, on_step: Callable[[StepRecord], Any] | None, *, first: int = 0) -> tuple[list[float], float]:
    """Run three steps with a falling learning rate; return the losses and the script's next random number."""
    pipeline = Pipeline(path, seed=1, on_step=on_step)
    pipeline.step_index = first
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for inputs, targets in pipeline.batches(first + 3):
        with pipeline.step(inputs, targets):
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    drawn = float(torch.rand(())) + random.random()
    pipeline.close()
    return pipeline.losses, drawn


def test_callbacks_get_every_step_and_its_learning_rate(tmp_path: Path) -> None:
    """Random draws of the callback do not change the training."""
    path = balance_of(tmp_path, MODEL.replace("nn.ReLU()", "nn.Dropout(0.5)") + OPTIMIZER)
    records: list[StepRecord] = []
    drawn: list[float] = []

    def on_step(record: StepRecord) -> None:
        records.append(record)
        drawn.append(float(torch.rand(())) + random.random())

    losses, after = train(path, on_step, first=4)
    assert [record.step for record in records] == [4, 5, 6]
    assert [record.loss for record in records] == losses
    assert [record.learning_rates for record in records] == [(0.1,), (0.05,), (0.025,)]
    assert {(record.samples, record.skipped) for record in records} == {(8, False)}
    assert all(record.samples_per_s == pytest.approx(8 / record.seconds) for record in records)
    assert len(set(drawn)) == 3
    assert train(path, None, first=4) == (losses, after)


def test_errors_of_callbacks_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        train(balance_of(tmp_path, MODEL + OPTIMIZER), lambda record: 1 / record.step)


@pytest.mark.filterwarnings("ignore")  # what other packages warn of while they are imported is not ours
@pytest.mark.parametrize("to", ["steps.csv", "tensorboard", "wandb", "mlflow"])
def test_callback_examples_of_the_documentation_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str) -> None:
    if to == "tensorboard":
        pytest.importorskip("tensorboard", reason="tensorboard is not installed", exc_type=ImportError)
    monkeypatch.chdir(tmp_path)
    logged: list[tuple[dict[str, float], int]] = []
    service = SimpleNamespace(
        run=None,
        init=lambda *, project: setattr(service, "run", project),
        log=lambda metrics, *, step: logged.append((metrics, step)),
        log_metrics=lambda metrics, *, step: logged.append((metrics, step)),
    )
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(sys.modules, name, service)
    (example,) = (block for block in EXAMPLES if to in block)
    names: dict[str, Any] = {}
    exec(compile(example, "training.md", "exec"), names)
    losses, _ = train(balance_of(tmp_path, MODEL + OPTIMIZER), names["on_step"])
    if to in ("wandb", "mlflow"):
        assert [(metrics["loss"], step) for metrics, step in logged] == [(loss, n) for n, loss in enumerate(losses)]
        assert service.run == ("pipeline" if to == "wandb" else None)
    elif to == "steps.csv":
        rows = [line.split(",") for line in (tmp_path / to).read_text().splitlines()]
        assert [float(row[1]) for row in rows] == losses
    else:
        names["writer"]().close()
        assert scalars(tmp_path / "runs", "loss") == pytest.approx(losses)


def scalars(folder: Path, tag: str) -> list[float]:
    """Return TensorBoard's values of a scalar."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return [event.value for event in accumulator.Scalars(tag)]
