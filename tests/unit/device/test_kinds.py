"""Kinds of devices."""

import inspect
import time

import pytest
import torch

from planner.core.values.devices import TORCH_KINDS, training_device_kind
from planner.device.clock import CpuClock
from planner.device.kinds import DEVICE_KINDS, accelerator_in_use, kind_of
from planner.device.meter import CpuMemoryMeter

CPU = torch.device("cpu")


def test_core_lists_the_registered_kinds() -> None:
    """Commands that must not import torch read the names from `core`."""
    assert tuple(DEVICE_KINDS) == TORCH_KINDS
    assert [kind.name for kind in DEVICE_KINDS.values()] == list(DEVICE_KINDS)


@pytest.mark.parametrize("name", list(DEVICE_KINDS))
def test_kinds_implement_all_methods(name: str) -> None:
    assert not inspect.isabstract(DEVICE_KINDS[name])
    assert DEVICE_KINDS[name].title
    assert DEVICE_KINDS[name].communication


def test_the_cpu_takes_any_number_of_processes() -> None:
    kind = kind_of(CPU)
    assert isinstance(kind.meter(), CpuMemoryMeter)
    assert isinstance(kind.clock(1), CpuClock)
    assert kind.device_count() > 10**6
    assert kind.select_device_of_rank(7) == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_an_accelerator_none_is_in_use() -> None:
    assert accelerator_in_use() is None


def test_moments_of_the_host_grow() -> None:
    kind = kind_of(CPU)
    earlier, later = kind.current_moment(), kind.current_moment()
    assert 0 <= later.ns_since(earlier) < 10**9


def test_a_moment_of_the_host_is_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = kind_of(CPU)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 5000)
    moment, at_ns = kind.moment_with_host_time()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: 5007)
    assert (at_ns, kind.current_moment().ns_since(moment)) == (5000, 7)


@pytest.mark.parametrize(("profiled", "trained"), [("cpu", "cpu"), ("cuda", "cuda"), ("tpu", "cpu")])
def test_plans_for_tpus_are_trained_on_the_cpu(profiled: str, trained: str) -> None:
    """In the bundled executor."""
    assert training_device_kind(profiled) == trained
