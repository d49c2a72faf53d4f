"""Published runs on A100, H100 and GB200, and what formula profiles say of them: memory, steps, and rates reached.

As in `benchmarks.published_runs`, each function is a generator of rows. A rate is the number of FLOP that a GPU
computes per second, as the formulas count them, so that the predicted step takes as long as the measured one.
Recomputation is counted where the source states it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.published_formulas import (
    formula,
    gpt,
    recomputation_rates,
    vocabulary_cut,
    zero_bubble_profile,
)
from benchmarks.published_runs import Row, partition, predicted_s, read, stages
from planner.core.cost.partition import Partition
from planner.core.values.plan import StageMemory
from planner.core.values.profile import Device, Profile
from planner.profile.formula.costs import Pace, transformer_profile
from planner.profile.formula.families import shape_of
from planner.profile.formula.layers import Execution, Widths
from planner.profile.formula.presets import presets
from planner.profile.formula.shapes import Experts, Transformer, gpt_shape

CHIPS = ("A100", "H100", "GB200")
_TERA = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Rate that a published run reached."""

    chip: str
    model: str
    source: str
    tera_flops_per_s: float
    experts: bool = False
    """True for a mixture of experts."""


def golden_state_rows() -> Iterator[Row]:
    """Bytes of parameters, gradients and optimizer state on the last device, in GB, if the number of GPUs is known."""
    for line in read("megatron-golden"):
        if line["replicas"]:
            memory = _last_device(line)
            state = memory.parameters + memory.gradients + memory.optimizer
            yield Row(name=_golden(line), measured=float(line["state_gb"]), predicted=state / 1e9)


def golden_activation_rows() -> Iterator[Row]:
    """Bytes of micro-batches in flight on the last device, in GB; measured: what the peak has above the state."""
    for line in read("megatron-golden"):
        above = float(line["peak_gb"]) - float(line["state_gb"])
        yield Row(name=_golden(line), measured=above, predicted=_last_device(line).in_flight / 1e9)


def golden_peak_rows() -> Iterator[Row]:
    """Peak of the last device, in GB, with the state as measured where the number of GPUs is not known."""
    for line in read("megatron-golden"):
        memory = _last_device(line)
        state = memory.parameters + memory.gradients + memory.optimizer
        known = state / 1e9 if line["replicas"] else float(line["state_gb"])
        peak = known + (memory.total - state) / 1e9
        yield Row(name=_golden(line), measured=float(line["peak_gb"]), predicted=peak)


def other_chip_rows() -> Iterator[Row]:
    """Steps of GPT 7B on one chip from its rate on another one, in seconds.

    How many times as fast the other chip is follows from the other run of this model.
    """
    by_width: dict[str, dict[str, float]] = {}
    for line in read("megatron-golden"):
        if line["replicas"]:
            by_width.setdefault(line["tensor_parallel"], {})[line["chip"]] = float(line["step_s"])
    for width, other in (("1", "4"), ("4", "1")):
        steps_s, others_s = by_width[width], by_width[other]
        for start, end in (("A100", "H100"), ("H100", "A100"), ("H100", "GB200"), ("GB200", "H100")):
            forecast = steps_s[start] * others_s[end] / others_s[start]
            yield Row(name=(f"tensor parallel {width}", start, end), measured=steps_s[end], predicted=forecast)


def reached() -> tuple[Reached, ...]:
    """Rates of all runs whose number of GPUs is known."""
    runs = (*_vocabulary(), *_zero_bubble(), *_recomputation(), *_bloom(), *_golden_rates(), *_nemo())
    return tuple(sorted(runs, key=lambda run: (CHIPS.index(run.chip), run.experts)))


def medians() -> dict[tuple[str, bool], float]:
    """The median rate in TFLOP/s of the runs on a chip, with and without experts."""
    rates: dict[tuple[str, bool], list[float]] = {}
    for run in reached():
        rates.setdefault((run.chip, run.experts), []).append(run.tera_flops_per_s)
    return {kind: median(each) for kind, each in rates.items()}


def rate_rows() -> Iterator[Row]:
    """Steps predicted at the median rate of the other runs of the same kind, relative to the measured step."""
    runs = reached()
    for run in runs:
        same = [each for each in runs if (each.chip, each.experts) == (run.chip, run.experts)]
        others = median(each.tera_flops_per_s for each in same if each is not run)
        kind = f"{run.chip}, experts" if run.experts else run.chip
        cells = (kind, run.model, run.source, f"{run.tera_flops_per_s:.0f}", f"{others:.0f}")
        yield Row(name=cells, measured=1.0, predicted=run.tera_flops_per_s / others)


# ---- Megatron-LM's golden values


def _golden(line: dict[str, str]) -> tuple[str, ...]:
    layout = f"TP {line['tensor_parallel']}, PP {line['devices']}"
    layout += f", {line['chunks']} chunks" if line["chunks"] != "1" else ""
    layout += f", EP {line['expert_parallel']}" if line["expert_parallel"] != "1" else ""
    return line["model"], layout, line["chip"]


def _golden_shape(line: dict[str, str]) -> Transformer:
    if line["model"] == "GPT 7B":
        # Vocabularies are padded to a multiple of 128 times the tensor-parallel size.
        vocabulary = 131_200 if line["tensor_parallel"] == "1" else 131_584
        shape = gpt_shape(layers=32, hidden=4096, heads=32, sequence=8192, vocabulary=vocabulary, feed_forward=4 * 4096)
        block = shape.blocks[0]
        grouped = replace(block, attention=replace(block.attention, key_value_heads=8))
        return replace(shape, blocks=(grouped,) * 32)
    name = "mixtral-8x22b" if "22B" in line["model"] else "mixtral-8x7b"
    shape = shape_of(presets()[name], 4096, source=name)
    return replace(shape, vocabulary=256_000) if "256k" in line["model"] else shape


def _golden_profile(line: dict[str, str]) -> Profile:
    """Half-precision parameters, gradients in float32, master copies and moments in float32 divided by replicas."""
    experts = line["model"] != "GPT 7B"
    execution = Execution(
        tensor_parallel=int(line["tensor_parallel"]),
        expert_parallel=int(line["expert_parallel"]),
        sequence_parallel=experts,
        fused=experts,
    )
    widths = Widths(activation=2, parameter=2, gradient=4, optimizer=12 // int(line["replicas"] or 1))
    return profile(_golden_shape(line), execution, widths, samples=int(line["samples"]))


def _golden_cut(line: dict[str, str]) -> Partition:
    replicas, samples = int(line["replicas"] or 1), int(line["samples"])
    # Where the number of GPUs is not known there are more micro-batches than can be in flight, in any case.
    micro_batches = int(line["batch"]) // replicas // samples if line["replicas"] else 64
    devices, chunks = int(line["devices"]), int(line["chunks"])
    return even_cut(len(_golden_shape(line).blocks), devices, chunks, micro_batches)


def _last_device(line: dict[str, str]) -> StageMemory:
    cut = _golden_cut(line)
    of_last = [
        stage.memory
        for stage in stages(_golden_profile(line), cut)
        if cut.device_of(stage.index) == cut.num_devices - 1
    ]
    names = [name for name, _ in of_last[0].items()]
    return StageMemory.of(**{name: sum(getattr(memory, name) for memory in of_last) for name in names})


# ---- rates


def profile(shape: Transformer, execution: Execution, widths: Widths, *, samples: int) -> Profile:
    """A formula profile at 1 TFLOP/s."""
    return transformer_profile(
        shape,
        execution,
        widths,
        Pace(flops_per_s=_TERA),
        device=Device(kind="cuda", how="estimated"),
        dtype="bf16",
        optimizer="adam",
        micro_batch_sizes=(samples,),
        steps_at_once=False,
    )


def even_cut(blocks: int, devices: int, chunks: int, micro_batches: int) -> Partition:
    """Equally many blocks on each stage; what is left over goes to the first stages."""
    num = devices * chunks
    balance = [blocks // num + (k < blocks % num) for k in range(num)]
    balance[0] += 1
    balance[-1] += 1
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return partition(balance, micro_batches, schedule=schedule, chunks=chunks)


def _vocabulary() -> Iterator[Reached]:
    for line in read("vocabulary-memory"):
        if line["schedule"] == "1f1b" and line["tokens"] == "2048":
            made, cut = gpt(line, 32_000), vocabulary_cut(line)
            flop = cut.micro_batches * sum(3 * layer.forward_flops[0] for layer in made.layers)
            step_s = flop / (312e12 * float(line["mfu_percent"].split()[0]) / 100 * cut.num_devices)
            model = f"GPT, {line['layers']} layers, h = {line['hidden']}"
            yield Reached(
                chip="A100", model=model, source="2411.05288", tera_flops_per_s=predicted_s(made, cut) / step_s
            )


def _zero_bubble() -> Iterator[Reached]:
    lines = {line["model"]: line for line in read("zero-bubble")}  # the largest M of each
    for line in lines.values():
        devices, layers, samples = int(line["devices"]), int(line["layers"]), int(line["samples"])
        made, micro_batches = zero_bubble_profile(line), int(line["micro_batches"])
        step_s = micro_batches * samples / (float(line["1f1b_per_s"]) * devices)
        rate = predicted_s(made, partition([(layers + 2) // devices] * devices, micro_batches)) / step_s
        yield Reached(chip="A100", model=f"GPT {line['model']}", source="2401.10241", tera_flops_per_s=rate)


def _recomputation() -> Iterator[Reached]:
    for model, rate in recomputation_rates():
        yield Reached(chip="A100", model=f"GPT {model}, TP 8", source="2205.05198", tera_flops_per_s=rate)


def _bloom() -> Iterator[Reached]:
    for line in read("bloom"):
        samples, replicas, devices = int(line["samples"]), int(line["replicas"]), int(line["devices"])
        layers = int(line["layers"])
        made = formula(
            layers=layers,
            hidden=int(line["hidden"]),
            heads=64,
            sequence=2048,
            vocabulary=250_880,
            tied=True,
            tensor_parallel=8,
            batch_sizes=samples,
        )
        micro_batches = int(line["batch"]) // replicas // samples
        cut = replace(even_cut(layers, devices, 1, micro_batches), recompute=("always",) * devices)
        rate = predicted_s(made, cut) / float(line["step_s"])
        model = f"GPT {line['model']}, TP 8, b = {samples}"
        yield Reached(chip="A100", model=model, source="BLOOM", tera_flops_per_s=rate)


def _golden_rates() -> Iterator[Reached]:
    for line in read("megatron-golden"):
        if line["replicas"]:
            rate = predicted_s(_golden_profile(line), _golden_cut(line)) / float(line["step_s"])
            model = f"GPT 7B, TP {line['tensor_parallel']}"
            yield Reached(chip=line["chip"], model=model, source="Megatron-LM", tera_flops_per_s=rate)


def _nemo() -> Iterator[Reached]:
    half = Widths(activation=2, parameter=2, gradient=4, optimizer=12)
    for line in read("nemo"):
        samples, batch, gpus, tokens = (int(line[name]) for name in ("samples", "batch", "gpus", "tokens"))
        shape = shape_of(presets()[line["model"]], tokens, source=line["model"])
        # GPUs beyond those of one pipeline share samples (context parallelism) or experts: they divide the work.
        devices = int(line["devices"])
        shares = gpus // (devices * int(line["replicas"]))
        cut = even_cut(len(shape.blocks), devices, int(line["chunks"]), batch // int(line["replicas"]) // samples)
        step_s = batch * tokens / (gpus * float(line["tokens_per_s_gpu"]))
        made = profile(shape, Execution(), half, samples=samples)
        name = f"{line['model']}, {gpus} GPUs"
        rate = predicted_s(made, cut) / shares / step_s
        experts = any(isinstance(block.feed_forward, Experts) for block in shape.blocks)
        yield Reached(chip=line["chip"], model=name, source=line["source"], tera_flops_per_s=rate, experts=experts)
