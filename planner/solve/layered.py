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
from planner.solve.chain_dp import Found, LabelSearch
from planner.solve.deadline import NEVER, Deadline, OutOfTimeError
from planner.solve.gpipe import DYNAMIC_PROGRAMME, Windows, partition_of, stage_counts
from planner.solve.laws import GPipeLaw
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
            found = _best(self._case, windows.width, self.upper_us, self._deadline)
            if found is not None:
                self._take(found)
            # Once the window is wide enough for the best plan known, what the programme finds is a bound for all.
            if windows.widen(self.upper_us):
                continue
            self.bound_us = self.upper_us if found is None else max(self.bound_us, found.step_us)
            if self.bound_us >= self.upper_us * (1 - 1e-12):
                return

    def _take(self, found: Found) -> None:
        partition = _with_layers(self._case, found)
        if partition is not None:
            time_us = step_us(self._case.costs, partition, self._case.cluster)
            if time_us < self.upper_us:
                self.best, self.upper_us = partition, time_us


def _best(case: Case, width: int, upper_us: float, deadline: Deadline) -> Found | None:
    best: Found | None = None
    for count in stage_counts(case):
        search = LabelSearch(case.problem(count, width=width), GPipeLaw(case.micro_batches), deadline=deadline)
        best = search.best(upper_us=best.step_us if best is not None else upper_us) or best
    return best


def _with_layers(case: Case, found: Found) -> Partition | None:
    """The partition with the layers it recomputes; None if a stage does not fit after all."""
    layers = case.layers
    assert layers is not None  # this module gives it to every case
    recomputed = []
    for k, (first, end) in enumerate(zip(found.cuts[:-1], found.cuts[1:], strict=True)):
        choice = layers.exact(first, end, case.caps_bytes[0 if case.alike else k]) if found.choices[k] == LAYERS else ()
        if choice is None:
            return None
        recomputed.append(choice.recomputed if choice else ())
    partition = partition_of(case, _without_layers(found))
    recompute = tuple(
        "layers" if some else "never" if found.choices[k] == LAYERS else partition.recompute[k]
        for k, some in enumerate(recomputed)
    )
    return replace(partition, recompute=recompute, recomputed=tuple(recomputed) if any(recomputed) else ())


def _without_layers(found: Found) -> Found:
    """The same with `never` in place of single layers."""
    return found._replace(choices=tuple(0 if choice == LAYERS else choice for choice in found.choices))
