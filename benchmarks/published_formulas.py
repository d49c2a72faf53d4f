"""Published runs on real accelerators, predicted by formula profiles (`profile --from-formula`).

As in `benchmarks.published_runs`, each function is a generator of rows.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import planner
from benchmarks.published_runs import (
    SCHEDULES,
    Row,
    numbers,
    partition,
    peaks_bytes,
    predicted_s,
    read,
    scaled,
)
from planner.core.cost.partition import Partition
from planner.core.values.plan import Recompute, ScheduleName
from planner.core.values.profile import Profile

WORDS = (32_000, 64_000, 128_000, 256_000)

MEGATRON_FP16 = "2,2,12"
"""Bytes per parameter: half-precision parameter and gradient; master copy and Adam's two moments in float32."""


@cache
def formula(**shape: Any) -> Profile:
    """Return a transformer by the published formulas, with 1 TFLOP/s unless another rate is given."""
    return planner.profile(
        from_formula="transformer", **{"dtype": "bf16", "rate": "1TFLOP/s", "batch_sizes": 1, **shape}
    )


def gpt(line: dict[str, str], vocabulary: int) -> Profile:
    """Return the GPT of a line that states layers, heads, width and tokens."""
    shape = {name: int(line[name]) for name in ("layers", "heads", "hidden")}
    return formula(**shape, sequence=int(line["tokens"]), vocabulary=vocabulary, state_bytes=MEGATRON_FP16)


def vocabulary_memory_rows(schedule: ScheduleName = "1f1b", *, most_devices: int = 32) -> Iterator[Row]:
    """Yield peaks in GiB, by the formulas."""
    for line in read("vocabulary-memory"):
        if line["schedule"] != schedule or int(line["devices"]) > most_devices:
            continue
        for vocabulary, peak in zip(WORDS, numbers(line["peak_gib"]), strict=False):
            highest = max(peaks_bytes(gpt(line, vocabulary), vocabulary_cut(line)))
            yield Row(name=_setting(line, vocabulary), measured=peak, predicted=highest / 2**30)


def vocabulary_step_rows() -> Iterator[Row]:
    """Yield iterations in seconds, by the formulas at the rate that each model sustained in its first setting."""
    by_model: dict[str, list[Row]] = {}
    for line in read("vocabulary-memory"):
        if line["schedule"] != "1f1b":
            continue
        for vocabulary, percent in zip(WORDS, numbers(line["mfu_percent"]), strict=True):
            profile, cut = gpt(line, vocabulary), vocabulary_cut(line)
            # Forward and backward of all layers at A100's 312 TFLOP/s.
            flop = cut.micro_batches * sum(3 * layer.forward_flops[0] for layer in profile.layers)
            measured = flop / (312e12 * percent / 100 * cut.num_devices)
            row = Row(name=_setting(line, vocabulary), measured=measured, predicted=predicted_s(profile, cut))
            by_model.setdefault(line["devices"], []).append(row)
    for rows in by_model.values():
        yield from scaled(rows, rows[0])


def vocabulary_cut(line: dict[str, str]) -> Partition:
    """Return equally many blocks on each stage."""
    devices, schedule = int(line["devices"]), line["schedule"]
    chunks = 2 if schedule == "v-half" else 1
    stages = devices * chunks
    balance = [int(line["layers"]) // stages] * stages
    balance[0], balance[-1] = balance[0] + 1, balance[-1] + 1
    return partition(balance, 128, schedule=schedule, chunks=chunks)


def _setting(line: dict[str, str], vocabulary: int) -> tuple[str, ...]:
    return line["devices"], line["tokens"], f"{vocabulary // 1000}k"


def zero_bubble_profile(line: dict[str, str]) -> Profile:
    """Return the profile of a model of the zero-bubble paper, by formula."""
    return formula(
        layers=int(line["layers"]),
        hidden=int(line["hidden"]),
        heads=int(line["heads"]),
        sequence=1024,
        vocabulary=50_304,
        keep_scores=True,
        state_bytes=MEGATRON_FP16,
        batch_sizes=int(line["samples"]),
    )


def zero_bubble_memory_rows() -> Iterator[Row]:
    """Yield peaks in GB (10^9 bytes), by the formulas; attention saves its scores."""
    lines = {line["model"]: line for line in read("zero-bubble")}
    for line in lines.values():
        devices, layers = int(line["devices"]), int(line["layers"])
        each = (layers + 2) // devices
        profile = zero_bubble_profile(line)
        for theirs, ours in SCHEDULES.items():
            chunks = each if theirs == "interleaved" else 1
            balance = [each // chunks] * (devices * chunks)
            if chunks > 1:
                # One layer is a stage; the embedding is on the first one, the head on the last one.
                cut = partition([1, *balance[1:-1], 1], 3 * devices, schedule=ours, chunks=chunks)
            else:
                cut = partition(balance, 3 * devices, schedule=ours)
            peak = max(peaks_bytes(profile, cut))
            yield Row(name=(line["model"], theirs), measured=float(line[f"{theirs}_gb"]), predicted=peak / 1e9)


def recomputation_forecast_rows() -> Iterator[Row]:
    """Yield iterations in seconds with full recomputation, by the formulas at the rate of the other run."""
    for line in read("recomputation")[1:]:
        profile = recomputation_profile(line, line["tensor_parallel"])
        never, always = (predicted_s(profile, recomputation_cut(line, each)) for each in ("never", "always"))
        rate = never / float(line["selective_s"])
        yield Row(name=(line["model"], f"{rate:.0f}"), measured=float(line["everything_s"]), predicted=always / rate)


def recomputation_profile(line: dict[str, str], widths: str) -> Profile:
    """Return the profile of a model with sequence parallelism; several widths count collectives."""
    return formula(
        layers=int(line["layers"]),
        hidden=int(line["hidden"]),
        heads=int(line["heads"]),
        sequence=2048,
        vocabulary=51_200,
        tensor_parallel=widths,
        sequence_parallel=True,
    )


def recomputation_cut(line: dict[str, str], recompute: Recompute) -> Partition:
    """Return the cuts of a model's run."""
    devices, chunks = int(line["devices"]), int(line["chunks"])
    stages = devices * chunks
    balance = [int(line["layers"]) // stages] * stages
    balance[0], balance[-1] = balance[0] + 1, balance[-1] + 1
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return partition(balance, int(line["batch"]), schedule=schedule, chunks=chunks, recompute=recompute)
