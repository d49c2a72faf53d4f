"""Launchers: files that start `train.py` on a cluster, one per kind of scheduler."""

from collections.abc import Callable
from typing import Final

from planner.core.errors import UsageError
from planner.emit.launch.job import LaunchJob, job_of
from planner.emit.launch.kubernetes import kubernetes_file
from planner.emit.launch.ray_train import ray_file
from planner.emit.launch.slurm import slurm_file
from planner.emit.layout import EngineFile

__all__ = ["LAUNCHERS", "LaunchJob", "check_launcher", "job_of"]

LAUNCHERS: Final[dict[str, Callable[[LaunchJob], EngineFile]]] = {
    "slurm": slurm_file,
    "kubernetes": kubernetes_file,
    "ray": ray_file,
}
"""Functions that write launchers, by name of the scheduler in `emit --launch`."""


def check_launcher(name: str) -> None:
    """Raise UsageError if the scheduler is unknown."""
    if name not in LAUNCHERS:
        raise UsageError(f"unknown `--launch {name}`", hint=f"one of {', '.join(LAUNCHERS)}")
