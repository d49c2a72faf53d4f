"""Loss and gradients of pipelines beside those of the unpipelined model: every schedule, stage count, recomputation.

    python benchmarks/gradients.py > docs/measurements/gradients.md
    python benchmarks/gradients.py --halves >> docs/measurements/gradients.md

Five sample models and eight real ones in training mode (dropout and batch normalisation work), as the tests compare
them: each run accumulates the same micro-batches in one process, with the same seeds. Two steps, the last one compared.
Takes about fifteen minutes on two cores. `--halves`: three of them under every schedule with split backwards.
"""

import argparse
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from planner.core.errors import UsageError  # noqa: E402
from planner.core.schedule import SCHEDULES  # noqa: E402
from planner.core.values.plan import Recompute, ScheduleName  # noqa: E402
from planner.device.machine import cpu_name  # noqa: E402
from planner.executor.build.building import build_structure  # noqa: E402
from planner.model.load import load_model  # noqa: E402
from tests.support.training import Case, run_cases  # noqa: E402

_SAMPLES = {
    "mlp": {"depth": 4, "width": 32},
    "transformer_lm": {"layers": 4, "width": 32, "feed_forward": 64, "heads": 2, "vocabulary": 64, "tokens": 8},
    "amoebanet_d": {"num_layers": 3, "num_filters": 8, "image_size": 33},
    "resnet": {"image_size": 33},
    "unet": {"width": 4, "levels": 2, "image_size": 16},
}
_REAL = ("GPT-2", "Llama", "Gemma-2", "BERT", "T5", "ViT", "ConvNeXt", "ResNet-26 (timm)")
_RECOMPUTE: tuple[Recompute, ...] = ("never", "except-last", "always")


class Way(NamedTuple):
    """Schedule, stages and recomputation of runs."""

    devices: int
    schedule: ScheduleName
    chunks: int
    recompute: Recompute


def main() -> None:
    """Print one of the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--halves", action="store_true", help="schedules with split backwards")
    given = parser.parse_args()
    torch.set_num_threads(1)
    bases = {name: _sample(name, settings) for name, settings in _SAMPLES.items()}
    if given.halves:
        names = ("transformer_lm", "resnet", "GPT-2")
        bases = {name: replace(bases.get(name) or _real(name), micro_batches=8, batch=8) for name in names}
        _head("## Split backward", micro_batches=8)
        _print_by_schedule(_worst(bases, _with_split_backward(micro_batches=8)))
        return
    bases |= {name: _real(name) for name in _REAL}
    _head("# Gradients compared with the unpartitioned model", micro_batches=4)
    print(
        "Schedules: GPipe and 1F1B with K = 2, 3, 4, and interleaved 1F1B with two stages on each of two devices.\n"
        "Recomputation: `never`, `except-last`, `always`.\n"
    )
    worst = _worst(bases, _whole())
    print("| model | layers | runs | loss | gradients | buffers |\n|---|---:|---:|---:|---:|---:|")
    for name, rows in worst.items():
        every = list(rows.values())
        print(f"| {name} | {_num_layers(bases[name])} | {len(every)} | {_cells(every)} |")


def _whole() -> Iterator[Way]:
    for (devices, schedule), recompute in product(product((2, 3, 4), ("gpipe", "1f1b")), _RECOMPUTE):
        yield Way(devices, schedule, 1, recompute)
    for recompute in _RECOMPUTE:
        yield Way(2, "interleaved", 2, recompute)


def _with_split_backward(*, micro_batches: int) -> Iterator[Way]:
    for devices, (name, schedule), recompute in product((2, 3, 4), SCHEDULES.items(), ("never", "always")):
        chunks = 2 if schedule.is_chunked else 1
        with suppress(UsageError):
            schedule.check_supported(devices, micro_batches, chunks)
            if schedule.splits_backward:
                yield Way(devices, name, chunks, recompute)


def _worst(bases: dict[str, Case], ways: Iterable[Way]) -> dict[str, dict[Way, tuple[float, float, float]]]:
    """Return the differences of the loss, of all gradients and of buffers by model and run."""
    layers = {name: _num_layers(case) for name, case in bases.items()}
    worst: dict[str, dict[Way, tuple[float, float, float]]] = {name: {} for name in bases}
    for way in ways:
        stages = way.devices * way.chunks
        how = {"schedule": way.schedule, "chunks": way.chunks, "recompute": way.recompute}
        cases = {
            name: replace(case, balance=_even(layers[name], stages), **how)
            for name, case in bases.items()
            if layers[name] >= stages
        }
        print(f"{way.devices} devices, {way.schedule}, {way.recompute}: {len(cases)} runs", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            results = run_cases(list(cases.values()), Path(folder))
        for name, result in zip(cases, results, strict=True):
            worst[name][way] = (result["split_loss_relative"], result["split_all_relative"], result["split_buffer"])
    return worst


def _print_by_schedule(worst: dict[str, dict[Way, tuple[float, float, float]]]) -> None:
    print("K = 2, 3, 4 if schedule and model allow it. Recomputation: `never`, `always`.\n")
    print("| schedule | model | runs | loss | gradients | buffers |\n|---|---|---:|---:|---:|---:|")
    for schedule, (model, rows) in product(SCHEDULES, worst.items()):
        every = [row for way, row in rows.items() if way.schedule == schedule]
        if every:
            print(f"| {schedule} | {model} | {len(every)} | {_cells(every)} |")


def _cells(rows: Sequence[tuple[float, float, float]]) -> str:
    return " | ".join(f"{max(column):.1e}" for column in zip(*rows, strict=True))


def _head(title: str, *, micro_batches: int) -> None:
    command = shlex.join(["python", *sys.argv])
    print(f"{title}\n\n`{command}` on {cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}, ", end="")
    print(f"Python {platform.python_version()}, float32, M = {micro_batches}.")
    print(
        "Pipelines were compared with a single process that trains the same micro-batches, for two steps. The table\n"
        "has the largest relative differences: of the loss, of all gradients (norm of the difference / norm), and of\n"
        "any buffer (running statistics of batch normalization)."
    )


def _sample(name: str, settings: dict[str, int]) -> Case:
    path = ROOT / f"sample_models/{name}.py"
    return Case(model=path, balance=(1,), settings=tuple(settings.items()), steps=2)


def _real(name: str) -> Case:
    return Case(model=ROOT / "tests/zoo/models/real.py", balance=(1,), settings=(("name", name),), steps=2)


def _num_layers(case: Case) -> int:
    loaded = load_model(str(case.model), settings={name: str(value) for name, value in case.settings})
    return len(build_structure(loaded).names)


def _even(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(layers * (k + 1) // stages - layers * k // stages for k in range(stages))


if __name__ == "__main__":
    main()
