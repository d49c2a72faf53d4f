"""The best plan of one case under GPipe where single layers may be recomputed, jointly with the cuts.

Which layers to recompute is a problem of its own for every stage (`cheapest.py`), too dear to be solved for
all of them. The label programme therefore runs with lower bounds; the stages of its answer are then solved exactly, and
it runs again, until its answer consists of exact stages: no other plan can be faster, since every other plan was
judged by bounds. Each round makes at least one more stage exact, so it ends; with too many rounds, or with a stage
whose own answer is not exact, the proven gap is given.
"""

from dataclasses import replace

import numpy as np

from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.cost.stage_time import LAYERS
from planner.solve.answer import Answer
from planner.solve.chain.chain_dp import ChainCuts
from planner.solve.chain.gpipe import DYNAMIC_PROGRAMME, Windows, gpipe_searches
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.layers.exact_stages import LayerTimes
from planner.solve.space.case import Case

_ROUNDS = 400


def search_gpipe_by_layers(case: Case, *, upper_us: float = np.inf, deadline: Deadline = NEVER) -> Answer:
    """The fastest partition that beats `upper_us`, and what none can beat; raises as `search_gpipe`."""
    layers = LayerTimes(case.costs)
    case = replace(case, least_again_us=layers.table)
    best: Partition | None = None
    bound_us = case.bound_us
    windows = Windows(case)
    windows.widen(upper_us)
    try:
        for _ in range(_ROUNDS):
            cuts = _best_cuts(case, windows.width, upper_us, deadline)
            partition = None if cuts is None else _with_layers(case, layers, cuts)
            time_us = np.inf if partition is None else Evaluation(case.costs, partition, case.cluster).step_us
            if time_us < upper_us:
                best, upper_us = partition, time_us
            # Once the window is wide enough for the best partition so far, the programme's optimum is a bound for all.
            if windows.widen(upper_us):
                continue
            bound_us = upper_us if cuts is None else max(bound_us, cuts.step_us)
            if bound_us >= upper_us * (1 - 1e-12):
                break
    except OutOfTimeError:
        if best is None:
            raise
    return Answer(case, best, np.inf if best is None else upper_us, min(bound_us, upper_us), DYNAMIC_PROGRAMME)


def _best_cuts(case: Case, width: int, upper_us: float, deadline: Deadline) -> ChainCuts | None:
    best: ChainCuts | None = None
    for search in gpipe_searches(case, width, deadline):
        best = search.best(upper_us=best.step_us if best is not None else upper_us) or best
    return best


def _with_layers(case: Case, layers: LayerTimes, cuts: ChainCuts) -> Partition | None:
    """The partition with the layers it recomputes; None if a stage does not fit after all."""
    recomputed = []
    for k, (first, end) in enumerate(zip(cuts.cuts[:-1], cuts.cuts[1:], strict=True)):
        cap = case.caps_bytes[0 if case.alike else k]
        moments = case.moments(len(cuts.choices) - 1 - k)
        choice = layers.exact(first, end, cap, moments) if cuts.choices[k] == LAYERS else ()
        if choice is None:
            return None
        recomputed.append(choice.recomputed if choice else ())
    choices = [
        LAYERS if some else 0 if choice == LAYERS else choice
        for choice, some in zip(cuts.choices, recomputed, strict=True)
    ]
    return case.partition(cuts.cuts, choices, recomputed=tuple(recomputed) if any(recomputed) else ())
