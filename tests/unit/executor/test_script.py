"""Tests of lines that a training script prints at its end."""

from planner.core.values.profile import Device
from planner.core.values.run_report import RunReport, StageRun
from planner.executor.script import peak_lines
from tests.unit.executor.test_placement import balance_of


def test_scripts_print_one_peak_per_device() -> None:
    """Stages of one device share its allocator."""
    stages = [
        StageRun(
            index=k, first=str(k), last=str(k), forward_us=1.0, backward_us=1.0, parameter_bytes=1, peak_bytes=k % 3
        )
        for k in range(6)
    ]
    report = RunReport(
        plan_digest="", device=Device(kind="cpu"), losses=(), step_us=(), warmup_steps=2, stages=tuple(stages)
    )
    looped = balance_of(6, schedule="interleaved", chunks=2)
    assert list(peak_lines(looped, report)) == [
        "stages 0 and 3: peak memory 0 B",
        "stages 1 and 4: peak memory 1 B",
        "stages 2 and 5: peak memory 2 B",
    ]
    assert list(peak_lines(balance_of(6), report))[4] == "stage 4: peak memory 1 B"
