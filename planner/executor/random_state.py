"""What a step draws (dropout): from a seed of its own for every step, layer and micro-batch.

So neither cuts nor schedule nor recomputation change what is drawn, nothing need be kept to draw it again, and a model
in one piece can draw the same. Outside of steps every rank's generators go on alike: what a script shuffles with them
is shuffled alike on every rank.
"""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch

__all__ = ["StepSeeds", "keeping_random_state", "layer_seed", "seed_process"]

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class StepSeeds:
    """The seeds of one step."""

    seed: int
    """The run's."""
    step: int
    """Counted from the start of training."""
    first_micro_batch: int = 0
    """Micro-batches of the step that are counted before the first of this run through the stages."""

    def plant(self, layer: int, micro_batch: int) -> None:
        """Makes this process draw, from now on, what `layer` draws in `micro_batch`."""
        _seed_generators(layer_seed(self.seed, self.step, layer, self.first_micro_batch + micro_batch))


def layer_seed(seed: int, step: int, layer: int, micro_batch: int) -> int:
    """What the generators are seeded with before a layer runs.

    Args:
        seed: The run's.
        step: Counted from the start of training.
        layer: Its place in the whole model's chain.
        micro_batch: Its place in the step's mini-batch.
    """
    return _next(_of_layer(seed, step, layer), micro_batch)


def seed_process(seed: int) -> None:
    """Seeds every generator that a model file or a script may draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % (1 << 32))


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Afterwards torch's generators go on as if nothing had been drawn."""
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    with torch.random.fork_rng(devices=() if device is None else (device,)):
        yield


# Private functions


@lru_cache(maxsize=256)  # asked for every micro-batch again
def _of_layer(seed: int, step: int, layer: int) -> int:
    return _next(_next(_next(0, seed), step), layer)


def _next(mixed: int, part: int) -> int:
    return _mixed(mixed + part + 0x9E3779B97F4A7C15)


def _mixed(number: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): neighbours become unlike each other."""
    number &= _MASK
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & _MASK
    return number ^ (number >> 31)


def _seed_generators(seed: int) -> None:
    # Not `torch.manual_seed`, which asks every kind of device there may be: 100 us instead of 1.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
