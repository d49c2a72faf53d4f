"""Layers as JAX functions, split into forward and backward, and workarounds for torchax."""

import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from planner.tpu.layer_functions import ForwardBackwardFunction, LayerFunction

pytestmark = pytest.mark.skipif(find_spec("torchax") is None, reason="needs the extra: pip install 'gpipe-plan[tpu]'")


def split_layer(function: "LayerFunction") -> "ForwardBackwardFunction":
    """Call the function of `split_layer`, which imports jax late: other tests in this process start processes."""
    from planner.tpu import layer_functions

    return layer_functions.split_layer(function)


def function_of(module: nn.Module, *inputs: Tensor) -> "LayerFunction":
    from planner.tpu.layer_functions import layer_function

    def run(values: Sequence[Any]) -> list[Any]:
        output = module(*values)
        return [output] if isinstance(output, Tensor) else list(output)

    return layer_function(module, run, inputs)


def array(tensor: Tensor) -> Any:
    import jax

    return jax.numpy.asarray(tensor.detach().numpy())


def run_split(
    module: nn.Module, *inputs: Tensor
) -> tuple["ForwardBackwardFunction", list[Any], dict[str, Any], list[Any]]:
    """Return the split function, outputs, and gradients of parameters and inputs."""
    import jax

    function = function_of(module, *inputs)
    split = split_layer(function)
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    trained = {name: array(state[name]) for name in function.trained}
    fixed = {name: array(state[name]) for name in function.fixed}
    given = (trained, fixed, [array(tensor) for tensor in inputs], jax.random.key(0))
    outputs, made = split.forward(*given)
    ones = [jax.numpy.ones_like(outputs[n]) for n in split.differentiable]
    of_trained, of_inputs = split.backward(given, outputs, made, ones)
    return split, outputs, of_trained, of_inputs


class Block(nn.Module):
    """Residual, norm, attention, a table in an attribute, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.table = torch.arange(8.0)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = nn.functional.scaled_dot_product_attention(hidden, hidden, self.norm(hidden), is_causal=True)
        return hidden + self.inner(mixed + self.table) + self.frozen(hidden)


@pytest.mark.slow
def test_split_layers_equal_torch() -> None:
    torch.manual_seed(0)
    block, hidden = Block(), torch.randn(2, 4, 8, requires_grad=True)
    _, outputs, of_trained, of_inputs = run_split(block, hidden)
    expected = block(hidden)
    expected.sum().backward()
    torch.testing.assert_close(torch.tensor(outputs[0].tolist()), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.tensor(of_inputs[0].tolist()), hidden.grad, rtol=1e-4, atol=1e-4)
    assert set(of_trained) == {name for name, p in block.named_parameters() if p.requires_grad}
    for name, parameter in block.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(torch.tensor(of_trained[name].tolist()), parameter.grad, rtol=1e-4, atol=1e-4)


def test_cheap_results_are_recomputed() -> None:
    """Of linear, ReLU, linear, only the first product is kept."""
    layer = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    split = split_layer(function_of(layer, torch.randn(5, 8, requires_grad=True)))
    assert [tuple(shape.shape) for shape in split.made_residual_shapes] == [(5, 32)]
    assert {residual.kind for residual in split.residuals} == {"state", "input", "made"}


def test_outputs_that_are_inputs_are_recorded() -> None:
    """They take no memory."""

    class Passing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, hidden: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(hidden), skip

    tensors = (torch.randn(2, 4, requires_grad=True), torch.randn(2, 3, requires_grad=True))
    split, _, _, of_inputs = run_split(Passing(), *tensors)
    assert split.passed == (-1, 1)
    assert of_inputs[1].shape == (2, 3)
    assert split.made_residual_shapes == []


@pytest.mark.slow
def test_dropout_draws_from_the_given_key() -> None:
    """Forward and backward draw the same numbers."""
    import jax

    function = function_of(nn.Dropout(0.5), torch.ones(64, requires_grad=True))
    split = split_layer(function)
    ones = array(torch.ones(64))
    given = ({}, {}, [ones], jax.random.key(3))
    outputs, made = split.forward(*given)
    _, of_inputs = split.backward(given, outputs, made, [ones])
    assert 0 < (outputs[0] == 0).sum() < 64
    assert (of_inputs[0] == outputs[0]).all()
    assert (split.forward({}, {}, [ones], jax.random.key(4))[0][0] != outputs[0]).any()


@pytest.mark.nightly
def test_torchax_still_needs_the_workaround_for_named_tensors() -> None:
    """`_without_named_tensors` can go if torchax imports without it."""
    done = subprocess.run([sys.executable, "-c", "import torchax"], capture_output=True, text=True, check=False)
    assert done.returncode == 1, "torchax imports with this torch: remove `_without_named_tensors`"
    assert "has no overload name 'dim_Dimname'" in done.stderr


def test_torchax_still_needs_the_workaround_for_random_state() -> None:
    folder = find_spec("torchax").submodule_search_locations[0]
    scope: dict[str, Any] = {}
    exec(Path(folder, "device_module.py").read_text(encoding="utf-8"), scope)
    with pytest.raises(TypeError):
        scope["get_rng_state"](0)
    assert "current_stream" not in scope, "torchax has streams: remove their workarounds"


def test_torch_still_compiles_models_with_torchax() -> None:
    """Otherwise torch would ask its own runtime for the stream of a device that only JAX drives."""
    import planner.tpu.torchax_adapter  # noqa: F401

    assert not torch.accelerator.is_available()
    torch._dynamo.reset()
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    assert torch.equal(torch.compile(model, backend="eager")(x), model(x))
