"""Memory of a recorded forward."""

import gc

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from planner.model.recorder import record


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
