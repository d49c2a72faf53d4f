"""Seed the random draws of a step, such as dropout: one seed for every step, layer and micro-batch.

So draws do not depend on cuts, schedule or recomputation, no state is stored to repeat them, and the unpartitioned
model can draw the same. Outside of steps all ranks advance their generators alike: data that a script shuffles with
them have the same order on every rank.
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
    """Seeds of one step."""

    seed: int
    """Seed of the run."""
    step: int
    """Index of the step since the start of training."""
    first_micro_batch: int = 0
    """Number of micro-batches of the step before the first one of this part."""

    def plant(self, layer: int, micro_batch: int) -> None:
        """Seed this process's generators for `layer` in `micro_batch`."""
        _seed_generators(layer_seed(self.seed, self.step, layer, self.first_micro_batch + micro_batch))


class HostStates(NamedTuple):
    """States of the host's generators that a script may draw from."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    @classmethod
    def now(cls) -> "HostStates":
        """Return the current states of this process."""
        return cls(torch.get_rng_state(), random.getstate(), cast("tuple[Any, ...]", np.random.get_state(legacy=True)))

    @classmethod
    def seeded(cls, seed: int) -> "HostStates":
        """Return the states after seeding with `seed`; those of the process are restored."""
        before = cls.now()
        try:
            seed_host(seed)
            return cls.now()
        finally:
            before.restore()

    @classmethod
    def from_plain(cls, states: Mapping[str, Any]) -> "HostStates":
        """Return the states from the result of `plain`; raise an error of any kind if they are invalid."""
        version, internal, gauss = states["python"]
        kind, key, position, *rest = states["numpy"]
        # NumPy checks neither, and would read past the end of its state.
        if kind != "MT19937" or type(position) is not int or not 0 <= position <= len(key) == _NUMPY_WORDS:
            raise ValueError("it is not a state of NumPy's generator")
        numpy = (kind, np.array(key, dtype=np.uint32), position, *rest)
        return cls(states["torch"], (version, tuple(internal), gauss), numpy)

    def plain(self) -> dict[str, Any]:
        """Return the states as numbers, lists and a tensor, so that any file can hold them."""
        version, internal, gauss = self.python
        kind, key, position, has_gauss, cached = self.numpy
        numpy = [str(kind), key.tolist(), int(position), int(has_gauss), float(cached)]
        return {"torch": self.torch, "python": [version, list(internal), gauss], "numpy": numpy}

    def restore(self) -> None:
        """Set the process's generators to these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class OwnStates:
    """Random states that replace the process's within a block, and continue in the next block."""

    def __init__(self, states: HostStates) -> None:
        self.states = states

    def __enter__(self) -> None:
        """Set the process's generators to these states."""
        self._before = HostStates.now()
        self.states.restore()

    def __exit__(self, *_: object) -> None:
        """Store these states, and restore those of the process."""
        self.states = HostStates.now()
        self._before.restore()


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Keep the state of all generators: after the block they continue as if nothing had been drawn in it."""
    of_device = _device_generator()
    python, numpy = random.getstate(), np.random.get_state()
    # Bytes, not a tensor: 5 kB would be visible in the measured memory of a small stage.
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
    # Not `torch.manual_seed`, which visits every kind of device and takes 100 us instead of 1. Python's and NumPy's
    # generators too (8 us): masks and skipped layers are drawn from them, and a recomputation must draw the same.
    seed_host(seed)
    if (of_device := _device_generator()) is not None:
        of_device.manual_seed(seed)


def _device_generator() -> torch.Generator | None:
    device = accelerator_in_use()
    return None if device is None else device.generator
