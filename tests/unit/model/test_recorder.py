"""Memory of a recorded forward, and reads that run no operator."""

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from planner.model.recorder import record
from tests.support.cutting import compare_all_ways


class Cache:
    """Key-value cache: an object that is no pytree."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Tensor]] = []
        self.pairs: tuple[Tensor, ...] = ()


class Inner(nn.Module):
    """Returns its output and a cache of tensors with a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
        cache = Cache()
        for layer in self.layers:
            x = layer(x)
            cache.layers.append({"keys": x * 2})
            cache.pairs = (*cache.pairs, x)
        return x, cache


class Outer(nn.Module):
    """Drops the cache and reads a value, so that the model is recorded on real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.inner(x)
        return y.sum() if float(y.detach().sum()) > 0 else y.mean()


def test_a_recording_does_not_keep_the_parameters_alive() -> None:
    """A recorded object holds tensors with a graph."""
    model = Outer()
    parameters = [StorageWeakRef(p.untyped_storage()) for p in model.parameters()]
    recording = record(model, torch.randn(2, 8), ghosts=False)
    del model
    gc.collect()
    assert len(recording.calls) > 2
    assert all(parameter.expired() for parameter in parameters)


class SplitByLengths(nn.Module):
    """Splits what it embeds by an input that becomes a list or an array, as models of images and text do."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.read = read

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        parts = torch.split(self.embed(x).flatten(0, 1), [int(length) for length in self.read(lengths.flatten())])
        x = torch.stack([part.mean(0) for part in parts])
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


@pytest.mark.parametrize("read", [Tensor.tolist, Tensor.numpy, np.asarray])
def test_inputs_that_become_lists_or_arrays_are_sent(read: Callable[[Tensor], Any]) -> None:
    def inputs(batch: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, 4, 8), torch.tensor([[1, 3]] * batch)

    assert compare_all_ways(SplitByLengths(read), inputs).crossing == [2, 2, 2]


class Normalizing(nn.Sequential):
    """Model with a hook that reads a buffer before the model's own call begins."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8))
        self.register_buffer("mean", torch.ones(8))
        self.register_forward_pre_hook(lambda module, args: (args[0] - module.mean,))


def test_hooks_of_the_model_may_read_its_tensors() -> None:
    recording = record(Normalizing(), (torch.ones(2, 8),), ghosts=True)
    assert recording.operators[0].model_tensors == ("mean",)


class Averaging(nn.Linear):
    """Layer that gives its buffer new memory, as the first forward of an activation normalization does."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, value: Tensor) -> Tensor:
        self.mean.data = 0.9 * self.mean + 0.1 * value.detach().mean(0)
        return super().forward(value) - self.mean


def test_a_buffer_with_new_memory_is_a_changed_buffer() -> None:
    recording = record(nn.Sequential(Averaging(), nn.Linear(8, 8)), (torch.ones(2, 8),), ghosts=False)
    assert [state.name for state in recording.states] == ["0.mean"]


class ShiftsInputs(nn.Module):
    """Shifts token ids between two towers, as a T5 that classifies tokens does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.encoder, self.decoder = (nn.ModuleList(nn.Linear(8, 8) for _ in range(2)) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        encoded = self.embed(ids)
        for block in self.encoder:
            encoded = torch.tanh(block(encoded))
        shifted = ids.new_zeros(ids.shape)
        shifted[:, 1:] = ids[:, :-1]
        decoded = self.embed(shifted) + encoded
        for block in self.decoder:
            decoded = torch.tanh(block(decoded))
        return decoded


def test_inputs_that_are_written_into_integers_are_sent() -> None:
    """No stage can mark an integer as absent, so all stages get the token ids."""
    compared = compare_all_ways(ShiftsInputs(), lambda size: torch.randint(9, (size, 5)))
    assert compared.crossing == [2] * 5
