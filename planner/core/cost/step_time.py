"""Step time of GPipe in closed form.

Forward and backward are two flow shops in a row (all stages finish their forwards before stage K-1 starts its first
backward): M jobs pass the machines stage 0, link 0, stage 1, …, stage K-1, and back. For M equal jobs the makespan of
a flow shop is the sum of the machine times plus (M-1) times the largest (Johnson 1954; every critical path takes M-1
extra jobs on one machine). Where `except-last` spares the last micro-batch its recomputation, the last job differs,
and the critical path is found by the recursion in `flow_shop_us`.

The optimizers' steps follow, see `planner.core.cost.stage_time`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.core.cost.simulate import StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Parts of one step, in microseconds, the optimizers' steps left out."""

    forward_us: float
    backward_us: float

    @property
    def step_us(self) -> float:
        """From the first forward to the last backward."""
        return self.forward_us + self.backward_us


def flow_shop_us(machines: Sequence[tuple[float, float]], num_jobs: int) -> float:
    """Makespan of `num_jobs` jobs over machines in order, all alike but the last job.

    Args:
        machines: Per machine, the time of jobs 1..n-1 and the time of job n.
        num_jobs: n, at least 1.

    Returns:
        max over k of sum_{1..k} p + (n-2) max_{1..k} p + sum_{k..} q, with p, q a machine's two times: the last job
        follows the others up to machine k and runs free behind it. With the letters of the label programme: a is the
        sum of p so far, x the largest, d when the last job leaves.
    """
    a = x = d = 0.0
    for p, q in machines:
        if num_jobs == 1:
            d += q
            continue
        a, x = a + p, max(x, p)
        # It goes on at once, or waits for the others.
        d = max(d, a + (num_jobs - 2) * x) + q
    return d


def gpipe_step(stages: Sequence[StageTimes], *, micro_batches: int) -> StepTime:
    """Step time of GPipe over `stages` with M micro-batches."""
    forward: list[tuple[float, float]] = []
    backward: list[tuple[float, float]] = []  # collected from stage 0 on, run from stage K-1 on
    received_us = 0.0
    for stage in stages:
        boundary_us = stage.send_us if stage.blocking else 0.0
        forward.append((stage.forward_us + received_us,) * 2)
        backward.append((stage.backward_us + boundary_us, stage.last_backward_us + boundary_us))
        if not stage.blocking:
            forward.append((stage.send_us, stage.send_us))
            backward.append((stage.send_us, stage.send_us))
        received_us = boundary_us
    return StepTime(
        forward_us=flow_shop_us(forward, micro_batches),
        backward_us=flow_shop_us(backward[::-1], micro_batches),
    )
