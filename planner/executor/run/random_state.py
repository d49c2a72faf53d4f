"""Seeds for random draws such as dropout. Each combination of step, layer and micro-batch has its own seed.

The draws do not depend on cuts, schedule or recomputation, so the unpartitioned model can draw the same numbers.
"""

# ruff: noqa: NPY002 - the global generator is what a script draws from

import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from planner.model.seeding import device_generator, keeping_random_state, layer_seed, seed_host

_NUMPY_WORDS = 624


@dataclass(frozen=True)
class StepSeeds:
    """Seeds for the random draws of one step."""

    seed: int
    """Seed of the run."""
    step: int
    """Index of the step since the start of training."""
    first_micro_batch: int = 0
    """Index of the first micro-batch in this part of the mini-batch; micro-batches are numbered over all replicas."""

    def seed_generators(self, layer: int, micro_batch: int) -> None:
        """Seed this process's random generators for a layer and a micro-batch."""
        seed = layer_seed(self.seed, self.step, layer, self.first_micro_batch + micro_batch)
        # `torch.manual_seed` would seed every kind of device, which takes 100 us instead of 1. Python's and NumPy's
        # generators are seeded, too (8 us), because models draw masks and skipped layers from them.
        seed_host(seed)
        if (of_device := device_generator()) is not None:
            of_device.manual_seed(seed)


class HostRandomStates(NamedTuple):
    """States of the random generators on the host: torch's, Python's and NumPy's."""

    torch: Tensor
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    @classmethod
    def current(cls) -> "HostRandomStates":
        """Return the current states of this process's generators."""
        return cls(torch.get_rng_state(), random.getstate(), cast("tuple[Any, ...]", np.random.get_state(legacy=True)))

    @classmethod
    def seeded(cls, seed: int) -> "HostRandomStates":
        """Return the states after seeding with `seed`. The process's generators are not changed."""
        with keeping_random_state():
            seed_host(seed)
            return cls.current()

    @classmethod
    def from_plain(cls, states: Mapping[str, Any]) -> "HostRandomStates":
        """Return the states from a result of `plain`, or raise an error if it has another form."""
        version, internal, gauss = states["python"]
        kind, key, position, *rest = states["numpy"]
        # NumPy does not check these values, and would read past the end of its state.
        if kind != "MT19937" or type(position) is not int or not 0 <= position <= len(key) == _NUMPY_WORDS:
            raise ValueError("it is not a state of NumPy's generator")
        numpy = (kind, np.array(key, dtype=np.uint32), position, *rest)
        return cls(states["torch"], (version, tuple(internal), gauss), numpy)

    def plain(self) -> dict[str, Any]:
        """Return the states as numbers, lists and a tensor, for a file."""
        version, internal, gauss = self.python
        kind, key, position, has_gauss, cached = self.numpy
        numpy = [str(kind), key.tolist(), int(position), int(has_gauss), float(cached)]
        return {"torch": self.torch, "python": [version, list(internal), gauss], "numpy": numpy}

    def restore(self) -> None:
        """Set the process's generators to these states."""
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        np.random.set_state(self.numpy)


class SeparateRandomStates:
    """Random states of the generators in `with` blocks. A block continues the random sequence of the previous block."""

    def __init__(self, states: HostRandomStates) -> None:
        self.states = states

    def __enter__(self) -> None:
        """Set the process's generators to these states."""
        self._before = HostRandomStates.current()
        self.states.restore()

    def __exit__(self, *_: object) -> None:
        """Store the generators' states for the next block, and restore the states from before this block."""
        self.states = HostRandomStates.current()
        self._before.restore()


def checksum_of_generators() -> int:
    """Return a checksum of the states of torch's generators (of host and device) and of NumPy's generator."""
    # Python's generator is left out, because background threads of libraries draw from it.
    of_device = device_generator()
    states = [torch.get_rng_state(), *([] if of_device is None else [of_device.get_state()])]
    _, key, position, *_ = cast("tuple[Any, ...]", np.random.get_state(legacy=True))
    checksum = zlib.crc32(key.tobytes(), position)
    for state in states:
        checksum = zlib.crc32(state.numpy().tobytes(), checksum)
    return checksum
