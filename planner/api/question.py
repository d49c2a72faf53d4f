"""Conversion of a plan's inputs to the options of `solve` with which the plan can be computed again."""

from collections.abc import Collection
from math import ceil
from typing import Final

from planner.api import texts
from planner.api.options.solving import recorded_options
from planner.core.schedule import GIVEN, allowed_schedules
from planner.core.values.balance import memory_options
from planner.core.values.cluster import ExecutorCost, Link
from planner.core.values.plan import DEFAULT_SCHEDULE, Inputs, ScheduleName
from planner.core.values.profile import Device

_CALIBRATED: Final = frozenset({"--overhead", "--reserve"})
"""Options of `solve` whose defaults come from `--calibration`."""


def solve_command_options(inputs: Inputs, device: Device, *, without: Collection[str] = ()) -> tuple[str, ...]:
    """Return the options of `solve` to compute a plan again, such as `--batch 32`, except options with their default.

    The result never contains `--balance`, `--micro-batches` or `--time-limit`, because plans do not record these
    options. Names of files are placeholders, such as `--links links.yaml`.

    Args:
        inputs: Inputs of the plan.
        device: Device of the profile. It has the defaults of `--link`, `--overhead` and `--reserve`.
        without: Names of options to leave out.
    """
    executor = device.executor or ExecutorCost(overhead_us=0.0, link=Link())
    num_nodes = ceil(inputs.devices / inputs.node_devices) if inputs.node_devices else 0
    is_link_left_out = inputs.links or inputs.link == executor.link
    options: dict[str, str | None] = {
        "--nodes": f"{num_nodes}x{inputs.node_devices}" if num_nodes else None,
        "--devices": str(inputs.devices) if num_nodes * inputs.node_devices != inputs.devices else None,
        **dict(option.split(" ", 1) for option in memory_options(inputs, device.how)),
        "--batch": str(inputs.batch),
        "--schedule": _schedule(inputs),
        "--chunks": str(inputs.chunks) if inputs.chunks and may_choose_chunks(inputs.schedule) else None,
        "--recompute": None if inputs.recompute == "auto" else inputs.recompute,
        "--speed": ",".join(map(repr, inputs.speeds)) or None,
        "--link": None if is_link_left_out else texts.link_text(inputs.link),
        "--links": "links.yaml" if inputs.links else None,
        "--overhead": None
        if inputs.overhead_us == executor.overhead_us
        else f"{texts.decimal_text(inputs.overhead_us)}us",
        "--reserve": None if inputs.reserve_bytes == device.reserve_bytes else f"{inputs.reserve_bytes}B",
    }
    pairs = [(name, value) for name, value in options.items() if value is not None]
    pairs += recorded_options(inputs)
    return tuple(f"{name} {value}".strip() for name, value in pairs if name not in without)


def calibrated_solve_options(inputs: Inputs, device: Device) -> tuple[str, ...]:
    """Return the options of `solve` to compute a plan again with a calibration file.

    The result has neither `--calibration` nor options whose values are in the calibration file, such as `--reserve`.
    """
    # If links between nodes differ, a calibration does not change them: see `calibration_of`.
    without = _CALIBRATED if inputs.inter_link is not None else _CALIBRATED | {"--link"}
    return solve_command_options(inputs, device, without=without)


def _schedule(inputs: Inputs) -> str | None:
    if inputs.schedule == DEFAULT_SCHEDULE:
        return None
    return "FILE.csv" if inputs.schedule == GIVEN else inputs.schedule


def may_choose_chunks(policy: ScheduleName) -> bool:
    """Return True if a plan for `--schedule policy` can have several chunks per device."""
    return policy != GIVEN and any(schedule.is_chunked for schedule in allowed_schedules(policy))
