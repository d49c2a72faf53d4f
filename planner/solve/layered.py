"""The best plan of one case under GPipe where single layers may be recomputed, jointly with the cuts.

Which layers to recompute is a problem of its own for every stage (`planner.solve.layerwise`), too dear to be solved for
all of them. The label programme therefore runs with lower bounds; the stages of its answer are then solved exactly, and
it runs again, until its answer consists of exact stages: no other plan can be faster, since every other plan was
judged by bounds. Each round makes at least one more stage exact, so it ends; with too many rounds, or with a stage
whose own answer is not exact, the proven gap is given.
"""

from dataclasses import replace

import numpy as np

from planner.core.cost.evaluate import Partition, step_us
from planner.solve.answer import Answer
from planner.solve.case import Case
from planner.solve.chain_dp import ChainCuts
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.gpipe import DYNAMIC_PROGRAMME, Windows, gpipe_searches, partition_of
from planner.solve.layer_times import LayerTimes
from planner.solve.tables import LAYERS

__all__ = ["layered_answer"]

_ROUNDS = 400


def layered_answer(case: Case, *, upper_us: float = np.inf, deadline: Deadline = NEVER) -> Answer:
    """The fastest partition found that beats `upper_us`, and what none can beat; raises as `gpipe_answer`."""
    search = _Search(replace(case, layers=LayerTimes(case.costs, case.micro_batches)), upper_us, deadline)
    try:
        search.run()
    except OutOfTimeError:
        if search.best is None:
            raise
    step_us = search.upper_us if search.best is not None else np.inf
    return Answer(case, search.best, step_us, min(search.bound_us, search.upper_us), DYNAMIC_PROGRAMME)


class _Search:
    def __init__(self, case: Case, upper_us: float, deadline: Deadline) -> None:
        self._case = case
        self._deadline = deadline
        self.upper_us = upper_us
        self.bound_us = case.bound_us
        self.best: Partition | None = None

    def run(self) -> None:
        windows = Windows(self._case)
        windows.widen(self.upper_us)
        for _ in range(_ROUNDS):
            best: ChainCuts | None = None
            for search in gpipe_searches(self._case, windows.width, self._deadline):
                best = search.best(upper_us=best.step_us if best is not None else self.upper_us) or best
            if best is not None:
                self._take(best)
            # Once the window is wide enough for the best partition so far, the programme's optimum is a bound for all.
            if windows.widen(self.upper_us):
                continue
            self.bound_us = self.upper_us if best is None else max(self.bound_us, best.step_us)
            if self.bound_us >= self.upper_us * (1 - 1e-12):
                return

    def _take(self, cuts: ChainCuts) -> None:
        partition = _with_layers(self._case, cuts)
        if partition is not None:
            time_us = step_us(self._case.costs, partition, self._case.cluster)
            if time_us < self.upper_us:
                self.best, self.upper_us = partition, time_us


def _with_layers(case: Case, cuts: ChainCuts) -> Partition | None:
    """The partition with the layers it recomputes; None if a stage does not fit after all."""
    layers = case.layers
    assert layers is not None  # this module gives it to every case
    recomputed = []
    for k, (first, end) in enumerate(zip(cuts.cuts[:-1], cuts.cuts[1:], strict=True)):
        choice = layers.exact(first, end, case.caps_bytes[0 if case.alike else k]) if cuts.choices[k] == LAYERS else ()
        if choice is None:
            return None
        recomputed.append(choice.recomputed if choice else ())
    whole = tuple(0 if choice == LAYERS else choice for choice in cuts.choices)
    partition = partition_of(case, cuts._replace(choices=whole))
    recompute = tuple(
        "layers" if some else "never" if cuts.choices[k] == LAYERS else partition.recompute[k]
        for k, some in enumerate(recomputed)
    )
    return replace(partition, recompute=recompute, recomputed=tuple(recomputed) if any(recomputed) else ())
