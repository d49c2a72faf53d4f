"""Times of layers: do they add up to the model's step, and do two profiles lead to plans as good as each other?

    python benchmarks/time.py layers > docs/measurements/time.md
    python benchmarks/time.py plans > docs/measurements/plans.md

Prints a Markdown table with its environment. A step is two micro-batches forward and backward, then the optimizer,
in process time of one thread. Profile and whole step are measured in turn, and of each the median of all rounds is
taken, so that a machine that is busy for a while disturbs neither side more than the other. Takes about ten minutes.
"""

import gc
import os
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner.core.values.plan import Inputs, ProfileReference
from planner.core.values.profile import Profile
from planner.device.clock import CpuClock, median_us
from planner.device.machine import cpu_name
from planner.model import load_model
from planner.model.calling import arguments_of
from planner.model.load import LoadedModel
from planner.profile.profiler import profile_model
from planner.profile.task import ProfilerOptions
from planner.solve import Request, solve

SAMPLES = Path(__file__).parents[1] / "sample_models"
VGG = """
import torch
from torch import nn


def build_model():
    layers, channels = [], 3
    for width in (32, 32, 0, 64, 64, 0, 128, 128, 0):
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 64, 512), nn.ReLU(), nn.Linear(512, 10))


def example_batch(batch_size):
    return torch.randn(batch_size, 3, 64, 64), torch.randint(10, (batch_size,))


def loss_fn(output, target):
    return nn.functional.cross_entropy(output, target)
"""
CASES = {"transformer_lm": 4, "resnet": 4, "amoebanet_d": 8, "mlp": 256, "vgg": 8}
"""Micro-batch size of each model that is planned, too."""
REAL_CASES = {"gpt2": 4, "bert": 4, "vit": 4}
"""The same of those models of `transformers` of which only the sums are taken."""
ROUNDS = 6
MICRO_BATCHES = 2
BATCH = 8


def main() -> None:
    """Print the table that the command line names."""
    torch.set_num_threads(1)
    (asked,) = sys.argv[1:]
    print("# Times of layers and of whole steps\n" if asked == "layers" else "# Two profiles, two plans\n")
    print(f"`python benchmarks/time.py {asked}` on {cpu_name()}, {os.cpu_count()} cores, ", end="")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread, process time.")
    print(f"Load average at the start: {os.getloadavg()[0]:.1f}.\n")
    with tempfile.TemporaryDirectory() as folder:
        vgg = Path(folder, "vgg.py")
        vgg.write_text(VGG, encoding="utf-8")
        paths = {name: SAMPLES / f"{name}.py" if name != "vgg" else vgg for name in CASES}
        models = {name: load_model(str(path), settings={}, inputs=[], optimizer=None) for name, path in paths.items()}
        real = Path(__file__).with_name("real_models.py")
        reals = {n: load_model(str(real), settings={"name": n}, inputs=[], optimizer=None) for n in REAL_CASES}
        if asked == "layers":
            _sums(models | reals)
        else:
            _plans(models)


def _sums(models: dict[str, LoadedModel]) -> None:
    print(f"A step: {MICRO_BATCHES} micro-batches, then the optimizer.")
    print(f"Times are medians of {ROUNDS} rounds; the time of a round is the median of its repeats.")
    print("A percentage is the sum of the layers / the same part of the whole step - 1.\n")
    print("| model | micro-batch | whole step | layers | forward | backward | optimizer | layers against step |")
    print("|---|---|---|---|---|---|---|---|")
    for name, size in (CASES | REAL_CASES).items():
        layers, whole = _typical(models[name], size)
        parts = [f"{a / b - 1:+.1%}" for a, b in zip(layers, whole, strict=True)]
        weights = (MICRO_BATCHES, MICRO_BATCHES, 1)
        summed, step = (sum(w * t for w, t in zip(weights, times, strict=True)) for times in (layers, whole))
        cells = (name, str(size), f"{step / 1e3:.1f} ms", f"{summed / 1e3:.1f} ms", *parts, f"{summed / step - 1:+.1%}")
        print(f"| {' | '.join(cells)} |", flush=True)


def _typical(loaded: LoadedModel, size: int) -> tuple[list[float], list[float]]:
    """Return forward, backward and optimizer in microseconds, of all layers and of the whole model."""
    rounds = [(_of_layers(loaded, size), _of_model(loaded, size)) for _ in range(ROUNDS)]
    layers, whole = ([median_us(times) for times in zip(*side, strict=True)] for side in zip(*rounds, strict=True))
    return layers, whole


def _of_layers(loaded: LoadedModel, size: int) -> tuple[float, float, float]:
    layers = profile_model(loaded, ProfilerOptions(micro_batch_sizes=(size,), time_budget_s=0.0)).layers
    forward, backward = sum(layer.forward_us[0] for layer in layers), sum(layer.backward_us[0] for layer in layers)
    return forward, backward, sum(layer.optimizer_us for layer in layers)


def _of_model(loaded: LoadedModel, size: int) -> tuple[float, float, float]:
    model, clock = loaded.build(), CpuClock(1)
    optimizer = loaded.build_optimizer(model.parameters())
    batch = loaded.example_batch(size)
    steps = []
    gc.disable()
    for _ in range(8):
        pairs = [_forward_and_backward(loaded, model, batch.inputs, batch.targets, clock) for _ in range(MICRO_BATCHES)]
        forward, backward = (sum(times) / MICRO_BATCHES for times in zip(*pairs, strict=True))
        steps.append((forward, backward, clock.time_us(_call(optimizer.step))))
    gc.enable()
    forward, backward, step = (median_us(times) for times in zip(*steps[2:], strict=True))
    return forward, backward, step


def _forward_and_backward(
    loaded: LoadedModel, model: nn.Module, inputs: Any, targets: Any, clock: CpuClock
) -> tuple[float, float]:
    losses: list[Tensor] = []
    args, kwargs = ((inputs,), {}) if isinstance(model, nn.Sequential) else arguments_of(inputs)
    forward_us = clock.time_us(lambda: losses.append(loaded.loss_fn(model(*args, **kwargs), targets)))
    return forward_us, clock.time_us(losses.pop().backward)


def _call(work: Callable[[], object]) -> Callable[[], None]:
    return lambda: work() and None


def _plans(models: dict[str, LoadedModel]) -> None:
    print(f"Each model was profiled twice, as by `gpipe-plan profile`, and planned from both profiles, batch {BATCH}.")
    print("Each plan is evaluated with the profile of the other plan: *regret* is its step / the step of the other")
    print("plan - 1, both predicted from that profile.\n")
    print("| model | devices | first plan | second plan | regret of the first | regret of the second |")
    print("|---|---|---|---|---|---|")
    for name, loaded in models.items():
        profiles = [profile_model(loaded, ProfilerOptions(), warn=_noted(name)) for _ in range(2)]
        for devices in (2, 3, 4):
            _print_regrets(name, devices, profiles)


def _print_regrets(name: str, devices: int, profiles: list[Profile]) -> None:
    inputs = Inputs(
        profile=ProfileReference(path="", digest=""), devices=devices, memory_bytes=(2**40,) * devices, batch=BATCH
    )
    best = [solve(profile, Request(inputs=inputs)) for profile in profiles]
    regrets = []
    for plan, other, profile in zip(best, reversed(best), reversed(profiles), strict=True):
        request = Request(inputs=inputs, balance=plan.balance, micro_batches=plan.micro_batches)
        regrets.append(solve(profile, request).predicted.step_us / other.predicted.step_us - 1)
    shown: Iterable[str] = (f"{','.join(map(str, plan.balance))}; M = {plan.micro_batches}" for plan in best)
    print(f"| {name} | {devices} | {' | '.join(shown)} | {' | '.join(f'{r:.2%}' for r in regrets)} |", flush=True)


def _noted(name: str) -> Callable[[str], None]:
    return lambda text: print(f"{name}: {text}", file=sys.stderr)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
