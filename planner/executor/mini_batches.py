"""The mini-batches of a run, wherever they come from, and this process's part of each."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice, starmap
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from planner.core.errors import ModelError, UsageError
from planner.executor.job import Job
from planner.executor.run.draws import drawn_alike
from planner.executor.run.loader import Loader, checked_state
from planner.executor.run.parts import size_of
from planner.model.load import Batch, LoadedModel

__all__ = ["MiniBatches"]


class MiniBatches:
    """What a process is trained on.

    Args:
        job: What the process is to do.
        model: The model, with its example batches and perhaps its data.
    """

    def __init__(self, job: Job, model: LoadedModel) -> None:
        self._job, self._model = job, model
        self._loader: Loader | None = None
        self._loader_state: Mapping[str, Any] | None = None
        """Of a checkpoint, until there is the loader again."""

    def between(self, begin: int, end: int, loader: Iterable[Any] | None = None) -> Iterator[Batch]:
        """This rank's parts of the mini-batches of steps `begin` to `end` - 1.

        Args:
            begin: Steps that are done.
            end: Steps of the whole run.
            loader: See `Pipeline.batches`.

        Raises:
            UsageError: The loader is not the one that a resumed run had, or it is empty.
        """
        drawn: Iterator[Any]
        if loader is not None:
            drawn = islice(self._begun(loader, begin), max(0, end - begin))
        elif self._loader_state is not None:
            raise UsageError(
                "the checkpoint goes on in the middle of a loader, and `batches` is given none",
                hint="give it the same loader as before: `pipeline.batches(given.steps, loader)`",
            )
        elif self._model.train_batches is None:
            drawn = map(self.example, range(begin, end))
        else:
            drawn = islice(drawn_alike(self._epochs(), self._job.seed), begin, end)
        yield from starmap(self.own_part, drawn)  # no variable may hold a whole mini-batch through its step

    def example(self, step: int) -> Batch:
        """The example mini-batch of a step: a function of seed and step alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._job.seed * 1_000_003 + step)
            return self._model.example_batch(self._job.balance.batch)

    def own_part(self, inputs: Any, targets: Any) -> Batch:
        """What this process needs of a mini-batch that every process has: see `Pipeline.own_part`."""
        place = self._job.place
        batch = Batch(inputs, targets)
        size, replica, replicas = size_of(batch), place.replica, place.num_replicas
        if replicas > 1 and size is not None:
            if size < replicas:
                raise UsageError(
                    f"got a mini-batch of {size} samples for {replicas} replicas",
                    hint="drop the last mini-batch (`drop_last=True`), or choose a batch that fits the data",
                )
            first, end = size * replica // replicas, size * (replica + 1) // replicas
            # Copies: views would keep the other replicas' samples in memory.
            batch = Batch(*tree_map_only(Tensor, lambda t: t[first:end].clone(), tuple(batch)))
        inputs, targets = batch
        return Batch(inputs if place.is_first else _shapes(inputs), targets if place.is_last else _shapes(targets))

    def state_dict(self) -> Mapping[str, Any] | None:
        """Where the loader is, for a checkpoint; None without one."""
        return self._loader.state_dict() if self._loader is not None else self._loader_state

    def load_state_dict(self, state: Any) -> None:
        """Goes on from `state_dict`, once there is the loader."""
        self._loader_state = checked_state(state)

    # Private methods

    def _begun(self, loader: Iterable[Any], begin: int) -> Iterator[Any]:
        if self._loader is None or self._loader.loader is not loader:
            self._loader = Loader(loader, self._job.seed)
            if self._loader_state is not None:
                self._loader.load_state_dict(self._loader_state)
            elif begin:  # of a checkpoint that was written without it
                next(islice(self._loader, begin - 1, None), None)
            self._loader_state = None
        return iter(self._loader)

    def _epochs(self) -> Iterator[Any]:
        """All that `train_batches` gives, again and again."""
        assert self._model.train_batches is not None
        while True:
            is_empty = True
            for pair in self._model.train_batches(self._job.balance.batch):
                is_empty = False
                yield pair
            if is_empty:
                raise ModelError("`train_batches` is empty")


# Private functions


def _shapes(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), value)
