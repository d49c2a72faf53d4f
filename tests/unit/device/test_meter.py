"""The meter counts the allocator's own events: exact peaks and ends, temporaries included."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from planner.device.meter import CpuMeter, Usage, recorded_allocations

KEPT: list[Tensor] = []


@pytest.fixture(autouse=True)
def clean() -> None:
    """Nothing is kept from test to test."""
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
    # 4 KiB, then 8 KiB beside it, then the first goes.
    first = torch.zeros(1024)
    KEPT.append(torch.cat([first, first]))


@pytest.mark.parametrize(
    ("work", "usage"),
    [
        (lambda: None, Usage(0, 0)),
        (lambda: _keep(1000), Usage(1000, 1000)),
        (lambda: _keep(1000, 24), Usage(1024, 1024)),
        (_drop, Usage(1000, 0)),
        (_overlap, Usage(1500, 0)),
        (_hand_over, Usage(12288, 8192)),
        (lambda: KEPT.append(torch.empty(0)), Usage(0, 0)),
    ],
    ids=["nothing", "kept", "two kept", "dropped", "overlapping", "handed over", "empty"],
)
def test_known_allocations(work: Callable[[], None], usage: Usage) -> None:
    """Peak and end, to the byte."""
    assert CpuMeter().measure(work) == usage


def test_views_and_in_place_operators_take_nothing() -> None:
    """Only storages count."""
    tensor = torch.zeros(1000)

    def work() -> None:
        KEPT.append(tensor.view(10, 100)[2:5].t())
        tensor.neg_().zero_()

    assert CpuMeter().measure(work) == Usage(0, 0)


def test_temporaries_inside_an_operator_are_seen() -> None:
    """`softmax` in half precision, sorting: what no dispatch mode shows."""
    values = torch.randn(1000)
    usage = CpuMeter().measure(lambda: KEPT.append(values.sort().values))
    assert usage.end_bytes == 4000
    assert usage.peak_bytes >= 4000 + 8000  # the indices


def test_what_is_kept_across_measurements_is_subtracted_when_it_goes() -> None:
    """Work that releases more than it allocates ends below zero; the peak is never below zero."""
    meter = CpuMeter()
    assert meter.measure(lambda: _keep(3000)) == Usage(3000, 3000)
    assert meter.measure(KEPT.clear) == Usage(0, -3000)


def test_measurements_do_not_depend_on_each_other() -> None:
    """The same work gives the same numbers, whatever ran before and in between."""
    meter = CpuMeter()
    seen = set()
    for size in (10, 1000, 100_000):
        _keep(size)
        seen.add(meter.measure(_overlap))
        KEPT.clear()
    assert seen == {Usage(1500, 0)}


def test_a_failure_ends_the_recording() -> None:
    """The next measurement works."""

    def fail() -> None:
        raise ValueError

    meter = CpuMeter()
    with pytest.raises(ValueError, match=r"^$"):
        meter.measure(fail)
    assert meter.measure(_drop) == Usage(1000, 0)


def test_backward_is_measured_too() -> None:
    """Gradients of a linear map: y = x·w, dL/dw of 4 kB stays, dL/dx is not needed."""
    x, w = torch.randn(1, 1000), torch.randn(1000, 1, requires_grad=True)
    loss = (x @ w).sum()
    usage = CpuMeter().measure(loss.backward)
    assert w.grad is not None
    assert usage.end_bytes == w.grad.nbytes
    assert usage.peak_bytes >= w.grad.nbytes


def test_sizes_are_in_order() -> None:
    """Allocations are positive, releases negative, as they happened."""
    with recorded_allocations() as sizes:
        first = torch.empty(10, dtype=torch.uint8)
        second = torch.empty(20, dtype=torch.uint8)
        del first
        del second
    assert sizes == [10, 20, -10, -20]
