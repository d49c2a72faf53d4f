"""Instruction lists of interleaved pipelines, including transfers: no blocking, and memory counts."""

import random
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from planner.core.cost.peak_points import ALLOCATIONS, allocation_counts, peak_allocation_counts
from planner.core.schedule import INTERLEAVED, Instruction, instruction_lists

Rows = Sequence[Sequence[Instruction]]

SIZES = [(1, 2, 4), (2, 1, 2), (2, 2, 4), (2, 3, 2), (3, 2, 6), (4, 2, 8), (4, 3, 10), (8, 2, 16)]
"""K, V, M."""


def rows_of(devices: int, chunks: int, micro_batches: int) -> Rows:
    return instruction_lists(INTERLEAVED.actions(devices, micro_batches, chunks))


def as_text(row: Sequence[Instruction]) -> str:
    """Return a text such as `s2F0` for sent and `r2F0` for received."""
    short = {"run": "", "send": "s", "receive": "r"}
    return " ".join(f"{short[x.do]}{x.stage}{x.kind}{x.micro_batch}" for x in row)


def test_instruction_lists_by_hand() -> None:
    assert [as_text(row) for row in rows_of(2, 2, 2)] == [
        "0F0 s0F0 0F1 s0F1 r2F0 2F0 s2F0 r2F1 2F1 s2F1 r2B0 2B0 s2B0 r2B1 2B1 s2B1 r0B0 0B0 r0B1 0B1",
        "r1F0 r1F1 1F0 s1F0 r3F0 1F1 s1F1 r3F1 3F0 3B0 s3B0 r1B0 3F1 3B1 s3B1 r1B1 1B0 s1B0 1B1 s1B1",
    ]


def step_time(rows: Rows, times: dict[str, list[float]], *, waits: bool) -> float:  # noqa: C901 - one loop
    """Return the step time if transfers take no time; with `waits`, devices wait for all but the last sent gradient."""
    devices, stages = len(rows), len(times["F"])
    at, clock = [0] * devices, [0.0] * devices
    sent: dict[tuple[str, int, int], float] = {}
    posted: dict[tuple[str, int, int], float] = {}
    waiting: list[tuple[str, int, int] | None] = [None] * devices
    while any(n < len(row) for n, row in zip(at, rows, strict=True)):
        before = list(at)
        for device, row in enumerate(rows):
            while at[device] < len(row):
                what = row[at[device]]
                kind, stage = what.kind, what.stage
                name = kind, stage, what.micro_batch
                if what.do == "receive":
                    posted[name] = clock[device]
                elif what.do == "send":
                    to = kind, stage + (1 if kind == "F" else -1), what.micro_batch
                    sent.setdefault(to, clock[device])
                    if kind == "B":
                        earlier = waiting[device]
                        if waits and earlier is not None:
                            if earlier not in posted:
                                break
                            clock[device] = max(clock[device], posted[earlier])
                        waiting[device] = to
                else:
                    if devices > 1 and stage != (0 if kind == "F" else stages - 1):
                        if name not in sent:
                            break
                        clock[device] = max(clock[device], sent[name])
                    clock[device] += times[kind][stage]
                at[device] += 1
        assert at != before, "deadlock"
    return max(clock)


@pytest.mark.parametrize(("devices", "chunks", "micro_batches"), SIZES)
def test_waiting_for_sent_gradients_costs_nothing(devices: int, chunks: int, micro_batches: int) -> None:
    """The executor waits to release their memory. It costs up to 1 % if M is not a multiple of K."""
    rows = rows_of(devices, chunks, micro_batches)
    for seed in range(20):
        draw = random.Random(seed)
        forward = [1.0 + draw.random() * (seed > 0) for _ in range(devices * chunks)]
        times = {"F": forward, "B": [time * (2.0 + draw.random() * (seed > 0)) for time in forward]}
        without = step_time(rows, times, waits=False)
        assert without <= step_time(rows, times, waits=True) <= without * (1.01 if micro_batches % devices else 1.0)


def test_allocation_counts_by_hand() -> None:
    """Device 1 with K = 2, V = 2, M = 2 runs F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1."""
    counts = allocation_counts(INTERLEAVED.actions(2, 2, 2))[1]
    during = {name: counts.during[:, :, n].tolist() for n, name in enumerate(ALLOCATIONS)}
    assert during["held"] == [[0, 0], [1, 0], [1, 0], [1, 0], [1, 0], [1, 0], [0, 0], [0, 0]]
    assert during["forward"] == [[1, 0], [0, 0], [0, 1], [0, 0], [0, 0], [0, 0], [0, 0], [0, 0]]
    assert during["last_forward"] == [[0, 0], [1, 0], [0, 0], [0, 0], [0, 1], [0, 0], [0, 0], [0, 0]]
    assert during["first_backward"] == [[0, 0], [0, 0], [0, 0], [0, 1], [0, 0], [0, 0], [1, 0], [0, 0]]
    assert during["last_backward"] == [[0, 0], [0, 0], [0, 0], [0, 0], [0, 0], [0, 1], [0, 0], [1, 0]]
    assert during["backward"] == [[0, 0]] * 8
    # The last micro-batch, which `except-last` does not recompute, waits by itself.
    assert during["kept"] == [[0, 0], [0, 0], [1, 0], [1, 0], [1, 0], [1, 0], [1, 0], [0, 0]]
    assert during["gradients"] == [[0, 0], [0, 0], [0, 0], [0, 0], [0, 1], [0, 1], [0, 1], [1, 1]]
    # Inputs of forwards are received one action early; rB0 precedes F1.1, and rB1 precedes B0.
    assert during["input"] == [[1, 0], [0, 1], [0, 1], [0, 1], [0, 0], [0, 0], [0, 0], [0, 0]]
    assert during["output_gradient"] == [[0, 0], [0, 0], [0, 0], [0, 0], [1, 0], [1, 0], [1, 0], [0, 0]]
    assert during["input_gradient"] == [[0, 0], [0, 0], [0, 0], [0, 0], [0, 1], [0, 1], [0, 1], [1, 0]]


@pytest.mark.parametrize(("devices", "chunks", "micro_batches"), SIZES)
def test_omitted_points_cannot_be_the_peak(devices: int, chunks: int, micro_batches: int) -> None:
    actions = INTERLEAVED.actions(devices, micro_batches, chunks)
    both = zip(allocation_counts(actions), peak_allocation_counts(actions), strict=True)
    for (counts, points), seed in product(both, range(5)):
        sizes = np.random.default_rng(seed).integers(0, 1000, (chunks, len(ALLOCATIONS)))
        sizes[:, ALLOCATIONS.index("optimizer_step")] = 0
        assert len(points) <= 2 * len(counts.during) + chunks
        assert (points * sizes).sum(axis=(1, 2)).max() >= (counts.during * sizes).sum(axis=(1, 2)).max()
        # All that is held is let go of in the end.
        left = dict(zip(ALLOCATIONS, counts.after[-1].sum(axis=0).tolist(), strict=True))
        assert [left[name] for name in ("held", "kept", "input", "output_gradient")] == [0, 0, 0, 0]
