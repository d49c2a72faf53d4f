"""Seed random draws, such as dropout, separately for every step, layer and micro-batch."""

# ruff: noqa: NPY002 - the global generator is what a script draws from

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from planner.device.kinds import accelerator_in_use

if TYPE_CHECKING:
    from planner.model.load import Batch, LoadedModel

_MASK = (1 << 64) - 1


def layer_seed(seed: int, step: int, layer: int, micro_batch: int) -> int:
    """Return the seed for all random generators at the start of a layer.

    Args:
        seed: Seed of the run.
        step: Index of the step since the start of training.
        layer: Index of the layer in the whole model's chain.
        micro_batch: Index of the micro-batch in the step's mini-batch.
    """
    return _mix_into_seed(_of_layer(seed, step, layer), micro_batch)


def seed_process(seed: int) -> None:
    """Seed all random generators that a model file or script may use, on host and devices."""
    torch.manual_seed(seed)
    seed_host(seed)


def seed_host(seed: int) -> None:
    """Seed the host's random generators: those of torch (CPU), Python and NumPy."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))


@contextmanager
def seeded_draws(seed: int) -> Iterator[None]:
    """Seed the generators of torch, Python and NumPy in the `with` block, and restore their states afterwards.

    In the block, a user's function such as `example_batch` returns the same values in every process.
    """
    with keeping_random_state():
        seed_process(seed)
        yield


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Restore the states of all generators after the block, as if the block had drawn no numbers."""
    of_device = device_generator()
    python, numpy = random.getstate(), np.random.get_state()
    # Store bytes instead of a tensor, whose 5 kB would appear in the measured memory of a small stage.
    state = torch.get_rng_state().numpy().tobytes()
    device_state = None if of_device is None else of_device.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        random.setstate(python)
        np.random.set_state(numpy)
        if of_device is not None and device_state is not None:
            of_device.set_state(device_state)


def device_generator() -> torch.Generator | None:
    """Return the random generator of the accelerator in use; None if there is none."""
    device = accelerator_in_use()
    return None if device is None else device.generator


def example_mini_batch(model: "LoadedModel", batch: int, *, seed: int, step: int) -> "Batch":
    """Return the example mini-batch of a step, which depends only on the seed and the step.

    Args:
        model: Loaded model file.
        batch: Number of samples.
        seed: Seed of the run.
        step: Index of the step.
    """
    with seeded_draws(seed * 1_000_003 + step):
        return model.example_batch(batch)


def preserve_torch_generators() -> AbstractContextManager[None]:
    """Return a context manager that restores torch's random generators, of the host and of the accelerator in use."""
    # This must not initialize CUDA, because processes that are forked later could then not use it.
    device = accelerator_in_use()
    return torch.random.fork_rng(devices=[] if device is None else [device.device])


def host_generator_states() -> tuple[object, ...]:
    """Return the states of Python's and NumPy's random generators, to detect draws."""
    _, keys, *rest = cast("tuple[Any, ...]", np.random.get_state(legacy=True))
    return random.getstate(), keys.tobytes(), *rest


@lru_cache(maxsize=256)  # all micro-batches use the same result
def _of_layer(seed: int, step: int, layer: int) -> int:
    return _mix_into_seed(_mix_into_seed(_mix_into_seed(0, seed), step), layer)


def _mix_into_seed(mixed: int, part: int) -> int:
    """Mix a number into a seed with splitmix64's finalizer (Steele, Lea, Flood 2014)."""
    number = (mixed + part + 0x9E3779B97F4A7C15) & _MASK
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)
