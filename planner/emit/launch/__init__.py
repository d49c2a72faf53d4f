"""Launchers: files that start `train.py` on a cluster. Each scheduler of jobs has its own module."""

from collections.abc import Callable
from typing import Final

from planner.emit.launch.job import LaunchJob, make_launch_job
from planner.emit.launch.kubernetes import kubernetes_file
from planner.emit.launch.ray_train import ray_file
from planner.emit.launch.slurm import slurm_file
from planner.emit.layout import EngineFile

__all__ = ["LAUNCHERS", "LaunchJob", "make_launch_job"]

LAUNCHERS: Final[dict[str, Callable[[LaunchJob], EngineFile]]] = {
    "slurm": slurm_file,
    "kubernetes": kubernetes_file,
    "ray": ray_file,
}
"""Functions that write launchers, by name of the scheduler in `emit --launch`."""
