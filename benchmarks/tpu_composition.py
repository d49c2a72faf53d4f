"""Predicted memory of a stage on a TPU beside what the compiler says of the whole program.

    python benchmarks/tpu_composition.py one        one stage that holds the whole model
    python benchmarks/tpu_composition.py others     the same, of models that no margin was found on
    python benchmarks/tpu_composition.py several    several stages
    python benchmarks/tpu_composition.py chosen     the same, of models that no law was found on

Of one stage, forward and backward of M micro-batches, gradients accumulated: predicted is what the plan says from a
profile of single layers, without the optimizer's state; compiled is the emitted JAX program without its optimizer. Of
several, both are of the emitted program as it trains, with its optimizer (AdamW, SGD with momentum where the model says
so). Compiled is always the sum of arguments, results and temporaries, in the words of the compiler. No TPU is needed
(the extra `tpu`); each program takes up to a few minutes.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import planner
from planner.core.cost.costs import costs_at
from planner.core.cost.partition import Partition
from planner.core.values.balance import Balance, StageBalance
from planner.core.values.plan import Recompute
from planner.core.values.profile import Model, Profile
from planner.model import LoadedModel, in_precision, load_model
from planner.profile.profiler import profile_model
from planner.profile.structure import find_chain
from planner.profile.task import ProfilerOptions
from planner.tpu.emitter import emit
from planner.tpu.extra import disable_tpu_search, package_versions
from planner.tpu.program_memory import program_memory
from planner.tpu.training import JaxArguments, jax_training

HERE = Path(__file__).parent
MB = 10**6
CHIP = "v2"
RUNS: tuple[tuple[Recompute, int], ...] = (("never", 1), ("never", 4), ("always", 4))
"""How a micro-batch's activations are kept, and M; alone, a micro-batch is the same program either way."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model at one micro-batch size."""

    model: str
    settings: dict[str, str]
    size: int
    dtype: str = "fp32"

    @property
    def named(self) -> str:
        """Name for a table."""
        settings = ", ".join(f"{name}={value}" for name, value in self.settings.items())
        return f"`{self.model}.py` {settings} | {self.dtype} | {self.size}"

    def load(self) -> LoadedModel:
        """Load the model file."""
        folder = HERE if (HERE / f"{self.model}.py").exists() else HERE.parent / "sample_models"
        loaded = load_model(str(folder / f"{self.model}.py"), settings=self.settings)
        return in_precision(loaded, "" if self.dtype == "fp32" else self.dtype)


TRANSFORMER = {"layers": "4"}
AMOEBANET = {"num_layers": "3", "num_filters": "64"}


def _transformer(
    layers: int, width: int, *, feed_forward: int, vocabulary: int, heads: int = 4, tokens: int = 64
) -> dict[str, str]:
    sizes = {"layers": layers, "width": width, "feed_forward": feed_forward, "heads": heads}
    return {name: str(size) for name, size in {**sizes, "vocabulary": vocabulary, "tokens": tokens}.items()}


CASES = (
    Case(model="transformer_lm", settings=TRANSFORMER, size=8),
    Case(model="transformer_lm", settings=TRANSFORMER, size=8, dtype="bf16"),
    Case(model="amoebanet_d", settings=AMOEBANET, size=16),
    Case(model="amoebanet_d", settings=AMOEBANET, size=16, dtype="bf16"),
)

OTHERS = (
    Case(model="tpu_models", settings={"name": "vit"}, size=16, dtype="bf16"),
    Case(model="tpu_models", settings={"name": "residual", "width": "128"}, size=16, dtype="bf16"),
    Case(model="unet", settings={"levels": "3"}, size=8, dtype="bf16"),
)
IN_ONE_PIECE: tuple[tuple[Recompute, int], ...] = (("never", 1), ("always", 4))
"""The runs that the margin for gaps is of."""

SEVERAL = (
    Case(model="tpu_models", settings={"name": "vit"}, size=16),
    Case(model="tpu_models", settings={"name": "vit"}, size=16, dtype="bf16"),
    Case(model="transformer_lm", settings=_transformer(6, 256, feed_forward=1024, vocabulary=1024), size=8),
    Case(model="transformer_lm", settings=_transformer(6, 256, feed_forward=512, vocabulary=2048), size=8),
    Case(
        model="transformer_lm",
        settings=_transformer(8, 512, feed_forward=2048, vocabulary=4096, heads=8, tokens=128),
        size=4,
    ),
    Case(model="tpu_models", settings={"name": "residual", "width": "128"}, size=16),
    Case(model="mlp", settings={"depth": "12", "width": "1024"}, size=256),
    Case(model="amoebanet_d", settings=AMOEBANET, size=16),
)
CHOSEN = (
    Case(model="real_models", settings={"name": "llama"}, size=8),
    Case(model="real_models", settings={"name": "vit"}, size=8, dtype="bf16"),
    Case(model="real_models", settings={"name": "convnext"}, size=16),
    Case(model="unet", settings={"levels": "3"}, size=8),
    Case(model="unet", settings={"levels": "3"}, size=8, dtype="bf16"),
    Case(model="resnet", settings={"depth": "50"}, size=8),
)
"""Written down before any was compiled in several stages, but for the ViT: GPT-2's shared weights cross its stages."""

STAGES = (2, 4)
MICRO_BATCHES = 8
CHOICES: tuple[Recompute, ...] = ("never", "always")


def profile_of(loaded: LoadedModel, size: int) -> Profile:
    """Return the profile by single layers."""
    return profile_model(loaded, ProfilerOptions(micro_batch_sizes=(size,), device=f"tpu:{CHIP}"))


def predicted_bytes(profile: Profile, recompute: Recompute, micro_batches: int) -> int:
    """Return the bytes of one stage with the whole model, without the optimizer's state."""
    (size,) = profile.micro_batch_sizes
    plan = planner.solve(
        profile, devices=1, mem="1TB", batch=size * micro_batches, recompute=recompute, schedule="gpipe"
    )
    memory = plan.stages[0].memory
    return memory.total - memory.optimizer


def compiled_bytes(loaded: LoadedModel, size: int, recompute: Recompute, micro_batches: int) -> int:
    """Return the bytes of the same stage as one program."""
    # This module is imported before it is settled that no TPU is to be looked for.
    import jax  # noqa: PLC0415

    from planner.tpu.chips import target_device  # noqa: PLC0415
    from planner.tpu.pipeline import JaxPipeline  # noqa: PLC0415
    from planner.tpu.programs import compiler_options_for  # noqa: PLC0415

    chain, _ = find_chain(loaded, torch.device("cpu"))
    names = tuple(chain.names)
    balance = Balance(
        plan_digest="",
        model=Model(),
        schedule="gpipe",
        batch=size * micro_batches,
        micro_batches=micro_batches,
        balance=(len(names),),
        stages=(StageBalance(index=0, recompute=recompute, layers=names),),
    )
    pipeline = JaxPipeline(loaded, chain, balance, [target_device(CHIP)])
    jitted = jax.jit(pipeline.loss_and_gradients, compiler_options=compiler_options_for(target_device(CHIP)))
    memory = jitted.lower(*pipeline.argument_shapes()).compile().memory_analysis()
    return _total_bytes(memory)


def _total_bytes(memory: Any) -> int:
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(held + memory.temp_size_in_bytes)


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Bytes of a program of several stages."""

    fullest: int
    """The fullest stage by itself, as the plan has it."""
    predicted: int
    """Every device of the program."""
    compiled: int


def compare(profile: Profile, *, stages: int, micro_batches: int, recompute: Recompute) -> Compared:
    """Compare the plan with the evenest cuts with its training program; the model has a file."""
    (size,) = profile.micro_batch_sizes
    layers = len(profile.layers)
    cuts = [layers * (k + 1) // stages - layers * k // stages for k in range(stages)]
    asked = {"devices": stages, "mem": "1TB", "batch": size * micro_batches, "micro_batches": micro_batches}
    plan = planner.solve(profile, **asked, recompute=recompute, schedule="gpipe", balance=cuts)
    partition = Partition.of(plan, [layer.name for layer in profile.layers])
    with TemporaryDirectory() as folder:
        emitted = emit(plan, profile, folder=folder, profile_folder=".")
        Path(folder, "balance.yaml").write_text(emitted.balance)
        how = JaxArguments(steps=1, seed=0, device=None, compile=CHIP)
        with jax_training(Path(folder, "balance.yaml"), how) as training:
            compiled = training.compiled_memory()
    return Compared(
        fullest=max(stage.memory.total for stage in plan.stages),
        predicted=program_memory(costs_at(profile, size), partition).total,
        compiled=sum(compiled),
    )


def lines(cases: Sequence[Case], runs: Sequence[tuple[Recompute, int]]) -> Iterator[str]:
    """Yield the lines of the table of one stage."""
    yield "| model | dtype | b | recompute | M | predicted, MB | compiled, MB | ratio |"
    yield "|---|---|---:|---|---:|---:|---:|---:|"
    for case in cases:
        loaded = case.load()
        profile = profile_of(loaded, case.size)
        for recompute, micro_batches in runs:
            predicted = predicted_bytes(profile, recompute, micro_batches)
            compiled = compiled_bytes(loaded, case.size, recompute, micro_batches)
            yield (
                f"| {case.named} | {recompute} | {micro_batches} | "
                f"{predicted / MB:.1f} | {compiled / MB:.1f} | {predicted / compiled:.3f} |"
            )


def lines_of_several(cases: Sequence[Case]) -> Iterator[str]:
    """Yield the lines of the table of several stages."""
    yield "| model | dtype | b | K | recompute | fullest stage, MB | predicted, MB | compiled, MB | ratio |"
    yield "|---|---|---:|---:|---|---:|---:|---:|---:|"
    for case in cases:
        loaded = case.load()
        profile = profile_of(loaded, case.size)
        for stages in STAGES:
            for choice in CHOICES:
                found = compare(profile, stages=stages, micro_batches=MICRO_BATCHES, recompute=choice)
                yield (
                    f"| {case.named} | {stages} | {choice} | {found.fullest / MB:.1f} | {found.predicted / MB:.1f} | "
                    f"{found.compiled / MB:.1f} | {found.predicted / found.compiled:.3f} |"
                )


def main() -> None:
    """Print the requested table."""
    disable_tpu_search()
    told = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    print(f"Made by `python benchmarks/tpu_composition.py {' '.join(sys.argv[1:])}` for TPU {CHIP}: {told}.\n")
    match sys.argv[1:]:
        case ["several"]:
            table = lines_of_several(SEVERAL)
        case ["chosen"]:
            table = lines_of_several(CHOSEN)
        case ["others"]:
            table = lines(OTHERS, IN_ONE_PIECE)
        case _:
            table = lines(CASES, RUNS)
    for line in table:
        print(line, flush=True)


if __name__ == "__main__":
    main()
