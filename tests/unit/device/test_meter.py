"""Memory meter: exact peaks and ends, including temporaries."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from planner.device.meter import CpuMemoryMeter, MemoryUsage, recorded_allocations

KEPT: list[Tensor] = []


@pytest.fixture(autouse=True)
def clean() -> None:
    KEPT.clear()


def _keep(*sizes: int) -> None:
    KEPT.extend(torch.empty(size, dtype=torch.uint8) for size in sizes)


def _drop() -> None:
    torch.empty(1000, dtype=torch.uint8)


def _overlap() -> None:
    first = torch.empty(1000, dtype=torch.uint8)
    second = torch.empty(500, dtype=torch.uint8)
    del first
    third = torch.empty(200, dtype=torch.uint8)
    del second, third


def _hand_over() -> None:
    # Allocate 4 KiB, then 8 KiB more, then release the first.
    first = torch.zeros(1024)
    KEPT.append(torch.cat([first, first]))


@pytest.mark.parametrize(
    ("work", "usage"),
    [
        (lambda: None, MemoryUsage(0, 0)),
        (lambda: _keep(1000), MemoryUsage(1000, 1000)),
        (lambda: _keep(1000, 24), MemoryUsage(1024, 1024)),
        (_drop, MemoryUsage(1000, 0)),
        (_overlap, MemoryUsage(1500, 0)),
        (_hand_over, MemoryUsage(12288, 8192)),
        (lambda: KEPT.append(torch.empty(0)), MemoryUsage(0, 0)),
    ],
    ids=["nothing", "kept", "two kept", "dropped", "overlapping", "handed over", "empty"],
)
def test_peak_and_end_of_known_allocations(work: Callable[[], None], usage: MemoryUsage) -> None:
    assert CpuMemoryMeter().measure(work) == usage


def test_views_and_in_place_operators_take_nothing() -> None:
    tensor = torch.zeros(1000)

    def work() -> None:
        KEPT.append(tensor.view(10, 100)[2:5].t())
        tensor.neg_().zero_()

    assert CpuMemoryMeter().measure(work) == MemoryUsage(0, 0)


def test_temporaries_inside_an_operator_are_measured() -> None:
    """No dispatch mode shows them."""
    values = torch.randn(1000)
    usage = CpuMemoryMeter().measure(lambda: KEPT.append(values.sort().values))
    assert usage.end_bytes == 4000
    assert usage.peak_bytes >= 4000 + 8000  # the indices


def test_releasing_earlier_allocations_ends_below_zero() -> None:
    meter = CpuMemoryMeter()
    assert meter.measure(lambda: _keep(3000)) == MemoryUsage(3000, 3000)
    assert meter.measure(KEPT.clear) == MemoryUsage(0, -3000)


def test_measurements_do_not_depend_on_each_other() -> None:
    meter = CpuMemoryMeter()
    seen = set()
    for size in (10, 1000, 100_000):
        _keep(size)
        seen.add(meter.measure(_overlap))
        KEPT.clear()
    assert seen == {MemoryUsage(1500, 0)}


def test_a_failed_measurement_does_not_affect_the_next() -> None:
    def fail() -> None:
        raise ValueError

    meter = CpuMemoryMeter()
    with pytest.raises(ValueError, match=r"^$"):
        meter.measure(fail)
    assert meter.measure(_drop) == MemoryUsage(1000, 0)


def test_backward_is_measured() -> None:
    """For y = x·w, dL/dw stays and dL/dx is not computed."""
    x, w = torch.randn(1, 1000), torch.randn(1000, 1, requires_grad=True)
    loss = (x @ w).sum()
    usage = CpuMemoryMeter().measure(loss.backward)
    assert usage.end_bytes == w.grad.nbytes
    assert usage.peak_bytes >= w.grad.nbytes


def test_allocations_and_releases_are_recorded_in_order() -> None:
    with recorded_allocations() as sizes:
        first = torch.empty(10, dtype=torch.uint8)
        second = torch.empty(20, dtype=torch.uint8)
        del first
        del second
    assert sizes == [10, 20, -10, -20]
