"""Rates that published runs on A100, H100 and GB200 reached.

A rate is the number of FLOP that a GPU computes per second, as the formulas count them, so that the predicted step
takes as long as the measured one. Bubbles are simulated, and sums of GPUs that share each layer take what the cost
model says for the chip's NVLink. Other communication lowers the rate. Recomputation is counted where the source
states it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from statistics import median

from benchmarks.published_chips import even_cut, golden_cut, golden_profile, profile
from benchmarks.published_formulas import (
    formula,
    gpt,
    recomputation_cut,
    recomputation_profile,
    vocabulary_cut,
    zero_bubble_profile,
)
from benchmarks.published_runs import Row, cluster, partition, predicted_s, read
from planner.core.cost.partition import Partition
from planner.core.cost.width import tensor_parallel_profile
from planner.core.values.devices import accelerator
from planner.core.values.profile import Profile
from planner.profile.formula.families import transformer_from_config
from planner.profile.formula.layers import ElementBytes, ExecutionSettings
from planner.profile.formula.presets import model_presets
from planner.profile.formula.shapes import Attention, Block, FeedForward, Transformer, gpt_transformer

CHIPS = {"A100": "a100-80gb", "H100": "h100", "GB200": "gb200"}
"""Accelerators by chip."""

_ROUNDS = 3
"""Repeated estimates of a rate, each with the communication at the one before."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Published run, and the profile and cuts that predict its step."""

    chip: str
    model: str
    source: str
    step_s: float
    """Measured step."""
    profile: Profile
    """Profile at 1 TFLOP/s."""
    cut: Partition
    width: int = 1
    """GPUs that share each layer."""
    shares: int = 1
    """GPUs that also divide each sample (context parallelism) or experts: they divide the work."""
    experts: bool = False
    """True for a mixture of experts."""

    def predicted_s(self, rate: float) -> float:
        """Return the step at `rate` TFLOP/s."""
        link, more = accelerator(CHIPS[self.chip]).link, {"tensor_parallel": self.width}
        if self.width > 1:
            # The profile's times are those at 1 TFLOP/s, so communication is as many times slower as computing.
            more["link"] = replace(
                link, bytes_per_s=link.bytes_per_s / rate, latency_us=link.latency_us * rate * self.shares
            )
        at_rate = tensor_parallel_profile(self.profile, replace(cluster(self.cut), **more))
        return predicted_s(at_rate, self.cut) / rate / self.shares

    @cached_property
    def rate(self) -> float:
        """TFLOP/s at which the predicted step takes as long as the measured one."""
        computing = predicted_s(
            tensor_parallel_profile(self.profile, replace(cluster(self.cut), tensor_parallel=self.width)), self.cut
        )
        rate = computing / self.shares / self.step_s
        for _ in range(_ROUNDS if self.width > 1 else 0):
            rest_s = self.predicted_s(rate) - computing / self.shares / rate
            rate = computing / self.shares / (self.step_s - rest_s)
        return rate


@cache
def reached() -> tuple[Run, ...]:
    """Return all runs whose number of GPUs is known."""
    runs = (*_vocabulary(), *_zero_bubble(), *_recomputation(), *_bloom(), *_golden(), *_nemo())
    return tuple(sorted(runs, key=lambda run: (list(CHIPS).index(run.chip), run.experts)))


def medians() -> dict[tuple[str, bool], float]:
    """Return the rate in TFLOP/s on each chip, with and without experts."""
    runs = reached()
    return {(run.chip, run.experts): _median(each for each in runs if _is_alike(each, run)) for run in runs}


def rate_rows() -> Iterator[Row]:
    """Yield steps predicted at the rate of the other runs of the same kind."""
    runs = reached()
    for run in runs:
        yield _at_rate_of(run, [each for each in runs if _is_alike(each, run) and each is not run])


def given_rate_rows() -> Iterator[Row]:
    """Yield steps predicted at the rate of the other runs of the same kind and source, as with `--rate`."""
    runs = reached()
    for run in runs:
        same = [each for each in runs if _is_alike(each, run) and each.source == run.source and each is not run]
        if same:
            yield _at_rate_of(run, same)


def _at_rate_of(run: Run, others: Sequence[Run]) -> Row:
    """Return the step of a run as predicted at the rate of others."""
    rate = _median(others)
    kind = f"{run.chip}, experts" if run.experts else run.chip
    cells = (kind, run.model, run.source, f"{run.rate:.0f}", f"{rate:.0f}")
    return Row(name=cells, measured=run.step_s, predicted=run.predicted_s(rate))


def _is_alike(run: Run, other: Run) -> bool:
    return (run.chip, run.experts) == (other.chip, other.experts)


def _median(runs: Iterable[Run]) -> float:
    """Return the median of the sources' medians: runs of one source have engine and cluster in common."""
    rates: dict[str, list[float]] = {}
    for run in runs:
        rates.setdefault(run.source, []).append(run.rate)
    return median(map(median, rates.values()))


def _vocabulary() -> Iterator[Run]:
    for line in read("vocabulary-memory"):
        if line["schedule"] == "1f1b" and line["tokens"] == "2048":
            made, cut = gpt(line, 32_000), vocabulary_cut(line)
            flop = cut.micro_batches * sum(3 * layer.forward_flops[0] for layer in made.layers)
            step_s = flop / (312e12 * float(line["mfu_percent"].split()[0]) / 100 * cut.num_devices)
            model = f"GPT, {line['layers']} layers, h = {line['hidden']}"
            yield Run(chip="A100", model=model, source="2411.05288", step_s=step_s, profile=made, cut=cut)


def _zero_bubble() -> Iterator[Run]:
    lines = {line["model"]: line for line in read("zero-bubble")}  # the largest M of each
    for line in lines.values():
        devices, layers, samples = int(line["devices"]), int(line["layers"]), int(line["samples"])
        micro_batches = int(line["micro_batches"])
        yield Run(
            chip="A100",
            model=f"GPT {line['model']}",
            source="2401.10241",
            step_s=micro_batches * samples / (float(line["1f1b_per_s"]) * devices),
            profile=zero_bubble_profile(line),
            cut=partition([(layers + 2) // devices] * devices, micro_batches),
        )


def _recomputation() -> Iterator[Run]:
    for line in read("recomputation")[1:]:
        width = int(line["tensor_parallel"])
        yield Run(
            chip="A100",
            model=f"GPT {line['model']}, TP {width}",
            source="2205.05198",
            step_s=float(line["selective_s"]),
            profile=recomputation_profile(line, f"1,{width}"),
            cut=recomputation_cut(line, "never"),
            width=width,
        )


def _bloom() -> Iterator[Run]:
    for line in read("bloom"):
        samples, devices, layers = int(line["samples"]), int(line["devices"]), int(line["layers"])
        made = formula(
            layers=layers,
            hidden=int(line["hidden"]),
            heads=64,
            sequence=2048,
            vocabulary=250_880,
            tied=True,
            tensor_parallel="1,8",
            batch_sizes=samples,
        )
        micro_batches = int(line["batch"]) // int(line["replicas"]) // samples
        cut = replace(even_cut(layers, devices, 1, micro_batches), recompute=("always",) * devices)
        model, step_s = f"GPT {line['model']}, TP 8, b = {samples}", float(line["step_s"])
        yield Run(chip="A100", model=model, source="BLOOM", step_s=step_s, profile=made, cut=cut, width=8)


def _golden() -> Iterator[Run]:
    for line in read("megatron-golden"):
        if line["replicas"]:
            yield Run(
                chip=line["chip"],
                model=f"GPT 7B, TP {line['tensor_parallel']}",
                source="Megatron-LM",
                step_s=float(line["step_s"]),
                profile=golden_profile(line),
                cut=golden_cut(line),
                width=int(line["tensor_parallel"]),
            )


def _nemo() -> Iterator[Run]:
    half = ElementBytes(activation=2, parameter=2, gradient=4, optimizer=12)
    for line in read("nemo"):
        samples, batch, gpus, tokens, width, devices, replicas = (
            int(line[name]) for name in ("samples", "batch", "gpus", "tokens", "tensor_parallel", "devices", "replicas")
        )
        shape = _shape(line["model"], tokens)
        layout = f"TP {width}, PP {devices}, " if width * devices > 1 and line["source"] == "DGX Cloud" else ""
        yield Run(
            chip=line["chip"],
            model=f"{line['model']}, {layout}{gpus} GPUs, B = {batch}",
            source=line["source"],
            step_s=float(line["step_s"] or batch * tokens / (gpus * float(line["tokens_per_s_gpu"] or 1))),
            profile=profile(shape, ExecutionSettings(tensor_parallel=width), half, samples=samples),
            cut=even_cut(len(shape.blocks), devices, int(line["chunks"]), batch // replicas // samples),
            width=width,
            shares=gpus // (devices * replicas * width),
            experts=shape.has_experts,
        )


def _shape(name: str, tokens: int) -> Transformer:
    """Return the shape of a model."""
    if name == "gpt-3-175b":
        sizes = {"layers": 96, "hidden": 12_288, "heads": 96, "vocabulary": 51_200, "feed_forward": 49_152}
        return gpt_transformer(**sizes, sequence=tokens)
    if name.startswith("nemotron-4"):
        layers, hidden, heads = (32, 6144, 48) if name.endswith("15b") else (96, 18_432, 96)
        attention = Attention(heads=heads, key_value_heads=8, key_dim=hidden // heads, value_dim=hidden // heads)
        block = Block(attention=attention, feed_forward=FeedForward(width=4 * hidden, gated=False))
        return Transformer(
            hidden=hidden, sequence=tokens, vocabulary=256_000, blocks=(block,) * layers, layer_norms=True
        )
    content = model_presets()["deepseek-v3" if name == "kimi-k2" else name]
    kimi = {"num_attention_heads": 64, "n_routed_experts": 384, "first_k_dense_replace": 1, "vocab_size": 163_840}
    return transformer_from_config({**content, **kimi} if name == "kimi-k2" else content, tokens, source=name)
