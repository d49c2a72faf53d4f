"""Loss and gradients of pipelines beside those of the unpipelined model: every schedule, stage count, recomputation.

    python benchmarks/gradients.py > docs/measurements/gradients.md

Five sample models and eight real ones in training mode (dropout and batch normalisation work), as the tests compare
them: each run accumulates the same micro-batches in one process, with the same seeds. Two steps, the last one compared.
Takes about fifteen minutes on two cores.
"""

import os
import platform
import sys
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

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
_RECOMPUTE = ("never", "except-last", "always")


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    bases = {name: _sample(name, settings) for name, settings in _SAMPLES.items()}
    bases |= {name: _real(name) for name in _REAL}
    layers = {name: _num_layers(case) for name, case in bases.items()}
    worst: dict[str, list[tuple[float, float, float]]] = {name: [] for name in bases}
    runs = [(k, schedule) for k in (2, 3, 4) for schedule in ("gpipe", "1f1b")]
    for (num_devices, schedule), recompute in product([*runs, (2, "interleaved")], _RECOMPUTE):
        chunks = 2 if schedule == "interleaved" else 1
        how = {"schedule": schedule, "chunks": chunks, "recompute": recompute}
        stages = num_devices * chunks
        cases = {
            name: replace(case, balance=_even(layers[name], stages), **how)
            for name, case in bases.items()
            if layers[name] >= stages
        }
        print(f"{num_devices} devices, {schedule}, {recompute}: {len(cases)} runs", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            results = run_cases(list(cases.values()), Path(folder))
        for name, result in zip(cases, results, strict=True):
            worst[name].append((result["split_loss_relative"], result["split_all_relative"], result["split_buffer"]))
    _print(worst, layers)


def _print(worst: dict[str, list[tuple[float, float, float]]], layers: dict[str, int]) -> None:
    print("# Pipelines beside the unpipelined model\n")
    print(
        f"`python benchmarks/gradients.py` on {cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}, ", end=""
    )
    print(f"Python {platform.python_version()}, float32.")
    print(
        "K = 2, 3, 4 under GPipe and 1F1B, two devices with two stages each under interleaved 1F1B; recompute `never`,"
    )
    print(
        "`except-last`, `always`; M = 4. The largest relative differences after two steps, to the same micro-batches in"
    )
    print("one process: of the loss, of all gradients (norm of the difference over the norm), of any buffer (running")
    print("statistics of batch normalisations).\n")
    print("| model | layers | runs | loss | gradients | buffers |\n|---|---:|---:|---:|---:|---:|")
    for name, rows in worst.items():
        cells = (f"{max(column):.1e}" for column in zip(*rows, strict=True))
        print(f"| {name} | {layers[name]} | {len(rows)} | {' | '.join(cells)} |")


def _sample(name: str, settings: dict[str, int]) -> Case:
    path = ROOT / f"sample_models/{name}.py"
    return Case(model=path, balance=(1,), settings=tuple(settings.items()), steps=2)


def _real(name: str) -> Case:
    return Case(model=ROOT / "tests/support/models/real.py", balance=(1,), settings=(("name", name),), steps=2)


def _num_layers(case: Case) -> int:
    loaded = load_model(str(case.model), settings={name: str(value) for name, value in case.settings})
    return len(build_structure(loaded).names)


def _even(layers: int, stages: int) -> tuple[int, ...]:
    return tuple(layers * (k + 1) // stages - layers * k // stages for k in range(stages))


if __name__ == "__main__":
    main()
