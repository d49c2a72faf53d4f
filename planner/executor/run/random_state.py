"""What a step draws (dropout): from a seed of its own for every step, layer and micro-batch.

So neither cuts nor schedule nor recomputation change what is drawn, nothing need be kept to draw it again, and a model
in one piece can draw the same. Outside of steps every rank's generators go on alike: what a script shuffles with them
is shuffled alike on every rank.
"""

# ruff: noqa: NPY002 - the global generator is what a script draws from

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from planner.device.kinds import accelerator_in_use
from planner.model.seeding import layer_seed, seed_host

_NUMPY_WORDS = 624


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


class HostStates(NamedTuple):
    """Where the generators of the host are that a script may draw from."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    @classmethod
    def now(cls) -> "HostStates":
        """Where this process's generators are."""
        return cls(torch.get_rng_state(), random.getstate(), cast("tuple[Any, ...]", np.random.get_state(legacy=True)))

    @classmethod
    def seeded(cls, seed: int) -> "HostStates":
        """Where generators are that were all seeded so; the process's stay as they are."""
        before = cls.now()
        try:
            seed_host(seed)
            return cls.now()
        finally:
            before.restore()

    @classmethod
    def from_plain(cls, states: Mapping[str, Any]) -> "HostStates":
        """What `plain` was made of; raises errors of several kinds where it is something else."""
        version, internal, gauss = states["python"]
        kind, key, position, *rest = states["numpy"]
        # NumPy believes both, and reads past the end of its state.
        if kind != "MT19937" or type(position) is not int or not 0 <= position <= len(key) == _NUMPY_WORDS:
            raise ValueError("it is no state of NumPy's generator")
        numpy = (kind, np.array(key, dtype=np.uint32), position, *rest)
        return cls(states["torch"], (version, tuple(internal), gauss), numpy)

    def plain(self) -> dict[str, Any]:
        """The same of numbers, lists and a tensor alone, so that any file can hold it."""
        version, internal, gauss = self.python
        kind, key, position, has_gauss, cached = self.numpy
        numpy = [str(kind), key.tolist(), int(position), int(has_gauss), float(cached)]
        return {"torch": self.torch, "python": [version, list(internal), gauss], "numpy": numpy}

    def restore(self) -> None:
        """The process goes on from them."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class OwnStates:
    """Random states that are the process's within a block, and go on where they were in the next one."""

    def __init__(self, states: HostStates) -> None:
        self.states = states

    def __enter__(self) -> None:
        """From now on they are the process's."""
        self._before = HostStates.now()
        self.states.restore()

    def __exit__(self, *_: object) -> None:
        """The process goes on as if nothing had been drawn."""
        self.states = HostStates.now()
        self._before.restore()


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Keep the state of all generators: after the block they continue as if nothing had been drawn in it."""
    of_device = _device_generator()
    python, numpy = random.getstate(), np.random.get_state()
    # Bytes, no tensor: a stage may need less memory than 5 kB, and nothing else of a step is that of no layer.
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


def _seed_generators(seed: int) -> None:
    # Not `torch.manual_seed`, which asks every kind of device there may be: 100 us instead of 1. Python's and NumPy's
    # generators too (8 us): masks and skipped layers are drawn from them, and a recomputation must draw the same.
    seed_host(seed)
    if (of_device := _device_generator()) is not None:
        of_device.manual_seed(seed)


def _device_generator() -> torch.Generator | None:
    device = accelerator_in_use()
    return None if device is None else device.generator
