"""Published runs on real accelerators, and what the cost model says of them.

Each function below is a generator of rows: what was measured, what was predicted, and from what. `published.py` prints
them, and `tests/unit/test_published.py` holds them to what came out. Figures and their sources: `data/published`.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import planner
from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.values.cluster import Cluster, Link
from planner.core.values.plan import Plan, Recompute, ScheduleName, Stage
from planner.core.values.profile import Device, LayerProfile, Profile

DATA = Path(__file__).parent / "data" / "published"
UNLIMITED = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure, measured and predicted."""

    name: tuple[str, ...]
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Share by which the prediction is too high."""
        return self.predicted / self.measured - 1


def read(name: str) -> list[dict[str, str]]:
    """Return the lines of a table in `data/published`."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def numbers(text: str) -> list[float]:
    """Return numbers separated by blanks."""
    return [float(number) for number in text.split()]


# ---- profiles by hand


def chain(
    forward_us: Sequence[float],
    backward_us: Sequence[float],
    *,
    split_us: Sequence[tuple[float, float]] = (),
    update_us: float = 0.0,
) -> Profile:
    """Return a chain of layers with these times, which save nothing; `split_us` are those of I and W."""
    layers = [
        LayerProfile(
            name=f"layer_{n}",
            parameter_bytes=1,
            forward_us=(forward,),
            backward_us=(backward,),
            backward_input_us=(split_us[n][0],) if split_us else (),
            backward_weight_us=(split_us[n][1],) if split_us else (),
            optimizer_us=update_us,
            output_bytes=(0,),
            saved_bytes=(0,),
        )
        for n, (forward, backward) in enumerate(zip(forward_us, backward_us, strict=True))
    ]
    return Profile(device=Device(kind="cuda", name="published"), micro_batch_sizes=(1,), layers=tuple(layers))


def partition(
    balance: Sequence[int],
    micro_batches: int,
    *,
    schedule: ScheduleName = "1f1b",
    chunks: int = 1,
    recompute: Recompute = "never",
    replicas: int = 1,
) -> Partition:
    """Return cuts chosen by the authors of a run."""
    return Partition(
        schedule=schedule,
        micro_batches=micro_batches,
        balance=tuple(balance),
        recompute=(recompute,) * len(balance),
        chunks=chunks,
        replicas=replicas,
    )


def cluster(cut: Partition, **more: Any) -> Cluster:
    """Return as many devices as the cuts need, without a memory limit."""
    return Cluster(memory_bytes=(UNLIMITED,) * (cut.num_devices * cut.replicas), **more)


def predicted_s(profile: Profile, cut: Partition, **more: Any) -> float:
    """Return the seconds of a step."""
    return Evaluation(costs_at(profile, profile.micro_batch_sizes[0]), cut, cluster(cut, **more)).step_us / 1e6


def stages(profile: Profile, cut: Partition) -> tuple[Stage, ...]:
    """Return the stages with their memory."""
    return Evaluation(costs_at(profile, profile.micro_batch_sizes[0]), cut, cluster(cut)).stages


def peaks_bytes(profile: Profile, cut: Partition) -> list[int]:
    """Return the peak of every device."""
    totals = [0] * cut.num_devices
    for stage in stages(profile, cut):
        totals[cut.device_of(stage.index)] += stage.memory.total
    return totals


# ---- GPT on 8 A100, with vocabularies of 32k to 256k words


def a100_rows() -> Iterator[Row]:
    """Yield iterations in seconds, from the times of each stage in the same run; nothing is fitted."""
    for line in read("gpt-8xa100"):
        profile = chain(numbers(line["forward_us"]), numbers(line["backward_us"]))
        predicted = predicted_s(profile, partition([1] * 8, 128))
        name = (line["vocabulary"], line["cut"])
        yield Row(name=name, measured=float(line["measured_ms"]) / 1e3, predicted=predicted)


def layers_of(line: dict[str, str]) -> Profile:
    """Return embedding, 32 blocks and head with times that follow from stages of 4 blocks each."""
    times = []
    for stages in (numbers(line["forward_us"]), numbers(line["backward_us"])):
        block = sum(stages[1:7]) / 6 / 4
        times.append([max(0.0, stages[0] - 4 * block), *[block] * 32, stages[7] - 4 * block])
    return chain(*times)


def _with_ends(layers_per_stage: str) -> list[int]:
    """Return the balance with the embedding on the first stage and the head on the last one."""
    first, *middle, last = (int(count) for count in layers_per_stage.split())
    return [first + 1, *middle, last + 1]


def forecast_rows() -> Iterator[Row]:
    """Yield iterations in seconds of the plan cut by hand, from the times of the even one."""
    lines = read("gpt-8xa100")
    for even, by_hand in zip(lines[::2], lines[1::2], strict=True):
        predicted = predicted_s(layers_of(even), partition(_with_ends(by_hand["layers_per_stage"]), 128))
        yield Row(name=(by_hand["vocabulary"],), measured=float(by_hand["measured_ms"]) / 1e3, predicted=predicted)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """The authors' cuts and those of our solver, both predicted, in seconds."""

    vocabulary: str
    authors: tuple[int, ...]
    authors_s: float
    solved: Plan

    @property
    def gain(self) -> float:
        """Share by which the solver's step is shorter."""
        return 1 - self.solved.predicted.step_us / 1e6 / self.authors_s


def cut_rows() -> Iterator[Cuts]:
    """Yield the best cut of the same layers under the same schedule, and the one made by hand."""
    lines = read("gpt-8xa100")
    for even, by_hand in zip(lines[::2], lines[1::2], strict=True):
        profile, authors = layers_of(even), _with_ends(by_hand["layers_per_stage"])
        solved = planner.solve(
            profile,
            devices=len(authors),
            mem="900TB",
            batch=128,
            micro_batches=128,
            schedule="1f1b",
            recompute="never",
        )
        authors_s = predicted_s(profile, partition(authors, 128))
        yield Cuts(vocabulary=even["vocabulary"], authors=tuple(authors), authors_s=authors_s, solved=solved)


# ---- OPT-350M on GH200


def _gh200() -> Any:
    """Return the profile and the runs of `gh200.json`."""
    return json.loads((DATA / "gh200.json").read_text(encoding="utf-8"))


def _opt() -> Profile:
    times = _gh200()["layers_us"]
    pairs = [times["first"], times["second"], *[times["block"]] * 23, times["head"]]
    forward, backward = zip(*pairs, strict=True)
    return chain(forward, backward, update_us=times["update_us"])


def _opt_s(run: dict[str, Any], crossing_us: float) -> float:
    replicas = run["replicas"]
    # The sum over replicas took so long as a whole: a ring's 2 messages.
    message_us = 1e6 * run["all_reduce_s"] / max(1, 2 * (replicas - 1))
    return predicted_s(
        _opt(),
        partition(run["layers_per_stage"], run["micro_batches"], replicas=replicas),
        link=Link(latency_us=crossing_us, blocking=True),
        allreduce=Link(latency_us=message_us),
    )


@cache
def gh200_crossing_us() -> float:
    """Return the only fitted number: the time of a transfer with which the first run is as measured."""
    run = _gh200()["runs"][0]
    short, long = 1.0, 1e6
    while long / short > 1.0001:
        middle = (short * long) ** 0.5
        short, long = (short, middle) if _opt_s(run, middle) > run["measured_s"] else (middle, long)
    return long


def gh200_rows() -> Iterator[Row]:
    """Yield iterations in seconds."""
    for run in _gh200()["runs"]:
        name = (run["plan"], str(run["replicas"]), str(run["micro_batches"]))
        yield Row(name=name, measured=run["measured_s"], predicted=_opt_s(run, gh200_crossing_us()))


# ---- schedules with split backwards, on A100


SCHEDULES = {"1f1b": "1f1b", "interleaved": "interleaved", "zb1p": "zb-h1"}
"""Ours by the paper's; the bubbles of ZB-1p, which is searched, are those of ZB-H1 in its table 5."""


def zero_bubble_rows() -> Iterator[Row]:
    """Yield steps in seconds, from the times of F, I, W and of transfers; the last but one column of the name is M."""
    for line in read("zero-bubble"):
        devices, micro_batches = int(line["devices"]), int(line["micro_batches"])
        for theirs, ours in SCHEDULES.items():
            # Every layer is a chunk; the first and the last device have one fewer, beside embedding and head.
            chunks = (int(line["layers"]) + 2) // devices if theirs == "interleaved" else 1
            cut = partition([1] * (devices * chunks), micro_batches, schedule=ours, chunks=chunks)
            predicted = predicted_s(_stages_of(line, chunks), cut, link=_link_of(line))
            yield _zero_bubble_row(line, theirs, predicted)


def searched_rows() -> Iterator[Row]:
    """Yield steps in seconds under schedules searched like ZB-2p: each device may hold 2 K micro-batches."""
    for line in read("zero-bubble"):
        devices, micro_batches = int(line["devices"]), int(line["micro_batches"])
        # 32 of 34 + 5as/h bytes of an element of sbh are kept from I to W.
        scores = 5 * int(line["heads"]) * 1024 / int(line["hidden"])
        profile = _stages_of(line, 1, saved_bytes=10**9, weight_held_bytes=round(10**9 * 32 / (34 + scores)))
        plan = planner.solve(
            profile,
            devices=devices,
            mem=2 * devices * 10**9 + 10**6,
            batch=micro_batches,
            micro_batches=micro_batches,
            schedule="search",
            recompute="never",
            link=_link_of(line),
        )
        yield _zero_bubble_row(line, "zb2p", plan.predicted.step_us / 1e6)


def _stages_of(line: dict[str, str], chunks: int, *, saved_bytes: int = 0, weight_held_bytes: int = 0) -> Profile:
    """Return a layer for each of `chunks` stages on each device."""
    f, i, w = (1e3 * float(line[f"{name}_ms"]) / chunks for name in ("forward", "input", "weight"))
    num = int(line["devices"]) * chunks
    profile = chain([f] * num, [i + w] * num, split_us=[(i, w)] * num)
    kept = {"saved_bytes": (saved_bytes,), "weight_held_bytes": (weight_held_bytes,)}
    return replace(profile, layers=tuple(replace(layer, **kept) for layer in profile.layers))


def _link_of(line: dict[str, str]) -> Link:
    return Link(latency_us=1e3 * float(line["transfer_ms"]))


def _zero_bubble_row(line: dict[str, str], theirs: str, predicted: float) -> Row:
    measured = int(line["micro_batches"]) * int(line["samples"]) / int(line["devices"]) / float(line[f"{theirs}_per_s"])
    return Row(name=(line["model"], line["micro_batches"], theirs), measured=measured, predicted=predicted)


def scaled(rows: Sequence[Row], by: Row) -> list[Row]:
    """Return the rows with one fitted number: computing takes `by` times as long."""
    factor = by.measured / by.predicted
    return [replace(row, predicted=row.predicted * factor) for row in rows]


# ---- recomputation on A100, tensor parallel 8


LAYER_22B_MS = {"forward": 7.7, "backward": 11.9, "everything": 27.2, "selective": 20.3}
"""Forward, backward, and both together with recomputation of one layer; the last with sequence parallelism, too."""


def recomputation_rows() -> Iterator[Row]:
    """Yield one layer in milliseconds, and the iteration of the 22B model in seconds."""
    profile = chain([1e3 * LAYER_22B_MS["forward"]], [1e3 * LAYER_22B_MS["backward"]])
    layer_ms = 1e3 * predicted_s(profile, partition([1], 1, schedule="gpipe", recompute="always"))
    yield Row(name=("one layer, everything recomputed",), measured=LAYER_22B_MS["everything"], predicted=layer_ms)
    line = next(line for line in read("recomputation") if line["model"] == "22B")
    everything, selective = float(line["everything_s"]), float(line["selective_s"])
    layers = {name: int(line["layers"]) * LAYER_22B_MS[name] / 1e3 for name in ("everything", "selective")}
    yield Row(
        name=("22B, everything recomputed: its 48 layers alone",), measured=everything, predicted=layers["everything"]
    )
    rest = everything - layers["everything"]
    yield Row(
        name=("22B, selective: its 48 layers, the rest as above",),
        measured=selective,
        predicted=layers["selective"] + rest,
    )


# ---- throughput of even stages


def even_stage_rows() -> Iterator[Row]:
    """Yield speed-ups over the devices of the first columns; layers are assumed to be cut evenly."""
    for line in read("even-stages"):
        base_s, other_s = (_even_s(int(line[f"{of}devices"]), int(line[f"{of}micro_batches"])) for of in ("of_", ""))
        name = (line["source"], line["model"], line["of_devices"], line["devices"], line["micro_batches"])
        yield Row(name=name, measured=float(line["rate"]) / float(line["of_rate"]), predicted=base_s / other_s)


def _even_s(devices: int, micro_batches: int) -> float:
    """Return a GPipe step of 240 equal layers with full recomputation, B = 2F and a fixed mini-batch."""
    profile = chain([1e6 / micro_batches] * 240, [2e6 / micro_batches] * 240)
    cut = partition([240 // devices] * devices, micro_batches, schedule="gpipe", recompute="always")
    return predicted_s(profile, cut)
