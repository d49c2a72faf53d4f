"""Predicted peak memory of every stage beside what one GPU measures when it runs that stage alone.

    python benchmarks/gpu.py > docs/measurements/gpu.md
    python benchmarks/gpu.py --device cpu --models transformer_lm --small

Each model is profiled on the device and planned for four of them. Then every stage of the plan is built alone, as the
executor builds it, and runs steps of the plan's M micro-batches: what it would receive is made up, and what it would
send is held as long as the engine holds it. Times are in `gpu_runs.py`.
"""

import argparse
import contextlib
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import planner
from planner.core.values.plan import Plan, Stage
from planner.core.values.units import format_bytes, parse_bytes
from planner.device.kinds import kind_of
from planner.device.machine import keep_freed_memory
from planner.executor.build.building import StageRange, build_stages, build_structure
from planner.executor.run.shapes import chain_shapes
from planner.executor.run.stage_module import StageModule
from planner.model import LoadedModel, load_model
from planner.model.chain import Chain
from planner.model.load import to_device

ROOT = Path(__file__).resolve().parents[1]
NUM_DEVICES = 4
STEPS = 2


@dataclass(frozen=True)
class Subject:
    """A model, its size on a GPU, and its size in a trial run."""

    path: str
    settings: dict[str, object]
    small: dict[str, object]
    batch: int
    sizes: tuple[int, ...] = (2, 4)


MODELS = {
    "transformer_lm": Subject(
        "sample_models/transformer_lm.py",
        {"layers": 6, "width": 2048, "feed_forward": 8192, "heads": 32, "vocabulary": 32000, "tokens": 1024},
        {"layers": 4, "width": 128, "feed_forward": 256, "heads": 4, "vocabulary": 256, "tokens": 64},
        32,
    ),
    "gpt2_medium": Subject(
        "benchmarks/gpt2.py",
        {"layers": 24, "width": 1024, "heads": 16, "tokens": 512},
        {"layers": 4, "tokens": 32},
        32,
    ),
    "resnet": Subject("sample_models/resnet.py", {"depth": 101}, {"depth": 50, "image_size": 64}, 64),
    "amoebanet_d": Subject(
        "sample_models/amoebanet_d.py",
        {"num_layers": 18, "num_filters": 208},
        {"num_layers": 3, "num_filters": 16},
        32,
    ),
}


def main() -> None:
    """Print the table of every requested model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--mem", default="24GB", help="cap per device")
    parser.add_argument("--small", action="store_true", help="models for a CPU")
    options = parser.parse_args()
    device = torch.device(options.device)
    kind = kind_of(device)
    if not kind.has_own_memory:
        keep_freed_memory()
    torch.set_num_threads(1)
    print("# Peak memory of stages on one GPU\n")
    print(
        f"`{shlex.join(['python', *sys.argv])}` on {kind.model_name}, torch {torch.__version__}, Python "
        f"{platform.python_version()}. Each model is planned for {NUM_DEVICES} such devices of {options.mem}. An error "
        "is measured / predicted - 1, without the memory outside torch's allocator.\n"
    )
    print("| model | plan | stage | measured peak | predicted | error |")
    print("|---|---|---|---|---|---|", flush=True)
    for model in options.models:
        for row in _rows(model, MODELS[model], device, parse_bytes(options.mem), small=options.small):
            print(f"| {' | '.join(row)} |", flush=True)


def _rows(name: str, subject: Subject, device: torch.device, mem: int, *, small: bool) -> Iterator[Sequence[str]]:
    settings = subject.small if small else subject.settings
    with contextlib.redirect_stdout(sys.stderr):
        profile = planner.profile(
            ROOT / subject.path,
            batch_sizes=subject.sizes,
            device=str(device),
            settings=settings,
            repeat=3,
            time_budget="0s",
            proof_budget="0s",  # the CPU tests it
        )
    loaded = load_model(str(ROOT / subject.path), settings={key: str(value) for key, value in settings.items()})
    chain = build_structure(loaded)
    # What a recomputing stage holds depends on the engine, so `gpu_runs.py` measures it.
    plan = planner.solve(
        profile, devices=NUM_DEVICES, mem=mem, batch=subject.batch, schedule="gpipe", recompute="never"
    )
    shape = f"{len(plan.stages)} stages, M = {plan.micro_batches}, b = {plan.micro_batch_size}"
    for stage in plan.stages:
        peak_bytes = _measure_alone(loaded, chain, plan, stage, device)
        predicted_bytes = stage.memory.total - stage.memory.reserve
        yield (
            name,
            shape,
            str(stage.index),
            format_bytes(peak_bytes),
            format_bytes(predicted_bytes),
            f"{peak_bytes / predicted_bytes - 1:+.2%}",
        )


def _measure_alone(loaded: LoadedModel, chain: Chain, plan: Plan, stage: Stage, device: torch.device) -> int:
    """Return the peak bytes of one stage that runs steps of GPipe alone."""
    first = sum(plan.balance[: stage.index])
    end = first + plan.balance[stage.index]
    size, count = plan.micro_batch_size, plan.micro_batches
    batch = loaded.example_batch(size)
    shapes = chain_shapes(chain, batch.inputs)
    is_last = end == len(chain.layers)
    (layers,) = build_stages(loaded, chain, [StageRange(first, end)], seed=0, device=device)
    module = StageModule(
        layers,
        received=shapes.boundaries[first],
        recompute="never",
        micro_batches=count,
        loss_fn=loaded.loss_fn if is_last else None,
        copies_input=shapes.stage_writes_input(first, end),
    )
    module.targets = [to_device(batch.targets, device)] * count
    optimizer = loaded.build_optimizer(module.parameters())
    given = shapes.boundaries[first].tensors

    def received() -> list[Tensor]:
        if first == 0:
            inputs = to_device(batch.inputs, device)
            leaves = list(inputs.values()) if isinstance(inputs, dict) else [inputs]
            return [leaf.clone() for leaf in leaves]
        return [
            (torch.randn if t.is_floating_point() else torch.zeros)(t.shape, dtype=t.dtype, device=device)
            .requires_grad_(t.requires_grad)
            for t in given
        ]  # fmt: skip

    def step() -> None:
        inputs, outputs, sent = [], [], []
        for number in range(count):
            module.micro_batch = number
            inputs.append(received())
            outputs.append(_tuple(module(*inputs[-1])))
            sent.append([t.detach() for t in outputs[-1]])  # until the end of the phase, in the handles of the sends
        for number in range(count):
            module.micro_batch = number
            into, out = inputs.pop(0), outputs.pop(0)
            carrying = [t for t in out if t.requires_grad]
            gradients = [torch.ones_like(t) for t in carrying]
            if carrying:
                torch.autograd.backward(carrying, gradients)
            sent.append([t.grad for t in into if t.grad is not None])
            sent.append(gradients)
            del into, out, carrying, gradients
        del sent
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(STEPS):
        step()
    peak = kind_of(device).meter().measure(step).peak_bytes
    return stage.memory.parameters + stage.memory.optimizer + stage.memory.buffers + peak


def _tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else value


if __name__ == "__main__":
    main()
