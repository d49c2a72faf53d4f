"""Tests of the records of what a training script changes."""

import pytest
import torch
from torch import nn

from planner.core.errors import UsageError
from planner.executor.run.script_changes import ScriptChangeRecorder, numbers_in_options


def test_numbers_are_compared_of_the_options_that_the_optimizer_knows() -> None:
    """Not of entries that a script adds, such as a norm for its log, and not in tensors of another device."""
    groups = [{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.5), betas=(0.25, 0.75), eps=0.0, weight_decay=2)
    first, second = optimizer.param_groups
    first["grad_norm"] = 3.0
    second["lr"] = torch.tensor(0.5, device="meta")
    names = ["lr", "betas", "eps", "weight_decay", "foreach"]
    assert set(names) <= optimizer.defaults.keys()
    assert numbers_in_options(optimizer.param_groups, names) == [0.5, 0.25, 0.75, 0.25, 0.75, 0.0, 0.0, 2.0, 2.0]
    assert 3.0 not in numbers_in_options(optimizer.param_groups, list(optimizer.defaults))


@pytest.mark.parametrize("is_before_step", [True, False])
def test_weights_that_change_while_a_script_draws_numbers_may_change_in_the_block(*, is_before_step: bool) -> None:
    """Before a step, the numbers may be an augmentation of the mini-batch, and the change a weight decay."""
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4)
    recorder = ScriptChangeRecorder([weight])
    recorder.begin_block()
    if is_before_step:
        recorder.end_block()
        recorder.begin_batch()
    torch.rand(1)
    with torch.no_grad():
        weight.mul_(0.5)
    with pytest.raises(UsageError, match="draws random numbers while it changes weights") as refused:
        recorder.check_before_step() if is_before_step else recorder.end_block()
    assert ("in the block of `with pipeline.step(…)`" in refused.value.hint) == is_before_step
    assert "generator of its own" in refused.value.hint
