"""Whether the repeats taken so far tell which plan is best, or more of them might change it.

Subsampling (Politis and Romano, "Large sample confidence regions based on subsamples under minimal assumptions",
Annals of Statistics 22, 1994): half of the repeats, drawn without replacement, give a profile as another run might have
given. The regret of the plan that the real profile suggests is by how much it is slower, under a drawn profile, than
that profile's own best plan. What counts is the regret that nine of ten draws stay below: a mean near zero may hide one
run in five that leads to another plan.

A plan is here a micro-batch size and the evenest cut in forward + backward, for two to four stages and two batches:
what the solver would choose under GPipe without caps, links and recomputation, none of which the profiler knows.
"""

import random
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise, product

from planner.core.cost.step_time import flow_shop_us
from planner.device.clock import typical_us
from planner.profile.units import Key

Samples = Mapping[Key, Sequence[tuple[float, float]]]
"""Forward and backward time of every repeat."""

Plan = tuple[int, Sequence[int]]
"""Micro-batch size, and cuts from 0 to L."""

_STAGES = (2, 3, 4)
_BATCHES = (1, 8)
"""Times the largest micro-batch size."""

_OVERHEAD_US = 100.0
"""An executor spends more than this per micro-batch and stage: what is far below it makes no difference."""

_DRAWS = 40
_HALVINGS = 40


def regret(chain: Sequence[str], samples: Samples) -> float:
    """What nine of ten draws stay below, as a share of a step, for the stages and the batch where it is largest.

    Args:
        chain: The digest of every layer, in order.
        samples: All repeats of every digest at every micro-batch size.
    """
    rng = random.Random(0)  # noqa: S311 - nothing secret
    most = max(size for _, size in samples)
    questions = [(k, most * n) for k, n in product(_STAGES, _BATCHES) if k <= len(chain)]
    measured = _times(chain, samples)
    ours = {question: plan for question, (_, plan) in _best(measured, questions).items()}
    regrets: dict[tuple[int, int], list[float]] = {question: [] for question in questions}
    for _ in range(_DRAWS):
        drawn = _times(chain, {key: rng.sample(list(s), k=(len(s) + 1) // 2) for key, s in samples.items()})
        for (stages, batch), (best_us, _) in _best(drawn, questions).items():
            size, cuts = ours[stages, batch]
            regrets[stages, batch].append(max(0.0, _step_us(drawn[size], cuts, batch, size) / best_us - 1))
    return max((sorted(each)[_DRAWS * 9 // 10] for each in regrets.values()), default=0.0)


def _times(chain: Sequence[str], samples: Samples) -> dict[int, Sequence[float]]:
    """Forward + backward of every layer, by micro-batch size."""
    both = {key: sum(typical_us(times) for times in zip(*s, strict=True)) for key, s in samples.items()}
    return {size: [both[digest, size] for digest in chain] for size in {size for _, size in samples}}


def _best(
    times: Mapping[int, Sequence[float]], questions: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], tuple[float, Plan]]:
    """The fastest plan for so many stages and such a batch, with its time."""
    cuts = {(size, k): _evenest(times[size], k) for size in times for k in {k for k, _ in questions}}
    return {
        (k, batch): min((_step_us(times[size], cuts[size, k], batch, size), (size, cuts[size, k])) for size in times)
        for k, batch in questions
    }


def _step_us(times: Sequence[float], cuts: Sequence[int], batch: int, size: int) -> float:
    """GPipe's step, with the slowest stage of forward that of backward too: one flow shop instead of two in a row."""
    stages = [sum(times[first:end]) + _OVERHEAD_US for first, end in pairwise(cuts)]
    # Sizes need not divide the batch: a plan would leave such a size out, and here it is worth what it nearly takes.
    return flow_shop_us([(stage, stage) for stage in stages], max(1, round(batch / size)))


def _evenest(times: Sequence[float], stages: int) -> list[int]:
    """Cuts whose slowest stage is as fast as possible: bisection on that time, stages filled in turn."""
    upto = [0.0, *accumulate(times)]
    low, high = max(times), upto[-1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _filled(upto, stages, middle)[-1] == len(times) else (middle, high)
    return _filled(upto, stages, high)


def _filled(upto: Sequence[float], stages: int, limit: float) -> list[int]:
    cuts = [0]
    for _ in range(stages):
        cuts.append(bisect_right(upto, upto[cuts[-1]] + limit) - 1)
    return cuts
