"""Step time of GPipe in closed form.

Let K be the number of stages, and M the number of micro-batches. All stages finish their forwards before stage K-1
starts its first backward. So forward and backward are two flow shops, one after the other. In the first, M jobs pass
the machines stage 0, link 0, stage 1, ..., stage K-1; in the second, in reverse order. The makespan of M equal jobs is
the sum of the machine times plus (M-1) times the largest of them (Johnson 1954). With `except-last`, the last
micro-batch is not recomputed and the last job differs; `flow_shop_us` computes the critical path by a recursion.

For the optimizer's step, see `planner.core.cost.stage_time`.
"""

from collections.abc import Sequence

from planner.core.cost.simulate import StageTimes


def flow_shop_us(machines: Sequence[tuple[float, float]], num_jobs: int) -> float:
    """Return the time until all jobs have passed all machines in order (makespan).

    Args:
        machines: For each machine, the time of a job, and the time of the last job, which may differ.
        num_jobs: Number of jobs, at least 1.
    """
    # With times p, and q for the last of n jobs, the makespan is the largest sum_{1..k} p + (n-2) max_{1..k} p +
    # sum_{k..} q over all machines k. a: sum of p so far, x: largest p so far, d: end of the last job on this machine.
    a = x = d = 0.0
    for p, q in machines:
        if num_jobs == 1:
            d += q
            continue
        a, x = a + p, max(x, p)
        # The last job starts when it arrives, or when the other jobs have left the machine.
        d = max(d, a + (num_jobs - 2) * x) + q
    return d


def gpipe_step_us(stages: Sequence[StageTimes], micro_batches: int) -> float:
    """Return the time from the first forward to the end of the last backward of GPipe, in microseconds."""
    forward: list[tuple[float, float]] = []
    backward: list[tuple[float, float]] = []  # collected from stage 0 to K-1, and run from K-1 to 0
    received_us = 0.0
    for stage in stages:
        boundary_us = stage.send_us if stage.blocking else 0.0
        forward.append((stage.forward_us + received_us,) * 2)
        backward.append((stage.backward_us + boundary_us, stage.last_backward_us + boundary_us))
        if not stage.blocking:
            forward.append((stage.send_us, stage.send_us))
            backward.append((stage.send_us, stage.send_us))
        received_us = boundary_us
    return flow_shop_us(forward, micro_batches) + flow_shop_us(backward[::-1], micro_batches)
