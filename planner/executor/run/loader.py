"""Draw batches in the same order on every rank and in every run, and continue a user's loader after a resume.

A loader shuffles with the process's random states, which every stage advances differently. The first stage's inputs
would therefore not belong to the last stage's targets, and a resumed run would continue in another order. To avoid
this, data are drawn with separate states of torch's, Python's and NumPy's generators.

A loader that has a `state_dict`, such as torchdata's `StatefulDataLoader`, continues from its state. With any other
loader, the epoch is repeated from the random states at its start, and its earlier batches are loaded and skipped.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from itertools import chain, islice
from typing import Any

import torch

from planner.core.errors import ModelError, UsageError
from planner.executor.run.placement import ProcessPlace
from planner.executor.run.random_state import HostRandomStates, SeparateRandomStates
from planner.model.load import LoadedModel

_SAME_LOADERS = (
    "after a resume, pass all loaders again in the same order, each with its own last step "
    "(`pipeline.batches(last_step, loader)`); or pass a loader that can be iterated again, such as a `DataLoader`"
)

_SAMPLERS = ("", "sampler", "batch_sampler", "batch_sampler.sampler")


def seeded_batches(batches: Iterable[Any], seed: int) -> Iterator[Any]:
    """Yield the items of `batches`, drawn with separate random generators that start at `seed`.

    The iteration of `batches` must not have begun.
    """
    states = SeparateRandomStates(HostRandomStates.seeded(seed))
    source = chain.from_iterable([batches])  # lazily, since `iter` of a loader draws, too
    end = object()  # not None, which `batches` may yield by mistake

    def drawn() -> Any:
        with states:
            return next(source, end)

    # No variable may hold a batch while it is used.
    yield from iter(drawn, end)


def repeat_train_batches(model: LoadedModel, batch: int) -> Iterator[Any]:
    """Yield mini-batches `(inputs, targets)` of the model's `train_batches`, epoch after epoch without end.

    Raises:
        ModelError: `train_batches` yields no mini-batch.
    """
    assert model.train_batches is not None
    while True:
        is_empty = True
        for pair in model.train_batches(batch):
            is_empty = False
            yield pair
        if is_empty:
            raise ModelError("`train_batches` is empty")


class ResumableLoader:
    """User's data loader, repeated for each epoch. Its position can be saved in a checkpoint.

    The loader is a `DataLoader` or any iterable of `(inputs, targets)`, the same on every rank. It draws from separate
    random states, which start at `seed`. A loader that can be iterated only once is not repeated.

    Args:
        loader: User's loader.
        seed: Seed of the random states.
        number: Number of loaders of the run so far, with this one.
    """

    def __init__(self, loader: Iterable[Any], seed: int, *, number: int = 1) -> None:
        self.loader: Any = loader
        self._number_of_loader = number
        self._states = SeparateRandomStates(HostRandomStates.seeded(seed))
        self._epoch = self._batch = 0
        self._begun: dict[str, Any] = {}
        """Random states at the start of the epoch."""
        self._resumed: Mapping[str, Any] | None = None
        self._batches = self._run()

    def __iter__(self) -> Iterator[Any]:
        """Return the only iterator of this loader, which continues where it stopped."""
        return self._batches

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data for a checkpoint. Call this method between two batches."""
        return {
            "number": self._number_of_loader,
            "epoch": self._epoch,
            "batch": self._batch,
            "length": _length(self.loader),
            "begun": self._begun,
            "now": self._generator_states(),
            "loader": self.loader.state_dict() if self._begun and _is_stateful(self.loader) else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position that `state_dict` returned. Call this method before the first batch is drawn.

        Raises:
            UsageError: The user's loader differs from the one in the checkpoint. Or this loader can be iterated only
                once, and the checkpoint was saved when the run used a later loader.
        """
        if not state["begun"]:  # nothing was drawn yet
            return
        length = _length(self.loader)
        if (state["loader"] is not None) != _is_stateful(self.loader) or (state["batch"] and state["length"] != length):
            raise UsageError(
                f"the loader differs from the checkpoint's: it is {_title(self.loader, length)}, but the checkpoint's "
                f"has {'a' if state['loader'] is not None else 'no'} state and {state['length']} batches",
                hint="pass the same loader to `batches` as before, or start a new run (`--weights`)",
            )
        number = state.get("number", self._number_of_loader)
        if number > self._number_of_loader and state["loader"] is None and isinstance(self.loader, Iterator):
            raise UsageError(
                f"the checkpoint was written when the run used its loader {number}, but the resumed run passes "
                f"{_title(self.loader, length)} as loader {self._number_of_loader}",
                hint=_SAME_LOADERS,
            )
        self._resumed = state

    def begin_after(self, state: Mapping[str, Any]) -> None:
        """Continue the random states and the count of epochs of another loader, whose `state_dict` is `state`.

        Call this method before the first batch is drawn.
        """
        self._epoch = state["epoch"] + 1
        self._states.states = HostRandomStates.from_plain(state["now"]["host"])

    def _run(self) -> Iterator[Any]:
        while True:
            resumed = self._resumed
            iterator = self._epoch_iterator()
            while following := self._next_batch(iterator):
                # No variable may hold a whole mini-batch through its step.
                yield following.pop()
            is_once = iterator is self.loader  # it cannot be iterated again
            if resumed is not None and self._batch < resumed["batch"] + is_once:
                raise UsageError(
                    f"{_title(self.loader, _length(self.loader))} has no batch after the {resumed['batch']} batches "
                    "that the run used before it was resumed",
                    hint=_SAME_LOADERS,
                )
            if is_once:
                return
            if not self._batch and resumed is None:
                raise UsageError(
                    f"{_title(self.loader, _length(self.loader))} returned no batch",
                    hint="with `drop_last=True` there must be at least one whole mini-batch",
                )
            self._epoch, self._batch = self._epoch + 1, 0

    def _next_batch(self, iterator: Iterator[Any]) -> list[Any]:
        """Return a list with the next batch. The list is empty at the end of the epoch."""
        with self._states:
            following = list(islice(iterator, 1))
        self._batch += len(following)
        return following

    def _generator_states(self) -> dict[str, Any]:
        generators = {name: generator.get_state() for name, generator in _generators(self.loader).items()}
        return {"host": self._states.states.plain(), "generators": generators}

    def _draw_from(self, states: Mapping[str, Any]) -> None:
        self._states.states = HostRandomStates.from_plain(states["host"])
        restore_generators(self.loader, states)

    def _epoch_iterator(self) -> Iterator[Any]:
        """Return an iterator over an epoch; after a resume, over the rest of the interrupted epoch."""
        state, self._resumed = self._resumed, None
        if state is None:
            self._begun = self._generator_states()
            return self._iterator()
        self._epoch, self._begun = state["epoch"], dict(state["begun"])
        if state["loader"] is not None:
            self.loader.load_state_dict(state["loader"])
            iterator = self._iterator()
            # In an uninterrupted run, starting the iterator drew random numbers at the beginning of the epoch.
            self._draw_from(state["now"])
            self._batch = state["batch"]
            return iterator
        self._draw_from(state["begun"])
        iterator = self._iterator()
        for _ in range(state["batch"]):
            if not self._next_batch(iterator):
                break
        return iterator

    def _iterator(self) -> Iterator[Any]:
        for path, part in _loader_and_samplers(self.loader):
            if path and hasattr(part, "set_epoch"):  # a sampler, also one inside a batch sampler
                part.set_epoch(self._epoch)
        with self._states:
            return iter(self.loader)


def does_sampler_split_data(loader: Any, place: ProcessPlace) -> bool:
    """Return True if the loader's sampler gives each replica its own part of the data.

    Raises:
        UsageError: A sampler splits the data over ranks that are not replicas, or not in the order of the replicas.
    """
    split = next(filter(None, (_sampler_split(part) for _, part in _loader_and_samplers(loader))), None)
    if split is None:
        return False
    number, rank = split
    if (number, rank) == (place.num_replicas, place.replica):
        return True
    given = f"the loader's sampler gives rank {place.rank} part {rank} of {number} of the data"
    if place.num_replicas == 1:
        raise UsageError(
            f"{given}, but the ranks are stages of one pipeline: inputs and targets would belong to different samples",
            hint="use `shuffle=True` instead of the sampler, so that every rank reads the same mini-batches",
        )
    raise UsageError(
        f"{given}, but it belongs to replica {place.replica} of {place.num_replicas}",
        hint="pass the replica to the sampler: `DistributedSampler(data, num_replicas=pipeline.place.num_replicas, "
        "rank=pipeline.place.replica)`; or leave the sampler out, and each replica takes its part of every mini-batch",
    )


def _sampler_split(sampler: Any) -> tuple[int, int] | None:
    """Return (number of parts, index of this rank's part) of a sampler; None if it does not split the data."""
    number, rank = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
    return (number, rank) if isinstance(number, int) and isinstance(rank, int) and number > 1 else None


def check_loader_state(state: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return `state`, or raise an error if it does not have the form of a `ResumableLoader.state_dict()`."""
    if state is None:
        return None
    numbers = state["epoch"], state["batch"], state.get("number", 1)  # older checkpoints have no `number`
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("a position in an epoch that is not a number")
    state["loader"], state["length"]
    for drawn in (state["begun"], state["now"]) if state["begun"] else (state["now"],):
        HostRandomStates.from_plain(drawn["host"])
        if not all(isinstance(held, torch.Tensor) for held in drawn["generators"].values()):
            raise TypeError("a generator's state that is not a tensor")
    return state


def restore_generators(loader: Iterable[Any], states: Mapping[str, Any]) -> None:
    """Restore a loader's generators from the entry `begun` (start of the epoch) or `now` of a saved position."""
    for name, generator in _generators(loader).items():
        if name in states["generators"]:
            generator.set_state(states["generators"][name])


def _is_stateful(loader: Any) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # the length of an iterable is unknown
        return None


def _title(loader: Any, length: int | None) -> str:
    return f"a {type(loader).__name__}" + (f" of {length} batches" if length is not None else "")


def _loader_and_samplers(loader: Any) -> Iterator[tuple[str, Any]]:
    for path in _SAMPLERS:
        yield path, reduce(lambda part, name: getattr(part, name, None), filter(None, path.split(".")), loader)


def _generators(loader: Any) -> dict[str, torch.Generator]:
    held: dict[str, torch.Generator] = {}
    for path, part in _loader_and_samplers(loader):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not other for other in held.values()):
            held[path] = generator
    return held
