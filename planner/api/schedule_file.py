"""Schedules from files: read the order of each device's actions, and combine it with the options of `solve`."""

import os
from collections.abc import Sequence
from dataclasses import replace

from planner.api import texts
from planner.api.defaults import default_batch
from planner.api.options.solving import SolverOptions
from planner.api.texts import File
from planner.core.errors import UsageError
from planner.core.schedule import ListedSchedule
from planner.core.values.profile import Profile
from planner.core.values.units import pluralize

_SUFFIX = ".csv"


def schedule_file_path(schedule: File) -> str | None:
    """Return the path if `--schedule` names a file; else None."""
    if isinstance(schedule, os.PathLike) or str(schedule).lower().endswith(_SUFFIX):
        return os.fspath(schedule)
    return None


def options_for_schedule(options: SolverOptions, schedule: ListedSchedule, profile: Profile) -> SolverOptions:
    """Return `options` with the numbers of devices, micro-batches and chunks of `schedule`.

    Raises:
        UsageError: An option contradicts the schedule, or the schedule needs more layers, devices or samples.
    """
    path = schedule_file_path(options.schedule)
    num_devices, num_micro_batches = len(schedule.rows), schedule.num_micro_batches
    num_stages = len({action.stage for row in schedule.rows for action in row})
    if len(profile.layers) < num_stages:
        raise UsageError(
            f"`{path}` is for {pluralize(num_stages, 'stage')}, "
            f"the profile has {pluralize(len(profile.layers), 'layer')}",
            hint="every stage needs at least one layer",
        )
    replicas = max(1, texts.parse_count_or_auto("--replicas", options.replicas))
    needed, available = num_devices * replicas, _devices(options)
    if available is not None and available < needed:
        each = f", in {replicas} replicas {needed}" if replicas > 1 else ""
        raise UsageError(
            f"`{path}` is for {pluralize(num_devices, 'device')}{each}, but there are {available}",
            hint=f"use `--devices {needed}`",
        )
    batch = default_batch(profile, available or needed) if options.batch is None else options.batch
    if batch > 0 and batch % (num_micro_batches * replicas):
        shared = f" in each of {replicas} replicas" if replicas > 1 else ""
        raise UsageError(
            f"`{path}` is for {pluralize(num_micro_batches, 'micro-batch', 'es')}{shared}, "
            f"into which a batch of {batch} cannot be split",
            hint=f"use `--batch {num_micro_batches * replicas}` or a multiple of it",
        )
    return replace(
        options,
        devices=needed if available is None else options.devices,
        micro_batches=_agreed("--micro-batches", options.micro_batches, num_micro_batches, f"`{path}` has"),
        chunks=_agreed("--chunks", options.chunks, num_stages // num_devices, f"each device of `{path}` has"),
    )


def _devices(options: SolverOptions) -> int | None:
    if options.devices is not None:
        return texts.parse_device_count(options.devices)
    if options.nodes is None:
        return None
    nodes, each = texts.parse_node_counts(options.nodes)
    return nodes * each


def check_cuts(options: SolverOptions, schedule: ListedSchedule, cuts: Sequence[int]) -> None:
    """Raise UsageError if `cuts` and a schedule from a file have different numbers of stages.

    Args:
        options: Options of the request; `options.schedule` is the schedule's file.
        schedule: The schedule.
        cuts: Number of layers of each stage.
    """
    num_stages = len({action.stage for row in schedule.rows for action in row})
    if len(cuts) != num_stages:
        path = schedule_file_path(options.schedule)
        raise UsageError(
            f"`--balance` has {pluralize(len(cuts), 'stage')}, but `{path}` has {num_stages}",
            hint=f"give {num_stages} numbers of layers, or remove `--balance`",
        )


def _agreed(option: str, value: texts.Numbers, number: int, has: str) -> int:
    if value != "auto" and texts.parse_integer(option, value) != number:
        raise UsageError(f"`{option} {value}`: {has} {number}", hint=f"remove `{option}`")
    return number
