"""What one process notes of its run: losses, samples, times and memory; a report is made of it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from planner.core.values.run_report import RunReport
from planner.executor.job import Job
from planner.executor.measure.recorder import Recorder
from planner.executor.measure.reporting import run_report
from planner.executor.run.stage_module import StageModule
from planner.executor.watch.position import ANY

if TYPE_CHECKING:
    from planner.executor.measure.run_waits import ProcessRun

__all__ = ["Notes"]


class Notes:
    """The notes of one process. Make them before anything that should count as this process's memory.

    Args:
        job: What the process is to do.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.recorder = Recorder(job.device)
        self.losses: list[float] = []
        self.samples: list[int] = []
        """Of every step, over all replicas: a mini-batch may be smaller than planned."""
        self.runs: list[ProcessRun] = []
        """What every process did in the last steps; on rank 0, once there is a report."""

    def computed(self, loss: float, samples: int) -> None:
        """Notes the loss of a step, and how many samples it had, over all replicas."""
        self.losses.append(loss)
        self.samples.append(samples)

    def report(self, modules: Sequence[StageModule]) -> RunReport | None:
        """What the run took, on rank 0; None elsewhere. Every rank must call it, with its stages."""
        self.recorder.close()
        self._job.position.at("the report", waits_for=ANY)
        self.runs, report = run_report(
            self._job.balance,
            self._job.place,
            self.recorder,
            modules,
            device=self._job.device,
            seed=self._job.seed,
            losses=self.losses,
            samples=self.samples,
        )
        return report
