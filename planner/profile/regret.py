"""Whether the repeats taken so far tell where to cut, or more of them might move the cut.

Bootstrap (Efron and Tibshirani, "An introduction to the bootstrap", 1993): drawing as many repeats as there are, with
replacement, gives a profile as another run might have given. The regret of the cut that the real profile suggests is by
how much its slowest stage is slower, under a drawn profile, than the slowest stage of that profile's own best cut.

Cuts are the evenest in forward + backward, for two to four stages: what the solver would do without caps, links and
recomputation, none of which the profiler knows. The slowest stage is the part of a step that grows with the number of
micro-batches, so the regret of a whole step is smaller than this one.
"""

import random
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean

__all__ = ["regret"]

Sample = tuple[float, float]
"""Forward and backward time of one repeat."""

_STAGES = (2, 3, 4)

_OVERHEAD_US = 100.0
"""An executor spends more than this per micro-batch and stage: what is far below it makes no difference."""

_DRAWS = 40
_HALVINGS = 40


def regret(
    chain: Sequence[str], samples: Mapping[str, Sequence[Sample]], typical: Callable[[list[float]], float]
) -> float:
    """Mean regret over the draws, of the number of stages where it is largest; a share of the slowest stage.

    Args:
        chain: The digest of every layer, in order.
        samples: All repeats of every digest at one micro-batch size.
        typical: What the profile keeps of several repeats.
    """
    rng = random.Random(0)  # noqa: S311 - nothing secret
    measured = _times(chain, samples, typical)
    cuts = {stages: _evenest(measured, stages) for stages in _STAGES if stages <= len(chain)}
    regrets: dict[int, list[float]] = {stages: [] for stages in cuts}
    for _ in range(_DRAWS):
        again = {digest: rng.choices(repeats, k=len(repeats)) for digest, repeats in samples.items()}
        drawn = _times(chain, again, typical)
        for stages, ours in cuts.items():
            best_us = _slowest(drawn, _evenest(drawn, stages))
            regrets[stages].append(max(0.0, _slowest(drawn, ours) - best_us) / (best_us + _OVERHEAD_US))
    return max(map(fmean, regrets.values()), default=0.0)


def _times(
    chain: Sequence[str], samples: Mapping[str, Sequence[Sample]], typical: Callable[[list[float]], float]
) -> list[float]:
    """Forward + backward of every layer."""
    both = {
        digest: sum(typical(list(times)) for times in zip(*repeats, strict=True)) for digest, repeats in samples.items()
    }
    return [both[digest] for digest in chain]


def _slowest(times: Sequence[float], cuts: Sequence[int]) -> float:
    return max(sum(times[first:end]) for first, end in pairwise(cuts))


def _evenest(times: Sequence[float], stages: int) -> list[int]:
    """Cuts from 0 to L whose slowest stage is as fast as possible: bisection on that time, stages filled in turn."""
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
