"""Optimizers as functions of JAX arrays."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planner.model.optimizers import OPTIMIZERS
from planner.tpu.compiler import optimizer_description

installed = pytest.mark.skipif(find_spec("torchax") is None, reason="needs the extra: pip install 'gpipe-plan[tpu]'")


class Own(torch.optim.SGD):
    """Not torch's."""


@installed
@pytest.mark.parametrize("name", ["adam", "adamw", "momentum", "rmsprop", "sgd"])
def test_a_step_is_torchs(name: str) -> None:
    """The second one, which finds a state."""
    from planner.tpu.torchax_optimizer import step_function

    torch.manual_seed(0)
    trained = [nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(7))]
    gradients = [torch.randn(3, 5), torch.randn(7)]
    optimizer = OPTIMIZERS[name](iter(trained))
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()
    before = [p.detach().clone() for p in trained]
    states = [
        value.clone()
        for p in trained
        for value in optimizer.state[p].values()
        if isinstance(value, Tensor) and value.dim()
    ]
    optimizer.step()
    function = step_function(trained, OPTIMIZERS[name])
    assert [tuple(shape.shape) for shape in function.states] == [tuple(state.shape) for state in states]
    stepped, _ = function.call(*([array(tensor) for tensor in tensors] for tensors in (before, states, gradients)))
    for parameter, found in zip(trained, stepped, strict=True):
        # The state is that of the first step, and so is its number: Adam's correction of the second is another one.
        torch.testing.assert_close(torch.from_numpy(np.array(found)), parameter.detach(), rtol=1e-3, atol=1e-3)


def array(tensor: Tensor) -> object:
    import jax

    return jax.numpy.asarray(tensor.numpy())


def test_what_decides_a_step() -> None:
    """The optimizer, its options, and which parameters have which; of code that is not torch's nothing is known."""
    one, two = torch.empty(3), torch.empty(3, 3)
    known = optimizer_description([one, two], OPTIMIZERS["adamw"])
    assert known == optimizer_description([torch.empty(4), torch.empty(1, 9)], OPTIMIZERS["adamw"])
    others = (
        lambda parameters: torch.optim.AdamW(parameters, lr=0.5),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        lambda parameters: torch.optim.AdamW([{"params": [p], "lr": 1e-3} for p in parameters]),
    )
    assert all(optimizer_description([one, two], build) not in (None, known) for build in others)
    assert optimizer_description([one], Own) is None
