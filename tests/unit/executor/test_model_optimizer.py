"""Tests of optimizers of a stage, which keep what a builder decides by position in the whole model."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError, UsageError
from planner.executor import Pipeline, StepRecord
from planner.executor.keep.optimizer_state import OptimizerState
from planner.model.optimizers import WholeModelOptimizer
from tests.support.cli import EXAMPLE, HEAD, LOSS, MODEL, write_model
from tests.support.training import Case, run_cases
from tests.unit.executor.test_pipeline import OPTIMIZER, balance_of
from tests.unit.model.test_optimizer_scope import ClippedSGD, SmallRateClip

pytestmark = pytest.mark.usefixtures("one_process")

LAYER_WISE = """
def build_optimizer(parameters):
    groups = [{"params": [p], "lr": 0.5 * 0.7 ** n} for n, p in enumerate(parameters)]
    return torch.optim.SGD(groups, lr=0.5, momentum=0.9)
"""
LAST_TWO = """
def build_optimizer(parameters):
    return torch.optim.Adagrad(list(parameters)[-2:], lr=0.1)
"""
MARKED = """
def build_optimizer(parameters):
    parameters = list(parameters)
    marked, others = ([p for p in parameters if hasattr(p, "slow") == is_slow] for is_slow in (True, False))
    return torch.optim.SGD([{"params": others}, {"params": marked, "lr": 0.01}], lr=0.5)
"""
TIED = """
def build_model():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    model[4].weight = model[0].weight
    model[0].bias.slow = True
    model[2].weight.slow = True
    return model
"""


@pytest.mark.slow
def test_parameters_are_optimized_as_in_a_plain_loop(tmp_path: Path) -> None:
    """Rates by position, only the last two parameters, marked parameters, and a tied weight."""
    tied = HEAD + TIED + EXAMPLE.replace("torch.randn(batch_size, 4)", "torch.randn(batch_size, 8)") + LOSS
    texts = [model + build for model in (MODEL, tied) for build in (LAYER_WISE, LAST_TWO, MARKED)]
    cases = []
    for n, text in enumerate(texts):
        folder = tmp_path / str(n)
        folder.mkdir()
        cases.append(Case(model=write_model(folder, text), balance=(3, 2), steps=3, decay=0.5))
    for case, result in zip(cases, run_cases(cases, tmp_path, ("split",)), strict=True):
        assert result["split_parameter"] < 1e-6, case
        assert not result["replicas_differ"], case


def test_every_rank_has_the_groups_of_the_whole_model(tmp_path: Path) -> None:
    records: list[StepRecord] = []
    pipeline = Pipeline(balance_of(tmp_path, MODEL + LAYER_WISE), on_step=records.append)
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    with pipeline.step(*pipeline.example_batch(0)):
        optimizer.step()
    pipeline.close()
    assert records[0].learning_rates == pytest.approx([0.5 * 0.7**n for n in range(6)])


def test_options_of_groups_are_restored_under_another_plan() -> None:
    """By names of parameters, and by number for a group that is empty on a rank."""
    names = [f"{n}.weight" for n in range(4)]
    parameters = [nn.Parameter(torch.zeros(2)) for _ in names]

    def build(given: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [(f"p{n}", p)], "lr": 0.1} for n, p in enumerate(given)])

    def state(*numbers: int) -> tuple[OptimizerState, torch.optim.Optimizer]:
        optimizer = WholeModelOptimizer(build, parameters).build_for([(parameters[n], parameters[n]) for n in numbers])
        own = {names[n]: parameters[n] for n in numbers}
        return OptimizerState(optimizer, own, {name: name for name in names}), optimizer

    saved = []
    for numbers in ((0, 1, 2), (3,)):
        one, optimizer = state(*numbers)
        for n, group in enumerate(optimizer.param_groups):
            group["lr"] = 0.5**n
        saved += one.parameter_groups()
    other, optimizer = state(2, 3)
    other.restore({}, saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5**n for n in range(4)]
    assert [group["param_names"] for group in optimizer.param_groups] == [[], [], ["p2"], ["p3"]]


def test_an_optimizer_of_the_script_is_checked_when_a_run_starts(tmp_path: Path) -> None:
    """It was not profiled. With one stage, it may read all parameters."""
    pipeline = Pipeline(balance_of(tmp_path, MODEL + OPTIMIZER))
    assert isinstance(pipeline.optimizer(ClippedSGD), ClippedSGD)
    pipeline.balance = replace(pipeline.balance, balance=(3, 2))
    with pytest.raises(ModelError, match="reads all parameters"):
        pipeline.optimizer(ClippedSGD)
    pipeline.close()


def test_a_pipeline_offers_no_copy_of_the_model_that_is_not_trained(tmp_path: Path) -> None:
    """A script that changed such a copy would change nothing."""
    pipeline = Pipeline(balance_of(tmp_path, MODEL + OPTIMIZER))
    offered = [value for name, value in vars(pipeline).items() if not name.startswith("_")]
    assert not any(isinstance(value, nn.Module) for value in offered)
    pipeline.close()


def test_other_optimizers_may_only_step_within_one_of_the_pipeline(tmp_path: Path) -> None:
    """Also after a step that failed, and after a step in another one."""
    pipeline = Pipeline(balance_of(tmp_path, MODEL + OPTIMIZER))
    inner, outer = (pipeline.optimizer(partial(torch.optim.SGD, lr=0.1)) for _ in range(2))
    own = torch.optim.SGD(pipeline._meta_model.parameters(), lr=0.1)

    def step_others(*_: Any) -> None:
        inner.step()
        own.step()

    def fail(*_: Any) -> None:
        raise ValueError("failed")

    with pipeline.step(*pipeline.example_batch(0)):
        outer.register_step_pre_hook(step_others)
        outer.step()
        outer.register_step_pre_hook(fail)
        with pytest.raises(ValueError, match="failed"):
            outer.step()
        with pytest.raises(UsageError, match="has not made this SGD"):
            own.step()
    pipeline.close()


@pytest.mark.slow
def test_an_optimizer_that_begins_to_clip_during_a_run_raises_in_that_step(tmp_path: Path) -> None:
    pipeline = Pipeline(balance_of(tmp_path, MODEL + OPTIMIZER))
    pipeline.balance = replace(pipeline.balance, balance=(3, 2))
    optimizer = pipeline.optimizer(partial(SmallRateClip, lr=0.1))
    with pipeline.step(*pipeline.example_batch(0)):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-3
    with pytest.raises(ModelError, match="from step 2 of this run on"), pipeline.step(*pipeline.example_batch(1)):
        optimizer.step()
    pipeline.close()
