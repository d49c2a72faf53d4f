"""Memory records of layers whose exact bytes are known."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as pruning
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from planner.core.cost.costs import costs_at
from planner.core.values.profile import BoundaryTensor
from planner.device.meter import CpuMemoryMeter
from planner.profile.memory import measure_weight_casts
from planner.profile.units import LayerToMeasure, MeasurementInput
from tests.support.measure import loaded_model, memory_of, profile_of_model

B, N = 4, 1024
ROW = 4 * B * N  # bytes of a float32 tensor of shape (B, N)
SLACK = 64  # a scalar here and there (the loss, a number wrapped into a tensor)


def given(*, grad: bool = True) -> Tensor:
    return torch.randn(B, N, requires_grad=grad)


def boundary(size: int, *, kept: bool, alias: int = -1, relayed: bool = False, carries: bool = True) -> BoundaryTensor:
    return BoundaryTensor(bytes=size, kept=kept, alias=alias, relayed=relayed, carries=carries)


class WithInput(nn.Module):
    """Returns a new tensor and its input."""

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(value), value


class WithMask(nn.Module):
    """Returns a new tensor and a mask."""

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(value), value > 0


class Stashing(torch.autograd.Function):
    """Saves tensors as attributes of the context, which no saved-tensor hook sees."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.cosine = value.cos()
        ctx.other = torch.empty(1000, dtype=torch.uint8)
        return value.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.cosine


class Stash(nn.Module):
    """A layer with `Stashing`."""

    def forward(self, value: Tensor) -> Tensor:
        return Stashing.apply(value)


SAVED, UNSAVED = boundary(ROW, kept=True), boundary(ROW, kept=False)
VIEW = boundary(ROW, kept=False, alias=0, relayed=True)
KNOWN: dict[str, tuple[Any, int, list[BoundaryTensor], list[BoundaryTensor]]] = {
    "linear saves its input": (lambda: nn.Linear(N, 32), 0, [SAVED], [boundary(4 * B * 32, kept=False)]),
    "relu saves its output": (nn.ReLU, 0, [UNSAVED], [SAVED]),
    "in-place relu": (lambda: nn.ReLU(inplace=True), 0, [SAVED], [boundary(ROW, kept=True, alias=0)]),
    "flatten is a view": (lambda: nn.Flatten(0), 0, [UNSAVED], [VIEW]),
    "identity": (nn.Identity, 0, [UNSAVED], [VIEW]),
    "a mask has no gradient": (WithMask, 0, [UNSAVED], [SAVED, boundary(B * N, kept=False, carries=False)]),
    "batch norm saves mean and deviation": (lambda: nn.BatchNorm1d(N), 2 * 4 * N, [SAVED], [UNSAVED]),
    "dropout saves its mask": (lambda: nn.Dropout(0.5), ROW, [UNSAVED], [UNSAVED]),
    "dropout in evaluation": (lambda: nn.Dropout(0.5).eval(), 0, [UNSAVED], [VIEW]),
    "input in a tuple": (WithInput, 0, [UNSAVED], [SAVED, boundary(ROW, kept=False, alias=0)]),
    "tensors on the context": (Stash, ROW + 1000, [UNSAVED], [UNSAVED]),
    "block of three": (lambda: nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N)), ROW, [SAVED], [UNSAVED]),
}
"""By name: layer, internal bytes, and boundary tensors."""


@pytest.mark.parametrize("name", KNOWN)
def test_saved_bytes_of_known_layers(name: str) -> None:
    """Each storage counts once; parameters and buffers never count."""
    build, internal, inputs, outputs = KNOWN[name]
    record = memory_of(build(), given())
    assert (record.internal_bytes, list(record.inputs), list(record.outputs)) == (internal, inputs, outputs)


def test_an_embedding_saves_its_indices() -> None:
    record = memory_of(nn.Embedding(10, N), torch.randint(10, (B, 3)))
    assert record.internal_bytes == 0
    assert list(record.inputs) == [boundary(8 * B * 3, kept=True, carries=False)]
    assert list(record.outputs) == [boundary(3 * ROW, kept=False)]


def test_peaks_of_a_relu() -> None:
    """Forward allocates the output. Backward holds the output, its gradient and the input's."""
    record = memory_of(nn.ReLU(), given())
    assert record.forward_peak_bytes == ROW
    assert record.no_grad_peak_bytes == ROW
    assert 3 * ROW <= record.backward_peak_bytes <= 3 * ROW + SLACK
    assert record.first_backward_peak_bytes == record.backward_peak_bytes


def test_peaks_of_a_linear_layer() -> None:
    """The first backward allocates parameter gradients; later ones allocate temporaries to add."""
    layer, out = nn.Linear(N, 32), 4 * B * 32
    parameters = 4 * (32 * N + 32)
    record = memory_of(layer, given())
    assert record.forward_peak_bytes == record.no_grad_peak_bytes == out
    for peak in (record.first_backward_peak_bytes, record.backward_peak_bytes):
        assert parameters + out + ROW <= peak <= parameters + 2 * out + ROW + SLACK
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_a_forward_without_gradients_releases_inner_tensors() -> None:
    block = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(N, N), nn.Tanh())])
    record = memory_of(block, given())
    assert record.internal_bytes == 3 * ROW
    assert record.forward_peak_bytes == 5 * ROW
    assert record.no_grad_peak_bytes == 2 * ROW


def test_a_frozen_first_layer_has_no_backward() -> None:
    record = memory_of(nn.Linear(N, N).requires_grad_(False), given(grad=False))
    assert (record.internal_bytes, record.backward_peak_bytes, record.first_backward_peak_bytes) == (0, 0, 0)
    assert [t.kept for t in (*record.inputs, *record.outputs)] == [False, False]


def test_a_frozen_later_layer_computes_the_input_gradient_only() -> None:
    record = memory_of(nn.Linear(N, N).requires_grad_(False), given())
    assert [t.kept for t in record.inputs] == [False]
    assert 2 * ROW <= record.backward_peak_bytes <= 2 * ROW + SLACK


def test_backward_peaks_at_the_end_of_a_stage() -> None:
    """The stage holds its output and the output's gradient."""
    record = memory_of(nn.ReLU(), given())
    assert 3 * ROW <= record.end_backward_peak_bytes <= 3 * ROW + SLACK
    assert record.end_first_backward_peak_bytes == record.end_backward_peak_bytes
    # A linear layer is done with its output's gradient before those of its parameters are added, and keeps no output.
    record = memory_of(nn.Linear(N, N), given())
    assert record.end_backward_peak_bytes >= record.backward_peak_bytes + ROW - SLACK


class PassesBoth(nn.Module):
    """Reads and returns its first input, and returns the second one unread."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        return pair[0].sin(), pair[0], pair[1]


def test_only_unread_outputs_are_relayed() -> None:
    """Something is added to the gradient of a tensor that is also read."""
    record = memory_of(PassesBoth(), (given(), given()))
    assert [(t.alias, t.relayed) for t in record.outputs] == [(-1, False), (0, False), (1, True)]


def test_layers_that_overwrite_their_input_are_recorded() -> None:
    """They need a copy at the start of a stage."""
    assert memory_of(nn.ReLU(inplace=True), given()).writes_input
    assert not memory_of(nn.ReLU(), given()).writes_input
    assert not memory_of(nn.Identity(), given()).writes_input


class Halves(nn.Module):
    """Returns both halves of one new tensor."""

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:
        return value.sin().chunk(2, dim=1)


class Same(nn.Module):
    """Returns one new tensor twice."""

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        made = value.sin()
        return made, made


class Joined(nn.Module):
    """Returns the product of two tensors, and saves both."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


@pytest.mark.parametrize("layer", [Halves, Same])
def test_outputs_in_one_storage_count_once(layer: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(N, N), layer(), Joined())
    profile = profile_of_model(loaded_model(model, N), sizes=(B,))
    assert profile.layers[1].saved_bytes[0] - profile.layers[1].detail[0].internal_bytes == ROW


class WithTable(nn.Module):
    """Returns a buffer, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(N))

    def forward(self, value: Tensor) -> tuple[Tensor, Any]:
        return value.sin(), self.table


def test_a_returned_buffer_is_not_saved_per_micro_batch() -> None:
    model = nn.Sequential(nn.Linear(N, N), WithTable(), Joined())
    profile = profile_of_model(loaded_model(model, N), sizes=(B,))
    assert profile.layers[1].buffer_bytes == 4 * N
    # The product keeps the table alone, for the gradient of the other factor; the sine keeps its input.
    assert profile.layers[1].saved_bytes[0] == profile.layers[1].detail[0].internal_bytes


@pytest.mark.parametrize(
    ("layer", "crossing"), [(Halves, ROW), (Same, 2 * ROW), (WithTable, ROW + 4 * N), (WithInput, 2 * ROW)]
)
def test_every_sent_tensor_counts_in_the_receiving_stage(layer: type[nn.Module], crossing: int) -> None:
    """Received tensors share no storage."""
    model = nn.Sequential(nn.Linear(N, N), layer(), Joined())
    costs = costs_at(profile_of_model(loaded_model(model, N), sizes=(B,)), B)
    assert costs.boundaries.input[2] == crossing


def test_inputs_that_are_no_tensors_count_nothing() -> None:
    class Scaled(nn.Module):
        def forward(self, pair: tuple[Tensor, float]) -> Tensor:
            return pair[0] * pair[1]

    record = memory_of(Scaled(), (given(), 0.5))
    assert [t.bytes for t in record.inputs] == [ROW]
    assert [t.bytes for t in record.outputs] == [ROW]


def test_saved_bytes_are_linear_in_the_micro_batch_size() -> None:
    """So interpolation is exact."""
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 8))
    profile = profile_of_model(loaded_model(model), sizes=(1, 2, 3, 8))
    for layer in profile.layers:
        one, two, three, eight = layer.saved_bytes
        assert (three - two, eight - three) == (two - one, 5 * (two - one)), layer.name
    assert any(layer.saved_bytes[0] for layer in profile.layers)


def test_saved_bytes_include_the_output_if_a_later_layer_saves_it() -> None:
    """A linear layer does not save its output. The next one does, also after a view."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 32), nn.Flatten(), nn.Linear(32, 8))
    profile = profile_of_model(loaded_model(model), sizes=(B,))
    assert [layer.saved_bytes[0] for layer in profile.layers[:3]] == [4 * B * 64, 4 * B * 32, 0]


def test_weights_computed_in_each_forward_are_recorded() -> None:
    """A pruned weight stays in an attribute until the next forward, and is saved by each micro-batch."""
    layer = nn.Linear(N, 8, bias=False)
    assert memory_of(layer, given()).attribute_bytes == 0
    size = layer.weight.nbytes
    pruning.identity(layer, "weight")
    record = memory_of(layer, given())
    assert (record.attribute_bytes, record.renewed_bytes) == (size, size)


def test_tensors_in_attributes_are_recorded_once() -> None:
    layer = nn.Linear(N, 8)
    layer.table = torch.ones(50)
    layer.cache = SimpleNamespace(rows=[torch.ones(25)])
    record = memory_of(layer, given())
    assert (record.attribute_bytes, record.renewed_bytes) == (300, 0)


class AddsToInput(nn.Module):
    """Adds to its input in place."""

    def forward(self, value: Tensor) -> Tensor:
        value += value.sigmoid()
        return value


def test_activations_are_not_counted_as_cast_weights() -> None:
    """Not even if the input gets the graph of the layer."""
    unit = LayerToMeasure(name="layer", module=AddsToInput(), loss_fn=None, digest="")
    leaves, nest = tree_flatten(given())
    assert measure_weight_casts(unit, MeasurementInput(tuple(leaves), nest, None), CpuMemoryMeter()) == 0


def test_targets_count_in_the_last_layer() -> None:
    loaded = loaded_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), loss_fn=lambda out, t: (out - t).mean())
    example = loaded.example_batch

    def with_targets(size: int) -> Any:
        return example(size)._replace(targets=torch.zeros(size, 4))

    profile = profile_of_model(replace(loaded, example_batch=with_targets), sizes=(B,))
    assert [layer.detail[0].target_bytes for layer in profile.layers] == [0, 4 * B * 4]
