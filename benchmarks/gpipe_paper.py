"""The GPipe paper's table 1, planned: does each model fit where the paper says it trained, and with how much memory?

    python benchmarks/gpipe_paper.py transformer amoebanet > docs/measurements/gpipe-paper.md

Layers are compiled for TPU v2 and v3 by the TPU's own compiler, without a TPU (the extra `tpu`), and remembered: a run
that is interrupted goes on where it was. AmoebaNet's cells take minutes each. Figures of the paper: Huang et al.,
"GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", arXiv:1811.06965v5, table 1 (those of
AmoebaNet-D with 544 and 512 filters as torchgpipe's README repeats them).
"""

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import planner
from planner.core.errors import InfeasibleError
from planner.core.values.plan import Plan
from planner.core.values.units import format_bytes
from planner.model import in_precision, load_model
from planner.profile.profiler import profile_model
from planner.profile.task import ProfilerOptions
from planner.tpu.extra import package_versions

MODELS = Path(__file__).parent.parent / "sample_models"
GIB, GB = 2**30, 10**9
BYTES_PER_PARAMETER = 12
"""float32 parameter, gradient and RMSProp's mean square: so the paper's figures come out."""

TRANSFORMER = {"width": "2048", "feed_forward": "8192", "heads": "32", "vocabulary": "32000", "tokens": "1024"}
IMAGES = {"num_classes": "1000", "image_size": "224"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One column of the paper's table."""

    model: str
    name: str
    settings: dict[str, str]
    chip: str
    cores: int
    batch: int
    sizes: tuple[int, ...]
    """Micro-batch sizes to choose from."""
    naive: bool = False
    """Whether the mini-batch is one micro-batch, and nothing is recomputed."""
    dtype: str = "fp32"
    parameters: str = ""
    """The paper's figure."""
    activations: str = ""


def _amoebanet(layers: int, filters: int, cores: int, parameters: str, activations: str, *, samples: int = 8) -> Row:
    return Row(
        model="amoebanet_d",
        name=f"AmoebaNet-D ({layers}, {filters})",
        settings={"num_layers": str(layers), "num_filters": str(filters), **IMAGES},
        chip="v2",
        cores=cores,
        batch=128,
        sizes=(samples,),
        naive=samples == 128,
        dtype="bf16",
        parameters=parameters,
        activations=activations,
    )


def _transformer(layers: int, cores: int, parameters: str, activations: str, *, naive: bool = False) -> Row:
    return Row(
        model="transformer_lm",
        name=f"Transformer-{layers}",
        settings={"layers": str(layers), **TRANSFORMER},
        chip="v3",
        cores=cores,
        batch=32,
        sizes=(32,) if naive else (1, 2, 4, 8),
        naive=naive,
        parameters=parameters,
        activations=activations,
    )


ROWS = {
    "transformer": (
        _transformer(3, 1, "3.15 GiB", "11.7 GiB", naive=True),
        _transformer(13, 1, "8.8 GiB", "6.4 GiB"),
        _transformer(103, 8, "59.5 GiB", "50.9 GiB"),
    ),
    "amoebanet": (
        _amoebanet(18, 208, 1, "1.05 GB", "6.26 GB", samples=128),
        _amoebanet(18, 416, 1, "3.8 GB", "3.46 GB"),
        _amoebanet(18, 416, 1, "3.8 GB", "3.46 GB", samples=16),
        _amoebanet(18, 544, 2, "6.45 GB", "8.11 GB"),
        _amoebanet(36, 544, 4, "12.53 GB", "15.21 GB"),
        _amoebanet(72, 512, 8, "24.62 GB", "26.24 GB"),
    ),
}


def planned(row: Row) -> Iterator[str]:
    """Yield table lines: one with the chip's memory limit, and if no plan fits, one with the memory that it needs."""
    loaded = load_model(str(MODELS / f"{row.model}.py"), settings=row.settings, optimizer="rmsprop")
    options = ProfilerOptions(micro_batch_sizes=row.sizes, device=f"tpu:{row.chip}")
    profile = profile_model(in_precision(loaded, "bf16" if row.dtype == "bf16" else ""), options)
    for cap in (f"tpu:{row.chip}", "1TB"):
        for recompute in ("never",) if row.naive else ("always", "auto"):
            try:
                plan = planner.solve(
                    profile, devices=row.cores, mem=cap, batch=row.batch, recompute=recompute, schedule="gpipe"
                )
            except InfeasibleError:
                yield _line(row, cap, recompute, profile.model.parameters, None)
                continue
            yield _line(row, cap, recompute, profile.model.parameters, plan)


def _line(row: Row, cap: str, recompute: str, parameters: int, plan: Plan | None) -> str:
    limit = "its own" if cap.startswith("tpu:") else "none"
    head = f"| {row.name} | {row.dtype} | {row.cores} x {row.chip} | {row.batch} | {limit} | {recompute} |"
    held = f"{parameters * BYTES_PER_PARAMETER / GIB:.2f} GiB | {row.parameters or '-'}"
    if plan is None:
        return f"{head} - | no plan | {held} | - | {row.activations or '-'} | - |"
    memory = [stage.memory for stage in plan.stages]
    activations = sum(m.in_flight + m.transfer + m.working for m in memory)
    most = max(m.total for m in memory)
    return (
        f"{head} {plan.micro_batches} | fits | {held} | {format_bytes(activations)} | {row.activations or '-'} | "
        f"{format_bytes(most)} |"
    )


def main() -> None:
    """Print the table of the models named on the command line."""
    told = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    print(f"# The GPipe paper's table 1, planned\n\nMade by `{shlex.join(['python', *sys.argv])}`: {told}.\n")
    print(
        "| model | dtype | cores | batch | cap | recompute | M | answer | parameters, 12 B each | paper | "
        "activations, all cores | paper | fullest core, all in all |"
    )
    print("|---|---|---|---:|---|---|---:|---|---:|---:|---:|---:|---:|")
    for name in sys.argv[1:] or list(ROWS):
        for row in ROWS[name]:
            for line in planned(row):
                print(line, flush=True)


if __name__ == "__main__":
    main()
