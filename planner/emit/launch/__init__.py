"""What starts `train.py` where clusters are: a file for each kind of scheduler."""

from collections.abc import Callable
from typing import Final

from planner.core.errors import UsageError
from planner.emit.launch.job import Job, job_of
from planner.emit.launch.kubernetes import kubernetes_file
from planner.emit.launch.ray_train import ray_file
from planner.emit.launch.slurm import slurm_file
from planner.emit.layout import EngineFile

__all__ = ["LAUNCHERS", "Job", "check_launcher", "job_of"]

LAUNCHERS: Final[dict[str, Callable[[Job], EngineFile]]] = {
    "slurm": slurm_file,
    "kubernetes": kubernetes_file,
    "ray": ray_file,
}
"""Schedulers, by what `emit --launch` calls them."""


def check_launcher(name: str) -> None:
    """Raises `UsageError` where there is no such scheduler."""
    if name not in LAUNCHERS:
        raise UsageError(f"unknown `--launch {name}`", hint=f"one of {', '.join(LAUNCHERS)}")
