"""The memory record of layers whose answer is known beforehand, to the byte."""

from collections.abc import Callable
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
from planner.device.meter import CpuMeter
from planner.profile.memory import measure_casts
from planner.profile.units import Unit, UnitInput
from tests.support.measure import loaded_model, memory_of, profile_of_model

B, N = 4, 1024
ROW = 4 * B * N  # bytes of a float32 tensor of shape (B, N)
SLACK = 64  # a scalar here and there (the loss, a number wrapped into a tensor)


def given(*, grad: bool = True) -> Tensor:
    """An input of ROW bytes."""
    return torch.randn(B, N, requires_grad=grad)


def tensor(size: int, *, kept: bool, alias: int = -1, relayed: bool = False, carries: bool = True) -> BoundaryTensor:
    """What crosses a boundary."""
    return BoundaryTensor(bytes=size, kept=kept, alias=alias, relayed=relayed, carries=carries)


class WithInput(nn.Module):
    """(something new, the input itself)."""

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors of shape (B, N)."""
        return torch.relu(value), value


class WithMask(nn.Module):
    """(something new, a mask)."""

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors of shape (B, N)."""
        return torch.sigmoid(value), value > 0


class Stashing(torch.autograd.Function):
    """Keeps what no saved-tensor hook sees: tensors as attributes of the context."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        """The sine; its cosine and 1000 bytes are kept."""
        ctx.cosine = value.cos()
        ctx.other = torch.empty(1000, dtype=torch.uint8)
        return value.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """By the chain rule."""
        product: Tensor = gradient * ctx.cosine
        return product


class Stash(nn.Module):
    """A layer around it."""

    def forward(self, value: Tensor) -> Tensor:
        """Shape (B, N)."""
        result: Tensor = Stashing.apply(value)
        return result


@pytest.mark.parametrize(
    ("layer", "value", "internal", "inputs", "outputs"),
    [
        pytest.param(
            lambda: nn.Linear(N, 32),
            given,
            0,
            [tensor(ROW, kept=True)],
            [tensor(4 * B * 32, kept=False)],
            id="linear keeps its input",
        ),
        pytest.param(
            nn.ReLU, given, 0, [tensor(ROW, kept=False)], [tensor(ROW, kept=True)], id="relu keeps its output"
        ),
        pytest.param(
            lambda: nn.ReLU(inplace=True),
            given,
            0,
            [tensor(ROW, kept=True)],
            [tensor(ROW, kept=True, alias=0)],
            id="in-place relu keeps the one storage",
        ),
        pytest.param(
            lambda: nn.Flatten(0),
            given,
            0,
            [tensor(ROW, kept=False)],
            [tensor(ROW, kept=False, alias=0, relayed=True)],
            id="flatten is a view",
        ),
        pytest.param(
            nn.Identity,
            given,
            0,
            [tensor(ROW, kept=False)],
            [tensor(ROW, kept=False, alias=0, relayed=True)],
            id="identity",
        ),
        pytest.param(
            lambda: nn.Embedding(10, N),
            lambda: torch.randint(10, (B, 3)),
            0,
            [tensor(8 * B * 3, kept=True, carries=False)],
            [tensor(3 * ROW, kept=False)],
            id="embedding keeps the indices",
        ),
        pytest.param(
            WithMask,
            given,
            0,
            [tensor(ROW, kept=False)],
            [tensor(ROW, kept=True), tensor(B * N, kept=False, carries=False)],
            id="a mask carries no gradient",
        ),
        pytest.param(
            lambda: nn.BatchNorm1d(N),
            given,
            2 * 4 * N,
            [tensor(ROW, kept=True)],
            [tensor(ROW, kept=False)],
            id="batch norm keeps its input, mean and deviation",
        ),
        pytest.param(
            lambda: nn.Dropout(0.5),
            given,
            ROW,
            [tensor(ROW, kept=False)],
            [tensor(ROW, kept=False)],
            id="dropout keeps its mask",
        ),
        pytest.param(
            lambda: nn.Dropout(0.5).eval(),
            given,
            0,
            [tensor(ROW, kept=False)],
            [tensor(ROW, kept=False, alias=0, relayed=True)],
            id="dropout in evaluation is the identity",
        ),
        pytest.param(
            WithInput,
            given,
            0,
            [tensor(ROW, kept=False)],
            [tensor(ROW, kept=True), tensor(ROW, kept=False, alias=0)],
            id="the input in a tuple is the input",
        ),
        pytest.param(
            Stash,
            given,
            ROW + 1000,
            [tensor(ROW, kept=False)],
            [tensor(ROW, kept=False)],
            id="tensors on the context count",
        ),
        pytest.param(
            lambda: nn.Sequential(nn.Linear(N, N), nn.Tanh(), nn.Linear(N, N)),
            given,
            ROW,
            [tensor(ROW, kept=True)],
            [tensor(ROW, kept=False)],
            id="between its own layers a block keeps one tensor",
        ),
    ],
)
def test_what_a_layer_keeps(
    layer: Callable[[], nn.Module],
    value: Callable[[], Tensor],
    *,
    internal: int,
    inputs: list[BoundaryTensor],
    outputs: list[BoundaryTensor],
) -> None:
    """Internal bytes, and which boundary tensors; each storage once, parameters and buffers never."""
    record = memory_of(layer(), value())
    assert (record.internal_bytes, list(record.inputs), list(record.outputs)) == (internal, inputs, outputs)


def test_peaks_of_a_relu() -> None:
    """Forward makes its output; backward holds that, the gradient of the output and that of the input."""
    record = memory_of(nn.ReLU(), given())
    assert record.forward_peak_bytes == ROW
    assert record.no_grad_peak_bytes == ROW
    assert 3 * ROW <= record.backward_peak_bytes <= 3 * ROW + SLACK
    assert record.first_backward_peak_bytes == record.backward_peak_bytes


def test_peaks_of_a_linear_layer() -> None:
    """The first backward allocates the parameters' gradients, a later one makes them anew to add them."""
    layer, out = nn.Linear(N, 32), 4 * B * 32
    parameters = 4 * (32 * N + 32)
    record = memory_of(layer, given())
    assert record.forward_peak_bytes == record.no_grad_peak_bytes == out
    for peak in (record.first_backward_peak_bytes, record.backward_peak_bytes):
        assert parameters + out + ROW <= peak <= parameters + 2 * out + ROW + SLACK
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_without_gradients_nothing_is_held_between_inner_layers() -> None:
    """A recomputed forward drops each inner tensor as soon as the next is there."""
    block = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(N, N), nn.Tanh())])
    record = memory_of(block, given())
    assert record.internal_bytes == 3 * ROW
    assert record.forward_peak_bytes == 5 * ROW
    assert record.no_grad_peak_bytes == 2 * ROW


def test_a_frozen_layer_has_no_backward() -> None:
    """Without gradients to make, nothing is kept and nothing happens."""
    record = memory_of(nn.Linear(N, N).requires_grad_(False), given(grad=False))
    assert (record.internal_bytes, record.backward_peak_bytes, record.first_backward_peak_bytes) == (0, 0, 0)
    assert [t.kept for t in (*record.inputs, *record.outputs)] == [False, False]


def test_a_frozen_layer_passes_gradients_on() -> None:
    """Behind trained layers its backward makes the input's gradient, and no other."""
    record = memory_of(nn.Linear(N, N).requires_grad_(False), given())
    assert [t.kept for t in record.inputs] == [False]
    assert 2 * ROW <= record.backward_peak_bytes <= 2 * ROW + SLACK


def test_peaks_where_a_stage_ends() -> None:
    """A ReLU makes its input's gradient while its output, which it keeps anyway, and that one's gradient are held."""
    record = memory_of(nn.ReLU(), given())
    assert 3 * ROW <= record.end_backward_peak_bytes <= 3 * ROW + SLACK
    assert record.end_first_backward_peak_bytes == record.end_backward_peak_bytes
    # A linear layer is done with its output's gradient before those of its parameters are added, and keeps no output.
    record = memory_of(nn.Linear(N, N), given())
    assert record.end_backward_peak_bytes >= record.backward_peak_bytes + ROW - SLACK


class PassesBoth(nn.Module):
    """Of two tensors the first is read and passed on, the second only passed on."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """What is made, and the two."""
        return pair[0].sin(), pair[0], pair[1]


def test_only_what_passes_by_unread_keeps_its_gradient() -> None:
    """To that of a tensor that is read, too, something is added."""
    record = memory_of(PassesBoth(), (given(), given()))
    assert [(t.alias, t.relayed) for t in record.outputs] == [(-1, False), (0, False), (1, True)]


def test_writing_the_input_is_noted() -> None:
    """Such a layer cannot begin a stage without a copy."""
    assert memory_of(nn.ReLU(inplace=True), given()).writes_input
    assert not memory_of(nn.ReLU(), given()).writes_input
    assert not memory_of(nn.Identity(), given()).writes_input


class Halves(nn.Module):
    """Both halves of one new tensor."""

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:
        """Two tensors of shape (B, N / 2)."""
        return value.sin().chunk(2, dim=1)


class Same(nn.Module):
    """One new tensor, twice."""

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Two tensors of shape (B, N)."""
        made = value.sin()
        return made, made


class Joined(nn.Module):
    """The product of two, which keeps both."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        """Of the pair's shape."""
        return pair[0] * pair[1]


@pytest.mark.parametrize("layer", [Halves, Same])
def test_outputs_in_one_storage_count_once(layer: type[nn.Module]) -> None:
    """Halves of one tensor, or the same tensor twice, hold its bytes once, however many cross the boundary."""
    model = nn.Sequential(nn.Linear(N, N), layer(), Joined())
    profile = profile_of_model(loaded_model(model, N), sizes=(B,))
    assert profile.layers[1].saved_bytes[0] - profile.layers[1].detail[0].internal_bytes == ROW


class WithTable(nn.Module):
    """A buffer that is passed along, as rotary embeddings do it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(N))

    def forward(self, value: Tensor) -> tuple[Tensor, Any]:
        """(B, N) and (N,)."""
        return value.sin(), self.table


def test_a_buffer_passed_along_is_not_held_per_micro_batch() -> None:
    """It is counted as a buffer already."""
    model = nn.Sequential(nn.Linear(N, N), WithTable(), Joined())
    profile = profile_of_model(loaded_model(model, N), sizes=(B,))
    assert profile.layers[1].buffer_bytes == 4 * N
    # The product keeps the table alone, for the gradient of the other factor; the sine keeps its input.
    assert profile.layers[1].saved_bytes[0] == profile.layers[1].detail[0].internal_bytes


@pytest.mark.parametrize(
    ("layer", "crossing"), [(Halves, ROW), (Same, 2 * ROW), (WithTable, ROW + 4 * N), (WithInput, 2 * ROW)]
)
def test_what_is_sent_is_counted_as_received(layer: type[nn.Module], crossing: int) -> None:
    """A stage behind the boundary has a buffer for every tensor that is sent: they share nothing there."""
    model = nn.Sequential(nn.Linear(N, N), layer(), Joined())
    costs = costs_at(profile_of_model(loaded_model(model, N), sizes=(B,)), B)
    assert costs.boundaries.input[2] == crossing


def test_a_layer_behind_a_table_of_numbers() -> None:
    """Inputs that are no tensors count nothing."""

    class Scaled(nn.Module):
        def forward(self, pair: tuple[Tensor, float]) -> Tensor:
            return pair[0] * pair[1]

    record = memory_of(Scaled(), (given(), 0.5))
    assert [t.bytes for t in record.inputs] == [ROW]
    assert [t.bytes for t in record.outputs] == [ROW]


def test_saved_bytes_are_linear_in_the_micro_batch_size() -> None:
    """Findings 2: exactly, so that interpolation is exact too."""
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.LayerNorm(64), nn.Dropout(0.1), nn.Linear(64, 8))
    profile = profile_of_model(loaded_model(model), sizes=(1, 2, 3, 8))
    for layer in profile.layers:
        one, two, three, eight = layer.saved_bytes
        assert (three - two, eight - three) == (two - one, 5 * (two - one)), layer.name
    assert any(layer.saved_bytes[0] for layer in profile.layers)


def test_saved_bytes_count_the_output_that_a_later_layer_keeps() -> None:
    """A linear layer's output is not its own to keep; the next linear layer keeps it, be it behind a view."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 32), nn.Flatten(), nn.Linear(32, 8))
    profile = profile_of_model(loaded_model(model), sizes=(B,))
    assert [layer.saved_bytes[0] for layer in profile.layers[:3]] == [4 * B * 64, 4 * B * 32, 0]


def test_a_weight_that_each_forward_makes_anew_is_recorded() -> None:
    """A pruned weight is kept in an attribute until the next forward, and by each micro-batch for its backward."""
    layer = nn.Linear(N, 8, bias=False)
    assert memory_of(layer, given()).attribute_bytes == 0
    size = layer.weight.nbytes
    pruning.identity(layer, "weight")
    record = memory_of(layer, given())
    assert (record.attribute_bytes, record.renewed_bytes) == (size, size)


def test_a_table_in_an_attribute_is_recorded() -> None:
    """It is there at every moment, once for all micro-batches."""
    layer = nn.Linear(N, 8)
    layer.table = torch.ones(50)
    layer.cache = SimpleNamespace(rows=[torch.ones(25)])
    record = memory_of(layer, given())
    assert (record.attribute_bytes, record.renewed_bytes) == (300, 0)


class AddsToInput(nn.Module):
    """A layer that adds to its input in place."""

    def forward(self, value: Tensor) -> Tensor:
        """Of the same shape."""
        value += value.sigmoid()
        return value


def test_activations_are_no_copies_of_weights() -> None:
    """Not even if the input, which outlives the layer's forward, gets the graph of the layer."""
    unit = Unit(name="layer", module=AddsToInput(), loss_fn=None, digest="")
    leaves, nest = tree_flatten(given())
    assert measure_casts(unit, UnitInput(tuple(leaves), nest, None), CpuMeter()) == 0


def test_targets_are_counted_at_the_loss() -> None:
    """The last layer alone knows them."""
    loaded = loaded_model(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), loss_fn=lambda out, t: (out - t).mean())
    example = loaded.example_batch

    def with_targets(size: int) -> Any:
        return example(size)._replace(targets=torch.zeros(size, 4))

    profile = profile_of_model(replace(loaded, example_batch=with_targets), sizes=(B,))
    assert [layer.detail[0].target_bytes for layer in profile.layers] == [0, 4 * B * 4]
