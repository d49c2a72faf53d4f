"""Latency and bandwidth fitted to measured transfers, and the links between devices."""

import random

import pytest

from planner.core.values.cluster import Cluster, Link
from planner.core.values.links import fit_link

SIZES = [1024 * 4**n for n in range(8)]


def times_of(latency_us: float, bytes_per_s: float, noise: float = 0.0) -> list[float]:
    """Return transfer times of `SIZES`."""
    rng = random.Random(0)
    link = Link(latency_us=latency_us, bytes_per_s=bytes_per_s)
    return [link.transfer_us(size) * (1 + noise * rng.uniform(-1, 1)) for size in SIZES]


@pytest.mark.parametrize(("latency_us", "bytes_per_s"), [(400.0, 2e9), (5.0, 25e9), (0.0, 1e8), (1000.0, 1e6)])
def test_fit_of_exact_times_is_exact(latency_us: float, bytes_per_s: float) -> None:
    link = fit_link(SIZES, times_of(latency_us, bytes_per_s), blocking=True)
    assert link.latency_us == pytest.approx(latency_us, abs=0.1)
    assert link.bytes_per_s == pytest.approx(bytes_per_s, rel=2e-3)
    assert link.blocking


def test_fit_of_noisy_times_is_within_ten_percent() -> None:
    """The largest messages must not hide the latency."""
    link = fit_link(SIZES, times_of(400.0, 2e9, 0.1), blocking=False)
    assert link.latency_us == pytest.approx(400.0, rel=0.1)
    assert link.bytes_per_s == pytest.approx(2e9, rel=0.1)
    assert not link.blocking


def test_fit_of_two_sizes_is_exact() -> None:
    link = fit_link((4096, 2**22), (100.0 + 4.096, 100.0 + 4194.304), blocking=True)
    assert (link.latency_us, link.bytes_per_s) == (100.0, 1e9)


def test_fitted_latency_is_never_negative() -> None:
    link = fit_link([1000, 10000], [1.0, 20.0], blocking=False)
    assert link.latency_us == 0.0
    assert 5e8 < link.bytes_per_s < 1e9


def test_times_that_do_not_grow_give_unlimited_bandwidth() -> None:
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
    """Return a cluster of four devices."""
    return Cluster(memory_bytes=(1,) * 4, link=Link(latency_us=99.0), links=links)


def test_every_device_has_its_own_link() -> None:
    for count in (2, 3, 4):
        behind = [cluster().link_after(d, num_devices=count) for d in range(count - 1)]
        assert behind == list(LINKS[: count - 1])


def test_link_back_to_the_first_device_is_the_slowest() -> None:
    """This link is not measured."""
    assert cluster().link_after(3, num_devices=4) == Link(latency_us=9.0, bytes_per_s=1e8, blocking=True)
    assert cluster().link_after(1, num_devices=2) == LINKS[0]
    assert cluster().link_after(0, num_devices=1) == Link()


def test_link_of_replicas_is_their_slowest() -> None:
    """Of two pipelines of two devices, link 1 is between them and not used."""
    slowest = Link(latency_us=2.0, bytes_per_s=1e8, blocking=True)
    assert cluster().link_after(0, num_devices=2, replicas=2) == slowest
    assert cluster().link_after(1, num_devices=2, replicas=2) == slowest
    assert cluster().link_after(0, num_devices=1, replicas=4) == Link()


def test_slowest_of_unlimited_links_is_unlimited() -> None:
    assert Link.slowest([Link(latency_us=1.0), Link(latency_us=2.0)]) == Link(latency_us=2.0)
    assert Link.slowest([]) == Link()
