"""Tests of the records of what a training script changes."""

import torch
from torch import nn

from planner.executor.run.script_changes import numbers_in_options


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
