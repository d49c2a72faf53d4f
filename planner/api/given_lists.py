"""A schedule from a file: what the options say beside its lists, which tell devices, micro-batches and chunks."""

import os
from collections.abc import Sequence
from dataclasses import replace

from planner import files
from planner.api import texts
from planner.api.options.solving import SolverOptions
from planner.api.texts import File
from planner.core.errors import UsageError
from planner.core.schedule import Listed
from planner.core.values.profile import Profile
from planner.core.values.units import counted

_SUFFIX = ".csv"


def lists_path(schedule: File) -> str | None:
    """The file that an option for the schedule names, if it names none of the schedules that there are."""
    if isinstance(schedule, os.PathLike) or str(schedule).lower().endswith(_SUFFIX):
        return os.fspath(schedule)
    return None


def lists_of(schedule: File) -> Listed | None:
    """The schedule in the file that the option names, if it names one; raises `FileError` if it cannot be read."""
    path = lists_path(schedule)
    return None if path is None else files.read_schedule(path)


def for_lists(asked: SolverOptions, lists: Listed, profile: Profile) -> SolverOptions:
    """The options with what the lists tell, where they leave it open.

    Raises:
        UsageError: They say otherwise, or there are not as many layers, devices or samples as the lists need.
    """
    path = lists_path(asked.schedule)
    num_devices, num_micro_batches = len(lists.rows), lists.num_micro_batches
    num_stages = len({action.stage for row in lists.rows for action in row})
    if len(profile.layers) < num_stages:
        raise UsageError(
            f"`{path}` is for {counted(num_stages, 'stage')}, the profile has {counted(len(profile.layers), 'layer')}",
            hint="every stage needs at least one layer",
        )
    replicas = max(1, texts.count_or_auto("--replicas", asked.replicas))
    needed, there = num_devices * replicas, _devices(asked)
    if there is not None and there < needed:
        each = f", in {replicas} replicas {needed}" if replicas > 1 else ""
        raise UsageError(
            f"`{path}` is for {counted(num_devices, 'device')}{each}, there are {there}",
            hint=f"use `--devices {needed}`",
        )
    batch = max(profile.micro_batch_sizes) if asked.batch is None else asked.batch
    if batch > 0 and batch % (num_micro_batches * replicas):
        shared = f" in each of {replicas} replicas" if replicas > 1 else ""
        raise UsageError(
            f"`{path}` is for {counted(num_micro_batches, 'micro-batch', 'es')}{shared}, into which a batch of {batch} "
            "cannot be split",
            hint=f"use `--batch {num_micro_batches * replicas}` or a multiple of it",
        )
    return replace(
        asked,
        devices=needed if there is None else asked.devices,
        micro_batches=_agreed("--micro-batches", asked.micro_batches, num_micro_batches, f"`{path}` has"),
        chunks=_agreed("--chunks", asked.chunks, num_stages // num_devices, f"each device of `{path}` has"),
    )


def _devices(asked: SolverOptions) -> int | None:
    """How many there are; None where nothing says so."""
    if asked.devices is not None:
        return texts.device_count(asked.devices)
    if asked.nodes is None:
        return None
    nodes, each = texts.nodes(asked.nodes)
    return nodes * each


def check_cuts(asked: SolverOptions, lists: Listed, cuts: Sequence[int]) -> None:
    """Raises `UsageError` where cuts were given for another number of stages than the lists have."""
    num_stages = len({action.stage for row in lists.rows for action in row})
    if len(cuts) != num_stages:
        raise UsageError(
            f"{counted(len(cuts), 'stage')} were given, `{lists_path(asked.schedule)}` is for {num_stages}",
            hint=f"give {num_stages} numbers of layers, or leave `--balance` out",
        )


def refuse_lists(schedule: File, verb: str) -> None:
    """Raises `UsageError` where the option names a file: for verbs that ask for several numbers of devices."""
    path = lists_path(schedule)
    if path is not None:
        raise UsageError(
            f"`{verb}` compares numbers of devices, `--schedule {path}` is for one",
            hint=f"ask `gpipe-plan solve --schedule {path}`",
        )


def _agreed(option: str, asked: texts.Numbers, number: int, has: str) -> int:
    """What the lists have, if the option says nothing else."""
    if asked != "auto" and texts.one(option, asked) != number:
        raise UsageError(f"`{option} {asked}`: {has} {number}", hint=f"leave `{option}` out")
    return number
