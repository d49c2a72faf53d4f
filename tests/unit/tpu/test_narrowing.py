"""Arrays that only matrix products read, in functions and in a model's layers."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.model import load_module
from planner.model.load import LoadedModel
from planner.profile.structure import find_chain
from planner.profile.units import trace_layers
from planner.tpu.compiler import jax_function_of_layer

pytestmark = pytest.mark.skipif(find_spec("torchax") is None, reason="needs the extra: pip install 'gpipe-plan[tpu]'")


def product(a: Any, b: Any, **options: Any) -> Any:
    from jax import numpy as jnp

    return jnp.matmul(a, b, **options)


def called(a: Any, b: Any) -> Any:
    import jax

    return jax.jit(lambda a, b: product(a.T, b.reshape(4, 4)) + 1)(a, b)


def repeated(a: Any, b: Any) -> Any:
    import jax

    return jax.lax.fori_loop(0, 3, lambda _, value: product(value, b), a)


@pytest.mark.parametrize(
    ("function", "narrow"),
    [
        (product, [True, True]),
        (lambda a, b: product(a, b) + a, [False, True]),
        (lambda a, b: product(a + 1, b), [False, True]),
        (lambda a, b: (product(a, b), b), [True, False]),  # what is returned may be read by anyone
        (lambda a, b: product(a, b, precision="highest"), [False, False]),
        (called, [True, True]),
        (repeated, [False, False]),
        (lambda _a, b: product(b, b), [True, True]),  # the first is not read
    ],
)
def test_operands_of_products_only_are_found(function: Callable[[Any, Any], Any], narrow: list[bool]) -> None:
    """Also after operations that move elements, and in called functions."""
    import jax

    from planner.tpu.layer_programs import find_matmul_operands

    square = jax.ShapeDtypeStruct((4, 4), "float32")
    assert find_matmul_operands(jax.make_jaxpr(function)(square, square).jaxpr) == narrow


class Residual(nn.Module):
    """Reads what it receives in a product and a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.linear(value)


def model() -> LoadedModel:
    return load_module(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Residual(), nn.Linear(8, 8)),
        example_batch=lambda size: (torch.randn(size, 8), torch.randn(size, 8)),
        loss_fn=nn.functional.mse_loss,
    )


def test_operands_of_products_only_are_found_in_layers() -> None:
    """A ReLU reads its input's sign, and a residual connection adds it."""
    from planner.tpu.layer_functions import split_layer
    from planner.tpu.layer_programs import matmul_operands_of

    loaded = model()
    chain, lean = find_chain(loaded, torch.device("cpu"))
    units, inputs = trace_layers(chain, loaded, 4, torch.device("cpu"), ghosts=lean)
    functions = [jax_function_of_layer(unit, inputs[unit.digest]) for unit in units]
    readers = [matmul_operands_of(function, split_layer(function)) for function in functions]
    assert [reader.inputs[0] for reader in readers] == [True, False, False, True]
    assert [reader.inputs_in_backward[0] for reader in readers] == [True, False, True, True]
