"""Published runs on A100, H100 and GB200, predicted by formula profiles: memory, and steps on another chip.

As in `benchmarks.published_runs`, each function is a generator of rows.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.published_runs import Row, partition, read, stages
from planner.core.cost.partition import Partition
from planner.core.cost.width import tensor_parallel_profile
from planner.core.values.cluster import Cluster
from planner.core.values.plan import StageMemory
from planner.core.values.profile import Device, Profile
from planner.profile.formula.costs import DeviceRates, transformer_profile
from planner.profile.formula.families import transformer_from_config
from planner.profile.formula.layers import ElementBytes, ExecutionSettings
from planner.profile.formula.presets import model_presets
from planner.profile.formula.shapes import Transformer, gpt_transformer

CHIPS = ("A100", "H100", "GB200")
_TERA = 1e12


def golden_state_rows() -> Iterator[Row]:
    """Yield GB of parameters, gradients and optimizer state on the last device, if the number of GPUs is known."""
    for line in read("megatron-golden"):
        if line["replicas"]:
            memory = _last_device(line)
            state = memory.parameters + memory.gradients + memory.optimizer
            yield Row(name=_golden(line), measured=float(line["state_gb"]), predicted=state / 1e9)


def golden_activation_rows() -> Iterator[Row]:
    """Yield bytes of micro-batches in flight on the last device, in GB; measured: the peak without the state."""
    for line in read("megatron-golden"):
        above = float(line["peak_gb"]) - float(line["state_gb"])
        yield Row(name=_golden(line), measured=above, predicted=_last_device(line).in_flight / 1e9)


def golden_peak_rows() -> Iterator[Row]:
    """Yield peaks of the last device, in GB; the state is as measured if the number of GPUs is unknown."""
    for line in read("megatron-golden"):
        memory = _last_device(line)
        state = memory.parameters + memory.gradients + memory.optimizer
        known = state / 1e9 if line["replicas"] else float(line["state_gb"])
        peak = known + (memory.total - state) / 1e9
        yield Row(name=_golden(line), measured=float(line["peak_gb"]), predicted=peak)


def other_chip_rows() -> Iterator[Row]:
    """Yield steps of GPT 7B on one chip by its rate on another one, in seconds.

    The ratio of the chips' speeds is taken from the other run of this model.
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
        shape = gpt_transformer(
            layers=32, hidden=4096, heads=32, sequence=8192, vocabulary=vocabulary, feed_forward=4 * 4096
        )
        block = shape.blocks[0]
        grouped = replace(block, attention=replace(block.attention, key_value_heads=8))
        return replace(shape, blocks=(grouped,) * 32)
    name = "mixtral-8x22b" if "22B" in line["model"] else "mixtral-8x7b"
    shape = transformer_from_config(model_presets()[name], 4096, source=name)
    return replace(shape, vocabulary=256_000) if "256k" in line["model"] else shape


def golden_profile(line: dict[str, str]) -> Profile:
    """Return a profile with half-precision parameters; gradients, master copies and moments in float32."""
    experts = line["model"] != "GPT 7B"
    execution = ExecutionSettings(
        tensor_parallel=int(line["tensor_parallel"]),
        expert_parallel=int(line["expert_parallel"]),
        sequence_parallel=experts,
        fused=experts,
    )
    widths = ElementBytes(activation=2, parameter=2, gradient=4, optimizer=12)
    return profile(_golden_shape(line), execution, widths, samples=int(line["samples"]))


def golden_cut(line: dict[str, str]) -> Partition:
    """Return equally many blocks on each stage."""
    replicas, samples = int(line["replicas"] or 1), int(line["samples"])
    # Where the number of GPUs is not known there are more micro-batches than can be in flight, in any case.
    micro_batches = int(line["batch"]) // replicas // samples if line["replicas"] else 64
    devices, chunks = int(line["devices"]), int(line["chunks"])
    return even_cut(len(_golden_shape(line).blocks), devices, chunks, micro_batches)


def _last_device(line: dict[str, str]) -> StageMemory:
    cut = golden_cut(line)
    # These runs divide the optimizer among replicas.
    cluster = Cluster(
        memory_bytes=(),
        tensor_parallel=int(line["tensor_parallel"]),
        optimizer_shards=int(line["replicas"] or 1),
    )
    of_one = tensor_parallel_profile(golden_profile(line), cluster)
    of_last = [stage.memory for stage in stages(of_one, cut) if cut.device_of(stage.index) == cut.num_devices - 1]
    names = [name for name, _ in of_last[0].items()]
    return StageMemory.of(**{name: sum(getattr(memory, name) for memory in of_last) for name in names})


def profile(shape: Transformer, execution: ExecutionSettings, widths: ElementBytes, *, samples: int) -> Profile:
    """Return a formula profile at 1 TFLOP/s."""
    return transformer_profile(
        shape,
        execution,
        widths,
        DeviceRates(flops_per_s=_TERA),
        device=Device(kind="cuda", how="estimated"),
        dtype="bf16",
        optimizer="adam",
        micro_batch_sizes=(samples,),
        updates_all_at_once=False,
    )


def even_cut(blocks: int, devices: int, chunks: int, micro_batches: int) -> Partition:
    """Return equally many blocks on each stage; the first stages get the remaining ones."""
    num = devices * chunks
    balance = [blocks // num + (k < blocks % num) for k in range(num)]
    balance[0] += 1
    balance[-1] += 1
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return partition(balance, micro_batches, schedule=schedule, chunks=chunks)
