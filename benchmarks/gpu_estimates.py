"""Times of layers that a GPU measured beside estimates that need no GPU.

    python benchmarks/gpu_estimates.py

The profiles in benchmarks/data/h200 were measured on an NVIDIA H200 with torch 2.11 and transformers 5.17:

    gpipe-plan profile config.json --from-formula never --device cuda --sequence 4096 --batch-sizes 1 --dtype bf16-mixed

Their config.json files are those of sample_models/configurations, with fewer blocks. Estimates are made twice, both for
a device of this name: from the operators of the same model (`--from-formula never --device estimate:h200`), and by
formula (`--device estimate:h200`).
"""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import planner
from planner.core.values.profile import LayerProfile, Profile
from planner.files import read_profile

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "benchmarks" / "data" / "h200"
BLOCKS = {"llama-3-70b": 2, "gemma-2-9b": 4, "qwen3-30b-a3b": 2}


def main() -> None:
    """Print the table."""
    print("| model | layers | measured | from operators | error | by formula | error |")
    print("|---|---|---|---|---|---|---|")
    for name in BLOCKS:
        measured, operators, formula = (list(_rows(profile)) for profile in (_measured(name), *estimates_of(name)))
        for (kind, time_us), (_, of_operators), (_, of_formula) in zip(measured, operators, formula, strict=True):
            cells = [name, kind, _ms(time_us)]
            for estimate_us in (of_operators, of_formula):
                cells += [_ms(estimate_us), f"{time_us / estimate_us - 1:+.0%}"]
            print(f"| {' | '.join(cells)} |")


def _measured(name: str) -> Profile:
    return read_profile(str(MEASURED / f"{name}.yaml"))


def estimates_of(name: str) -> Iterator[Profile]:
    """Yield the estimate from operators, then the one by formula, of a measured model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        source = ROOT / "sample_models" / "configurations" / name / "config.json"
        path.write_text(json.dumps({**json.loads(source.read_text()), "num_hidden_layers": BLOCKS[name]}))
        shared = {"device": "estimate:h200", "sequence": 4096, "batch_sizes": (1,), "dtype": "bf16-mixed"}
        yield planner.profile(path, from_formula="never", proof_budget="0s", **shared)  # type: ignore[arg-type]
        yield planner.profile(path, from_formula="auto", tensor_parallel=1, **shared)  # type: ignore[arg-type]


def _rows(profile: Profile) -> Iterator[tuple[str, float]]:
    """Yield the microseconds of forward plus backward: of a block, of the head, and of all layers."""
    times = [(_kind(layer), layer.forward_us[0] + layer.backward_us[0]) for layer in profile.layers]
    for kind in ("block", "head"):
        of_kind = [time_us for name, time_us in times if name == kind]
        yield kind, sum(of_kind) / len(of_kind)
    yield "all", sum(time_us for _, time_us in times)


def _kind(layer: LayerProfile) -> str:
    return next((kind for kind, part in (("block", "layers."), ("head", "lm_head")) if part in layer.name), "other")


def _ms(time_us: float) -> str:
    return f"{time_us / 1e3:.1f} ms"


if __name__ == "__main__":
    main()
