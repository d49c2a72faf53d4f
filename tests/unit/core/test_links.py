"""Latency and bandwidth from measured transfers, and which link lies behind which device."""

import random

import pytest

from planner.core.values.cluster import Cluster, Link
from planner.core.values.links import fit_link

SIZES = [1024 * 4**n for n in range(8)]


def times_of(latency_us: float, bytes_per_s: float, noise: float = 0.0) -> list[float]:
    """What moving `SIZES` takes."""
    rng = random.Random(0)
    link = Link(latency_us=latency_us, bytes_per_s=bytes_per_s)
    return [link.transfer_us(size) * (1 + noise * rng.uniform(-1, 1)) for size in SIZES]


@pytest.mark.parametrize(("latency_us", "bytes_per_s"), [(400.0, 2e9), (5.0, 25e9), (0.0, 1e8), (1000.0, 1e6)])
def test_an_exact_line_is_found(latency_us: float, bytes_per_s: float) -> None:
    """Both numbers, though sizes spread over four orders of magnitude."""
    link = fit_link(SIZES, times_of(latency_us, bytes_per_s), blocking=True)
    assert link.latency_us == pytest.approx(latency_us, abs=0.1)
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=2e-3)
    assert link.blocking


def test_noise_spoils_neither_number() -> None:
    """10 % on every time: the largest message does not drown the latency that the small ones tell."""
    link = fit_link(SIZES, times_of(400.0, 2e9, 0.1), blocking=False)
    assert link.latency_us == pytest.approx(400.0, rel=0.1)
    assert link.bytes_per_s == pytest.approx(2e9, rel=0.1)
    assert not link.blocking


def test_two_sizes_tell_both_numbers() -> None:
    """As the executor's calibration has them."""
    link = fit_link((4096, 2**22), (100.0 + 4.096, 100.0 + 4194.304), blocking=True)
    assert (link.latency_us, link.bytes_per_s) == (100.0, 1e9)


def test_times_that_grow_faster_than_sizes_have_no_latency() -> None:
    """The line through the origin that is nearest, never a negative latency."""
    link = fit_link([1000, 10000], [1.0, 20.0], blocking=False)
    assert link.latency_us == 0.0
    assert 5e8 < link.bytes_per_s < 1e9


def test_times_that_do_not_grow_have_no_end_of_bandwidth() -> None:
    """0 stands for unlimited; also where a small transfer was not to be told from none."""
    link = fit_link([1000, 10000], [20.0, 10.0], blocking=False)
    assert link.bytes_per_s == 0.0
    assert 10.0 < link.latency_us < 20.0
    assert fit_link([1000, 10000], [0.0, 0.0], blocking=False).latency_us <= 0.1


LINKS = (
    Link(latency_us=1.0, bytes_per_s=1e9),
    Link(latency_us=9.0),
    Link(latency_us=2.0, bytes_per_s=1e8, blocking=True),
)


def cluster(links: tuple[Link, ...] = LINKS) -> Cluster:
    """Four devices."""
    return Cluster(memory_bytes=(1,) * 4, link=Link(latency_us=99.0), links=links)


def test_every_device_has_its_own_link() -> None:
    """A shorter pipeline uses the first ones; the one link for all does not count."""
    for count in (2, 3, 4):
        behind = [cluster().link_after(d, num_devices=count) for d in range(count - 1)]
        assert behind == list(LINKS[: count - 1])


def test_the_way_back_is_the_slowest_link_of_the_pipeline() -> None:
    """Nobody measured it; a pipeline of one device has none."""
    assert cluster().link_after(3, num_devices=4) == Link(latency_us=9.0, bytes_per_s=1e8, blocking=True)
    assert cluster().link_after(1, num_devices=2) == LINKS[0]
    assert cluster().link_after(0, num_devices=1) == Link()


def test_replicas_wait_for_the_slowest_of_their_links() -> None:
    """Two pipelines of two devices: links 0 and 2 lie within them, link 1 between them is not used."""
    slowest = Link(latency_us=2.0, bytes_per_s=1e8, blocking=True)
    assert cluster().link_after(0, num_devices=2, replicas=2) == slowest
    assert cluster().link_after(1, num_devices=2, replicas=2) == slowest
    assert cluster().link_after(0, num_devices=1, replicas=4) == Link()


def test_the_slowest_of_links_without_a_limit_is_without_a_limit() -> None:
    """0 bytes per second means unlimited, not slow."""
    assert Link.slowest([Link(latency_us=1.0), Link(latency_us=2.0)]) == Link(latency_us=2.0)
    assert Link.slowest([]) == Link()
