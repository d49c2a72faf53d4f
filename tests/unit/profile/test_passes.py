"""Timing of layers together with their neighbors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from planner.device.cpu import Cpu
from planner.model.batch_norm import BatchStatistics
from planner.model.split_backward import SplitBackward
from planner.profile.crossing import LayerOutputs, make_layer_inputs, own_storages_of
from planner.profile.passes import SplitTimer, UnsplitBackwardTimer, time_neighbors
from planner.profile.timing import group_layers_to_time
from planner.profile.units import LayerToMeasure, MeasurementInput
from tests.support.measure import loaded_model, profile_of_model

LARGE = 300, 300
"""The shape of an input that is handed on from layer to layer: 352 KiB."""


def unit_of(module: nn.Module, name: str = "layer") -> LayerToMeasure:
    return LayerToMeasure(name, module, None, digest=name)


def unit_input(*values: Any) -> MeasurementInput:
    leaves, spec = tree_flatten(values[0] if len(values) == 1 else values)
    return MeasurementInput(tuple(leaves), spec, None)


def traced(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


class Watched(nn.Module):
    """Records when its forward and backward run, and its input's address."""

    def __init__(self, name: str, notes: list[str], module: nn.Module | None = None) -> None:
        super().__init__()
        self.name, self.notes = name, notes
        self.module = nn.Identity() if module is None else module
        self.address = 0

    def forward(self, value: Tensor) -> Tensor:
        self.notes.append(f"F {self.name}")
        self.address = value.data_ptr()
        result = self.module(value * 2)
        result.register_hook(lambda _: self.notes.append(f"B {self.name}"))
        return result


class Ticks:
    """A clock on which only calls of `time_us` and the layers advance the time."""

    def __init__(self) -> None:
        self.now_us = self.begun_us = 0.0

    def time_us(self, work: Callable[[], object]) -> float:
        self.restart()
        self.now_us += 7.0  # what it costs to time anything
        work()
        return self.now_us - self.begun_us

    def restart(self) -> float:
        begun_us, self.begun_us = self.begun_us, self.now_us
        return self.now_us - begun_us

    def stop(self) -> None:
        """Do nothing: no work is queued."""


def make_timers() -> list[UnsplitBackwardTimer]:
    """Return timers of whole and of split backwards."""
    clock, collected = Ticks(), BatchStatistics()
    return [
        UnsplitBackwardTimer(clock=clock, statistics=collected),
        SplitTimer(clock=clock, statistics=collected, split=SplitBackward()),
    ]


@pytest.mark.parametrize("timer", make_timers(), ids=["whole", "split"])
def test_all_forwards_come_before_all_backwards(timer: UnsplitBackwardTimer) -> None:
    """The overhead of timing counts for no layer."""
    notes: list[str] = []
    units = [unit_of(Watched(name, notes), name) for name in "abc"]
    layers = [(unit, unit_input(traced(*LARGE))) for unit in units]
    times = time_neighbors(timer, layers)
    assert notes == ["F a", "F b", "F c", "B c", "B b", "B a"]
    assert times == [(0.0, 0.0)] * 3


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_layer_gets_its_own_time(count: int) -> None:
    """Wherever in the pass the idle layer is."""
    (timer, _), clock = make_timers(), Ticks()
    timer = UnsplitBackwardTimer(clock=clock, statistics=BatchStatistics())

    class Slow(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, value: Tensor) -> Tensor:
            clock.now_us += 100.0 * (1 + self.number)
            result = value * 2
            result.register_hook(self.backward_of)
            return result

        def backward_of(self, _: Tensor) -> None:
            clock.now_us += 1000.0 * (1 + self.number)

    layers = [(unit_of(Slow(n), str(n)), unit_input(traced(3))) for n in range(count)]
    assert time_neighbors(timer, layers) == [(100.0 * n, 1000.0 * n) for n in range(1, count + 1)]


@pytest.mark.parametrize(("shape", "shared"), [(LARGE, True), ((3, 3), False)])
def test_a_large_input_is_in_the_memory_of_the_previous_output(shape: tuple[int, ...], *, shared: bool) -> None:
    """It has its traced values. A small input is made before all forwards."""
    (timer, _), notes = make_timers(), list[str]()
    written: list[int] = []
    first = Watched("a", notes)
    first.register_forward_hook(lambda _module, _inputs, output: written.append(output.data_ptr()))
    second = Watched("b", notes)
    seen: list[Tensor] = []
    second.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].detach().clone()))
    wanted = traced(*shape)
    time_neighbors(
        timer,
        [(unit_of(first, "a"), unit_input(traced(*shape))), (unit_of(second, "b"), unit_input(wanted))],
    )
    assert (second.address == written[0]) == shared
    assert torch.equal(seen[0], wanted)


def outputs_of(tensor: Tensor) -> list[Any]:
    """One that is no leaf, as a layer returns it."""
    return [tensor]


@pytest.mark.parametrize(
    "output",
    [
        (lambda: traced(300, 299) * 1),  # another shape
        (lambda: torch.randn(LARGE)),  # may be a table that the model keeps
        (lambda: traced(300, 1).expand(LARGE)),  # several numbers in one place
        (lambda: traced(*LARGE).t() * 1),  # in another order
        (lambda: traced(*LARGE).double() * 1),
    ],
    ids=["shape", "no gradient", "expanded", "strides", "dtype"],
)
def test_unequal_outputs_are_not_reused_as_inputs(output: Callable[[], Tensor]) -> None:
    """The next layer gets a copy of its traced input."""
    before = output()
    kept = before.detach().clone()
    wanted = traced(*LARGE)
    entrance = make_layer_inputs(unit_input(wanted), [before])
    assert torch.equal(entrance.values[0], wanted)
    assert torch.equal(before, kept)
    assert entrance.values[0].requires_grad
    assert not entrance.values[0].is_leaf


def test_parameters_returned_by_a_layer_are_not_overwritten() -> None:
    layer = nn.Linear(300, 300)
    weight = layer.weight.detach().clone()
    unit = unit_of(layer)
    make_layer_inputs(unit_input(traced(*LARGE)), [layer.weight], own_storages_of(unit))
    make_layer_inputs(unit_input(traced(*LARGE)), [layer.weight.view(300, 300)], own_storages_of(unit))
    assert torch.equal(layer.weight, weight)
    behind = make_layer_inputs(unit_input(traced(*LARGE)))
    behind.gradients.append(layer.weight.detach())
    LayerOutputs([traced(*LARGE) * 1], own_storages_of(unit)).create_gradients(behind)
    assert torch.equal(layer.weight, weight)


def test_layers_may_overwrite_their_inputs() -> None:
    (timer, split_timer) = make_timers()
    layers = [
        (unit_of(nn.Sequential(nn.Linear(300, 300), nn.Sigmoid()), "a"), unit_input(traced(*LARGE))),
        (unit_of(nn.ReLU(inplace=True), "b"), unit_input(traced(*LARGE))),
    ]
    for each in (timer, split_timer):
        assert len(time_neighbors(each, layers)) == 2


def test_output_gradients_are_ones_in_the_memory_of_the_next_layer() -> None:
    """They have no other owner, so a gradient passed on to an input is not copied."""
    behind = make_layer_inputs(unit_input(traced(*LARGE), traced(*LARGE), 3, torch.zeros(2)))
    left = torch.full(LARGE, 5.0)
    behind.gradients.extend([None, left])
    leaves = [traced(*LARGE), traced(*LARGE)]
    way_out = LayerOutputs([leaves[0] * 1, leaves[1].view_as(leaves[1]), 3, torch.zeros(2)], frozenset())
    way_out.create_gradients(behind)
    way_out.create_gradients(None)  # there is nothing left to do
    address = left.data_ptr()
    del left, behind
    way_out.end.backward()
    assert all(leaf.grad is not None and torch.equal(leaf.grad, torch.ones(LARGE)) for leaf in leaves)
    assert leaves[1].grad.data_ptr() == address


def test_passes_end_at_a_new_size_and_at_many_saved_bytes() -> None:
    kept = {("a", 1): 2**27, ("b", 1): 2**27, ("c", 1): 1, ("big", 1): 2**30, ("a", 2): 3, ("b", 2): 4}
    assert list(group_layers_to_time(list(kept), kept)) == [
        [("a", 1), ("b", 1)],
        [("c", 1)],
        [("big", 1)],
        [("a", 2), ("b", 2)],
    ]
    assert list(group_layers_to_time([("c", 1)] * 2, kept)) == [[("c", 1)]] * 2


def test_code_before_and_after_a_layer_is_not_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticks()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, value: Tensor) -> Tensor:
            clock.now_us += 5000.0
            for block in self.blocks:
                value = block(value)
                clock.now_us += 10.0  # the block's time, which later layers skip
            clock.now_us += 1.0
            return value

    monkeypatch.setattr(Cpu, "clock", lambda _self, _threads: clock)
    profile = profile_of_model(loaded_model(Model(), 4), sizes=(1,), repeats=2)
    assert [layer.forward_us for layer in profile.layers] == [(5000.0,), (10.0,), (21.0,)]
