"""Memory of input-gradient (I) and weight-gradient (W) passes of layers whose bytes are known."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from planner.core.values.profile import SplitMemory
from planner.device.meter import CpuMemoryMeter
from planner.profile.split_memory import measure_split_memory
from planner.profile.units import LayerToMeasure, MeasurementInput
from tests.support.measure import loaded_model, profile_of_model

B, N = 4, 1024
ROW = 4 * B * N  # bytes of a float32 tensor of shape (B, N)
WEIGHT = 4 * N * N
SLACK = 64  # a scalar here and there


def split_memory_of(module: nn.Module, value: Any) -> SplitMemory:
    """Return the record of `module` for this input."""
    leaves, spec = tree_flatten(value)
    unit = LayerToMeasure(name="layer", module=module, loss_fn=None, digest="")
    return measure_split_memory(unit, MeasurementInput(tuple(leaves), spec, None), CpuMemoryMeter())


def linear() -> nn.Linear:
    return nn.Linear(N, N, bias=False)


def rows(*, grad: bool = True) -> Tensor:
    return torch.randn(B, N, requires_grad=grad)


def test_a_linear_layer_holds_input_and_output_gradient_for_w() -> None:
    record = split_memory_of(linear(), rows())
    assert (record.held_bytes, record.held_input_bytes) == (2 * ROW, ROW)
    assert record.weight_gradient_bytes == WEIGHT
    assert record.input_peak_bytes == record.first_input_peak_bytes == pytest.approx(2 * ROW, abs=SLACK)
    assert record.first_weight_peak_bytes == pytest.approx(2 * ROW + WEIGHT, abs=SLACK)
    assert record.weight_peak_bytes == pytest.approx(2 * ROW + WEIGHT, abs=SLACK)  # a gradient that is added


def test_held_outputs_and_their_gradients_count_in_i() -> None:
    record = split_memory_of(linear(), rows())
    assert record.output_input_peak_bytes == pytest.approx(record.input_peak_bytes + ROW, abs=SLACK)
    assert record.end_input_peak_bytes == pytest.approx(record.input_peak_bytes + ROW, abs=SLACK)


def test_an_output_that_backward_needs_counts_once() -> None:
    record = split_memory_of(nn.Sequential(linear(), nn.ReLU()), rows())
    assert record.output_input_peak_bytes == pytest.approx(3 * ROW, abs=SLACK)
    assert record.input_peak_bytes == pytest.approx(3 * ROW, abs=SLACK)
    assert record.end_input_peak_bytes == pytest.approx(4 * ROW, abs=SLACK)


def test_a_first_layer_computes_no_input_gradient() -> None:
    record = split_memory_of(linear(), rows(grad=False))
    assert record.input_peak_bytes == pytest.approx(ROW, abs=SLACK)
    assert record.held_bytes == 2 * ROW


def test_a_norm_has_no_w_pass() -> None:
    """The gradients of its small weights are computed in I."""
    record = split_memory_of(nn.LayerNorm(N), rows())
    assert (record.held_bytes, record.weight_gradient_bytes) == (0, 0)
    assert (record.first_weight_peak_bytes, record.weight_peak_bytes) == (0, 0)
    assert record.first_input_peak_bytes >= 2 * ROW


def test_an_embedding_holds_indices_and_output_gradient_for_w() -> None:
    numbers = torch.randint(N, (256,))
    record = split_memory_of(nn.Embedding(N, 64), numbers)
    assert record.held_input_bytes == numbers.nbytes
    assert record.held_bytes == numbers.nbytes + 256 * 64 * 4
    assert record.weight_gradient_bytes == N * 64 * 4


def test_measuring_split_memory_leaves_no_gradients() -> None:
    layer = linear()
    split_memory_of(layer, rows())
    assert layer.weight.grad is None


def test_frozen_weights_have_no_w_pass() -> None:
    record = split_memory_of(linear().requires_grad_(requires_grad=False), rows())
    assert (record.held_bytes, record.weight_gradient_bytes, record.weight_peak_bytes) == (0, 0, 0)


@pytest.fixture(scope="module")
def profiled() -> Any:
    """Return a profile of layers with and without a W pass."""
    model = nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512), nn.Linear(512, 512))
    return profile_of_model(loaded_model(model, 512), sizes=(64, 512), repeats=10)


def test_profiles_have_times_and_memory_of_both_passes(profiled: Any) -> None:
    for layer in profiled.layers:
        assert len(layer.backward_input_us) == len(layer.backward_weight_us) == len(layer.split) == 2
        assert layer.weight_held_bytes == tuple(record.held_bytes for record in layer.split)
    assert profiled.layers[1].backward_weight_us == (0.0, 0.0)
    assert all(us > 0 for layer in (profiled.layers[0], profiled.layers[2]) for us in layer.backward_weight_us)


@pytest.mark.nightly
def test_times_of_both_passes_add_up_to_the_backward(profiled: Any) -> None:
    """Within half of it, on a machine that others use."""
    layer = profiled.layers[2]
    both_us = layer.backward_input_us[1] + layer.backward_weight_us[1]
    assert 0.5 * layer.backward_us[1] < both_us < 1.5 * layer.backward_us[1]
