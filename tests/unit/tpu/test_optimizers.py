"""Optimizer rules in JAX, compared with torch's optimizers."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from planner.core.errors import UsageError
from planner.model.optimizers import OPTIMIZERS, OptimizerBuilder
from planner.tpu.optimizers import optimizer_rule

installed = pytest.mark.skipif(find_spec("torchax") is None, reason="needs the extra: pip install 'gpipe-plan[tpu]'")


def of(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> OptimizerBuilder:
    return lambda parameters: kind(parameters, lr=0.1, **options)


@installed
@pytest.mark.parametrize(
    "build",
    [
        *(OPTIMIZERS[name] for name in ("adam", "adamw", "momentum", "rmsprop", "sgd")),
        of(torch.optim.SGD, momentum=0.9, dampening=0.5, weight_decay=0.1),
        of(torch.optim.RMSprop, momentum=0.9, weight_decay=0.1),
        of(torch.optim.Adam, weight_decay=0.1),
        of(torch.optim.Adam, weight_decay=0.1, decoupled_weight_decay=True),
    ],
)
def test_first_steps_equal_torchs(build: OptimizerBuilder) -> None:
    from jax import numpy as jnp

    torch.manual_seed(0)
    trained = nn.Parameter(torch.randn(3, 5))
    optimizer = build(iter([trained]))
    rule = optimizer_rule(build, [trained])
    parameter, states = jnp.asarray(trained.detach().numpy()), [jnp.zeros((3, 5))] * rule.num_states
    for number in (1, 2, 3):
        trained.grad = torch.randn(3, 5)
        parameter, states = rule.update(parameter, jnp.asarray(trained.grad.numpy()), states, jnp.int32(number))
        optimizer.step()
        torch.testing.assert_close(torch.from_numpy(np.array(parameter)), trained.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (OPTIMIZERS["adafactor"], "does not support the optimizer Adafactor"),
        (of(torch.optim.Adam, amsgrad=True), "does not support the optimizer Adam with amsgrad"),
        (lambda parameters: torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.1), "SGD has several"),
        (lambda parameters: torch.optim.SGD([next(iter(parameters))], lr=0.1), "SGD has only some of them"),
    ],
)
def test_unsupported_optimizers_are_refused_by_name(build: OptimizerBuilder, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        optimizer_rule(build, [nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(2))])


def test_frozen_parameters_need_no_optimizer() -> None:
    frozen = nn.Parameter(torch.empty(2), requires_grad=False)
    assert optimizer_rule(OPTIMIZERS["sgd"], [nn.Parameter(torch.empty(3)), frozen]).num_states == 0
