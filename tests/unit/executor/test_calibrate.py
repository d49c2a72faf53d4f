"""Tests of the calibration of the executor, which is cached once per machine."""

import json
from functools import partial
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import start_processes

from planner.core.values.cluster import ExecutorCost, Link
from planner.executor.measure import calibrate
from planner.executor.measure.calibrate import MeasuredExecutor, executor_cost, measure_executor

COST = ExecutorCost(overhead_us=12.5, link=Link(latency_us=3.0, bytes_per_s=1e9, blocking=True))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list with an entry for each start of processes."""
    calls: list[int] = []

    def measure() -> MeasuredExecutor:
        calls.append(1)
        return MeasuredExecutor(COST, is_alone=True)

    monkeypatch.setattr(calibrate, "measure_executor", measure)
    return calls


def _cost(cache: Path) -> ExecutorCost:
    return executor_cost(cache, warn=pytest.fail)


def test_calibration_is_measured_once_per_machine(tmp_path: Path, measured: list[int]) -> None:
    cache = tmp_path / "made" / "here" / "executor.json"
    assert [_cost(cache) for _ in range(3)] == [COST] * 3
    assert len(measured) == 1


@pytest.mark.parametrize("key", ["cpu", "torch", "gpipe-plan"])
def test_other_machines_and_versions_are_measured_again(tmp_path: Path, measured: list[int], key: str) -> None:
    cache = tmp_path / "executor.json"
    _cost(cache)
    known = json.loads(cache.read_text())
    known["machine"][key] = "another"
    known["overhead_us"] = 99.0
    cache.write_text(json.dumps(known))
    assert _cost(cache) == COST
    assert len(measured) == 2
    assert _cost(cache) == COST
    assert len(measured) == 2


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda text: text[: len(text) // 2], id="truncated"),
        pytest.param(lambda _: "", id="empty"),
        pytest.param(lambda _: "[]", id="a list"),
        pytest.param(lambda _: "null", id="null"),
        pytest.param(lambda text: text.replace("overhead_us", "overhead"), id="key missing"),
        pytest.param(lambda text: text.replace("latency_us", "latency"), id="key of the link unknown"),
    ],
)
def test_a_broken_cache_is_replaced(tmp_path: Path, measured: list[int], change: object) -> None:
    cache = tmp_path / "executor.json"
    _cost(cache)
    spoilt = change(cache.read_text())
    cache.write_text(spoilt)
    assert _cost(cache) == COST
    assert len(measured) == 2
    assert cache.read_text() != spoilt
    assert _cost(cache) == COST
    assert len(measured) == 2


def test_an_unwritable_cache_does_not_lose_the_measurement(tmp_path: Path, measured: list[int]) -> None:
    (tmp_path / "file").write_text("not a folder\n")
    assert _cost(tmp_path / "file" / "executor.json") == COST
    assert len(measured) == 1


def test_calibrations_on_a_busy_machine_are_reported_and_not_cached(tmp_path, monkeypatch):
    found = [
        MeasuredExecutor(COST, is_alone=False),
        MeasuredExecutor(ExecutorCost(overhead_us=1.0, link=COST.link), is_alone=True),
    ]
    monkeypatch.setattr(calibrate, "measure_executor", lambda: found.pop(0))
    warnings: list[str] = []
    assert executor_cost(tmp_path / "executor.json", warn=warnings.append) == COST
    assert len(warnings) == 1
    assert "12 us" in warnings[0]
    assert _cost(tmp_path / "executor.json").overhead_us == 1.0
    assert _cost(tmp_path / "executor.json").overhead_us == 1.0
    assert found == []


@pytest.mark.slow
# JAX warns of forks if an earlier test has imported it. The processes do not use it.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_calibration_of_two_processes_is_positive_and_finite(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Over gloo, a transfer blocks the receiving stage. Forked processes start faster."""
    monkeypatch.setattr(calibrate, "spawn", partial(start_processes, start_method=method))
    cost, is_alone = measure_executor()
    assert 0 < cost.overhead_us < float("inf")
    assert cost.link.latency_us >= 0
    assert 0 <= cost.link.bytes_per_s < float("inf")
    assert cost.link.bytes_per_s > 0 or not is_alone  # on a busy machine the larger transfer may be faster
    assert cost.link.blocking
