"""Predicted memory of a stage on a TPU beside what the compiler says of the whole program.

    python benchmarks/tpu_composition.py > docs/measurements/tpu-composition.md

One stage holds the whole model: forward and backward of M micro-batches, gradients accumulated. Predicted is what the
plan says from a profile of single layers, without the optimizer's state; compiled is the emitted JAX program without
its optimizer: the sum of arguments, results and temporaries, in the words of the compiler. No TPU is needed (the extra
`tpu`); each program takes a minute or two.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from planner import api
from planner.core.balance import Balance, StageBalance
from planner.core.plan import Recompute
from planner.core.profile import Model, Profile
from planner.executor.jax_pipeline import JaxPipeline
from planner.model import LoadedModel, in_precision, load_model
from planner.model.torchax_adapter import expect_no_tpu, jax_modules, named_chip, versions
from planner.profile import ProfileOptions, profile_model
from planner.profile.structure import find_chain

MODELS = Path(__file__).parent.parent / "sample_models"
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

    def load(self) -> LoadedModel:
        """The model file's."""
        loaded = load_model(str(MODELS / f"{self.model}.py"), settings=self.settings)
        return in_precision(loaded, "" if self.dtype == "fp32" else self.dtype)


TRANSFORMER = {"layers": "4"}
AMOEBANET = {"num_layers": "3", "num_filters": "64"}
CASES = (
    Case(model="transformer_lm", settings=TRANSFORMER, size=8),
    Case(model="transformer_lm", settings=TRANSFORMER, size=8, dtype="bf16"),
    Case(model="amoebanet_d", settings=AMOEBANET, size=16),
    Case(model="amoebanet_d", settings=AMOEBANET, size=16, dtype="bf16"),
)


def profile_of(loaded: LoadedModel, size: int) -> Profile:
    """By its single layers."""
    return profile_model(loaded, ProfileOptions(micro_batch_sizes=(size,), device=f"tpu:{CHIP}"))


def predicted_bytes(profile: Profile, recompute: Recompute, micro_batches: int) -> int:
    """Of one stage that holds the model, without the optimizer's state."""
    (size,) = profile.micro_batch_sizes
    plan = api.solve(profile, devices=1, mem="1TB", batch=size * micro_batches, recompute=recompute, schedule="gpipe")
    memory = plan.stages[0].memory
    return memory.total - memory.optimizer


def compiled_bytes(loaded: LoadedModel, size: int, recompute: Recompute, micro_batches: int) -> int:
    """Of the same stage as one program."""
    jax, _ = jax_modules()
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
    pipeline = JaxPipeline(loaded, chain, balance, [named_chip(CHIP)])
    memory = jax.jit(pipeline.gradients).lower(*pipeline.shapes()).compile().memory_analysis()
    return _total_bytes(memory)


def _total_bytes(memory: Any) -> int:
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(held + memory.temp_size_in_bytes)


def lines(cases: Sequence[Case]) -> Iterator[str]:
    """Of the table."""
    for case in cases:
        loaded = case.load()
        profile = profile_of(loaded, case.size)
        for recompute, micro_batches in RUNS:
            predicted = predicted_bytes(profile, recompute, micro_batches)
            compiled = compiled_bytes(loaded, case.size, recompute, micro_batches)
            named = ", ".join(f"{name}={value}" for name, value in case.settings.items())
            yield (
                f"| `{case.model}.py` {named} | {case.dtype} | {case.size} | {recompute} | {micro_batches} | "
                f"{predicted / MB:.1f} | {compiled / MB:.1f} | {predicted / compiled:.3f} |"
            )


def main() -> None:
    """Prints the table."""
    expect_no_tpu()
    told = ", ".join(f"{name} {version}" for name, version in versions().items())
    print("# Memory on a TPU: layer by layer, and compiled as a whole\n")
    print(f"Made by `python benchmarks/tpu_composition.py` for TPU {CHIP}: {told}.\n")
    print("| model | dtype | b | recompute | M | predicted, MB | compiled, MB | ratio |")
    print("|---|---|---:|---|---:|---:|---:|---:|")
    for line in lines(CASES):
        print(line, flush=True)


if __name__ == "__main__":
    main()
