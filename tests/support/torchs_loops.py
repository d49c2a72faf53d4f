"""The memory of stages under the loops of torch 2.13, which the executor used to drive: what the old law was of.

They had what is received only when it was needed. GPipe's held outputs and input gradients that were sent to the end of
the step; 1F1B's let go of an input gradient before the next forward. Parts are those of today.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.memory import one_stage
from planner.core.cost.parts import Parts, Size, parts_of
from planner.core.values.plan import Recompute, StageMemory

Moment = tuple[tuple[Any, int], ...]


def memory_in_torchs_loops(
    costs: ChainCosts,
    first: int,
    end: int,
    *,
    micro_batches: int,
    in_flight: int,
    recompute: Recompute,
    recomputed: Collection[int] = (),
) -> StageMemory:
    """As `planner.core.cost.memory.stage_memory`: GPipe's, or 1F1B's where fewer are in flight than there are."""
    stages, recompute = one_stage(
        costs, first, end, micro_batches=micro_batches, recompute=recompute, recomputed=recomputed
    )
    parts = parts_of(stages, recompute, in_flight=in_flight)
    sizes: dict[Any, Size] = {**parts.sizes, "sent_output": Size({"transfer": stages.sent_output})}
    parts = replace(parts, sizes=sizes)
    moments = _gpipe(micro_batches, parts) if in_flight == micro_batches else _one_f_one_b(micro_batches, in_flight)
    every = [
        {item: round(float(size[0, -1])) for item, size in parts.at(moment).items()}
        for moment in moments
        if "message" in parts.sizes or ("message", 1) not in moment
    ]
    return StageMemory.of(**max(every, key=lambda items: sum(items.values())))


def _moment(running: str, *, gradients: int = 1, **counts: int) -> Moment:
    during = {"gradients": gradients, **({} if running == "optimizer_step" else {"casts": 1}), **counts, running: 1}
    return tuple((part, count) for part, count in during.items() if count)


def _gpipe(m: int, parts: Parts) -> Iterator[Moment]:
    if m == 1:
        yield _moment("last_forward", gradients=0)
        yield _moment("first_backward", gradients=0)
        yield _moment("message", gradients=0)
        yield _moment("optimizer_step")
        return
    if parts.last_differs:
        yield _moment("forward", held=m - 2, gradients=0)
    yield _moment("last_forward", held=m - 1, gradients=0)
    yield _moment("first_backward", held=m - 2, kept=1, gradients=0)
    for done in range(1, m - 1):
        yield _moment("backward", held=m - 2 - done, kept=1, sent_output=done, input_gradient=done)
    yield _moment("last_backward", sent_output=m - 1, input_gradient=m - 1)
    yield _moment("message", sent_output=m - 1, input_gradient=m - 1)
    yield _moment("optimizer_step")


def _one_f_one_b(m: int, n: int) -> Iterator[Moment]:
    yield _moment("forward", held=n - 1, gradients=int(m > n + 1))
    yield _moment("last_forward", held=n - 1)
    yield _moment("first_backward", held=n - 1, gradients=0)
    if m > n + 1:
        yield _moment("backward", held=n - 1)
    if n > 1:
        yield _moment("backward", held=n - 2, kept=1)
    yield _moment("last_backward", input_gradient=int(n > 1))
    yield _moment("message", input_gradient=int(n > 1))
    yield _moment("optimizer_step")
