"""Sweeps: every cell equals a request of its own."""

import re
from dataclasses import replace

import pytest

import planner
from planner.core.errors import InfeasibleError, SolverError, UsageError
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.solve.questions import sweep as searches
from tests.support import gate
from tests.support.chains import random_profile

CAPS = (1_500, 2_500, 4_000, 8_000, 50_000)
COUNTS = (1, 2, 3, 5, 12)


def alone(profile: Profile, devices: int, cap: int, schedule: str) -> Plan | None:
    """Return the plan of one cell, by a search of its own."""
    try:
        return planner.solve(
            profile, devices=min(devices, len(profile.layers)), mem=cap, batch=8, schedule=schedule, headroom="10%"
        )
    except InfeasibleError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_every_cell_equals_the_plan_of_its_own_search(seed: int, schedule: str) -> None:
    profile = random_profile(seed, 8, sizes=(1, 2, 4))
    sweep = planner.sweep(profile, devices=COUNTS, mem=CAPS, batch=8, schedule=schedule, headroom="10%")
    assert [(cell.devices, cell.memory_bytes) for cell in sweep.cells] == [(d, m) for d in COUNTS for m in CAPS]
    statuses = set()
    for cell in sweep.cells:
        wanted = alone(profile, cell.devices, cell.memory_bytes, schedule)
        statuses.add(cell.status)
        if wanted is None:
            assert cell.plan is None
            continue
        assert cell.plan.predicted.step_us == pytest.approx(wanted.predicted.step_us)
        assert cell.plan.inputs == wanted.inputs
        assert [stage.memory_bytes for stage in cell.plan.stages] == [stage.memory_bytes for stage in wanted.stages]
        if schedule == "gpipe":
            assert cell.plan == wanted
    assert "none" in statuses


def test_smallest_cluster_has_fewest_devices_then_least_memory() -> None:
    sweep = planner.sweep(gate.profile(), devices="1,2,3", mem="500kB,900kB,1.5MB", batch=4, schedule="gpipe")
    assert sweep.smallest is not None
    found = sweep.cells[sweep.smallest]
    assert (found.devices, found.memory_bytes) == (2, 1_500_000)
    assert sweep.cell(2, 1_500_000) is found
    assert planner.sweep(gate.profile(), devices=2, mem="1kB", batch=4).smallest is None


def test_samples_per_device_count_idle_devices() -> None:
    (cell,) = planner.sweep(gate.profile(), devices=12, mem="2MB", batch=4).cells
    assert cell.samples_per_device_s == pytest.approx(cell.plan.predicted.samples_per_s / 12)


def test_limits_that_do_not_bind_share_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = searches.solve

    def counted(profile, request, **options):
        asked.append(request.inputs.devices)
        return real(profile, request, **options)

    monkeypatch.setattr(searches, "solve", counted)
    sweep = planner.sweep(gate.profile(), devices=(1, 2, 3), mem="5MB,6MB,7MB,8MB", batch=4)
    assert len(sweep.cells) == 12
    assert asked == [3, 2, 1]


def test_cells_are_unknown_if_the_time_limit_ends_their_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> Plan:
        raise SolverError("too late")

    monkeypatch.setattr(searches, "solve", late)
    sweep = planner.sweep(gate.profile(), devices=2, mem="5MB", batch=4, time_limit="1s")
    assert [cell.status for cell in sweep.cells] == ["unknown"]


def test_sweep_refuses_invalid_requests() -> None:
    with pytest.raises(UsageError, match=re.escape("micro-batches of 3")):
        planner.sweep(gate.profile(), devices="1,2", mem="1MB", batch=3, micro_batches=1)


def test_memory_limit_defaults_to_the_profiled_device() -> None:
    device = replace(gate.profile().device, memory_bytes=2_000_000)
    sweep = planner.sweep(replace(gate.profile(), device=device), devices=1, batch=4, headroom="10%")
    assert sweep.memory_bytes == (2_000_000,)
    assert sweep.cells[0].plan.inputs.memory_bytes == (1_800_000,)
