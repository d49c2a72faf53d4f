"""Recomputation that begins with the state that the first forward began with, and leaves none behind.

A layer may change state of its own as it runs: running statistics (`InstanceNorm`), the vectors of `spectral_norm`, the
codebook of a quantiser, a queue, a momentum encoder (frozen parameters), a counter. Run again in backward, it would
count a micro-batch twice, and compute with what later micro-batches left. So what a forward begins with is remembered
if it is to be recomputed; the recomputation begins with the same, and what it changes is dropped.

What a layer will write is not known before it has run, and no version tells it afterwards (`buffer.data.mul_()` makes
none). So every tensor of its state is remembered as a lazy clone, which shares the memory of the tensor until either is
written into, and takes none before. What has changed since gives way to its clone and is not written over: nothing that
another micro-batch's backward still reads changes.

Batch normalisation collects statistics of whole mini-batches (`planner.model.batch_norm`): its state does not
change in a forward.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.model.state import ABSENT, Numbers, Place, state_owners


@dataclass(slots=True)
class _Entry:
    """What lay in a place when a forward began."""

    place: Place
    value: Any
    clone: Tensor | None = None
    """Lazy; of a plain tensor."""
    version: int = 0
    """A tensor of another kind has no clone; its version tells whether it was written into."""
    is_changed: bool = False
    """By that forward."""

    @property
    def key(self) -> tuple[int, str]:
        """It tells places apart."""
        return id(self.place.holder), self.place.name

    @property
    def is_assigned_anew(self) -> bool:
        """Whether something else has taken its place."""
        return self.place.value is not self.value

    @property
    def is_written(self) -> bool:
        """Whether somebody has asked for its memory in order to write into it."""
        # A lazy clone parts from its tensor as soon as either is written into: then they lie at two addresses.
        if self.clone is None:
            return _version(self.value) != self.version
        return _address(self.value) != _address(self.clone)

    @property
    def is_different(self) -> bool:
        """Whether its values have changed."""
        # To ask for memory is not yet to change it; and comparing values takes time, so that is asked last.
        return self.is_written and (self.clone is None or not torch.equal(self.value, self.clone))

    def put(self, value: Any) -> None:
        """Has `value` in its place."""
        if value is ABSENT:
            self.place.holder.pop(self.place.name, None)
        else:
            self.place.holder[self.place.name] = value


class _Moment(NamedTuple):
    """The state at one moment."""

    entries: list[_Entry]
    numbers: list[Numbers]


class LayerState:
    """The state of some layers: buffers, frozen parameters, and plain attributes that are tensors or numbers."""

    def __init__(self, layers: Iterable[tuple[str, nn.Module]]) -> None:
        self._owners = state_owners(layers)
        self._rewritten: set[tuple[int, str]] = set()
        """Places that a forward has been seen to change: from then on nobody compares values there."""

    def replaying(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, to be called in forward and once more in backward: then with the state as it was the first time."""
        before: list[_Moment] = []

        def call(*arguments: Any) -> Any:
            # Called a second time it is the recomputation; the moment is used up, so that its clones go.
            if before:
                with self._as_at(before.pop()):
                    return run(*arguments)
            moment = self._now()
            result = run(*arguments)
            self._note_changes(moment.entries)
            before.append(moment)
            return result

        return call

    def _now(self) -> _Moment:
        entries = [_Entry(place, place.value) for owner in self._owners for place in owner.places()]
        # Clones are of one moment: buffers that share memory must share it in what is remembered, too.
        clones = _Clones()
        for entry in entries:
            if _is_plain(entry.value):
                entry.clone = clones.of(entry)
            else:
                entry.version = _version(entry.value)
        return _Moment(entries, [owner.numbers_now() for owner in self._owners])

    def _note_changes(self, entries: list[_Entry]) -> None:
        for entry in entries:
            written = entry.is_written
            entry.is_changed = written or entry.is_assigned_anew
            if not written or entry.key in self._rewritten:
                continue
            if entry.clone is None:
                raise _beyond(entry, f"is a {type(entry.value).__name__} that a forward writes into")
            if torch.equal(entry.value, entry.clone):
                # It was only read, as a kernel of one's own does it; what it has now need not be there twice.
                entry.value.data = torch._lazy_clone(entry.clone)
            else:
                self._rewritten.add(entry.key)

    @contextmanager
    def _as_at(self, moment: _Moment) -> Iterator[None]:
        """Meanwhile the state is that of `moment`, which is used up."""
        # Twice remembered: what the recomputation begins with, and what is to be there again behind it.
        now = self._now()
        buffers = [(owner.module._buffers, dict(owner.module._buffers)) for owner in self._owners]
        kept = self._begin(moment, now)
        try:
            yield
            # What the first forward left alone was not put back, so the recomputation has to leave it alone as well.
            for entry in kept:
                if entry.is_assigned_anew:
                    raise _changed(entry)
        finally:
            # Also where it failed: the error is the user's, and the state must not be that of an earlier micro-batch.
            for entry in now.entries:
                entry.put(entry.value)
            for holder, before in buffers:
                if list(holder) != list(before):
                    holder.clear()  # what was made is dropped, and the order is as it was
                    holder.update(before)
            for owner, numbers in zip(self._owners, now.numbers, strict=True):
                vars(owner.module).update(numbers)
        # Written into in place: what is there again is the same tensor, and no longer what it was.
        for entry in now.entries:
            if entry.is_different:
                raise _changed(entry)

    def _begin(self, moment: _Moment, now: _Moment) -> list[_Entry]:
        """Puts the state of `moment` in place of today's; returns what is the same."""
        present = {entry.key: entry for entry in now.entries}
        kept = []
        for entry in moment.entries:
            today = present.pop(entry.key, None)
            if today is not None and not (entry.is_changed or entry.is_assigned_anew or entry.is_written):
                kept.append(today)
                continue
            entry.put(entry.value if entry.clone is None else entry.clone)
            # Nobody else holds it, so that writing into it takes no copy.
            entry.clone = None
        # What has come about since then is taken away, so that the layer makes it as it did the first time.
        for entry in present.values():
            entry.put(ABSENT)
        moment.entries.clear()
        for owner, numbers in zip(self._owners, moment.numbers, strict=True):
            vars(owner.module).update(numbers)
        return kept


class _Clones:
    """Lazy clones of tensors; those of tensors that share memory share theirs."""

    def __init__(self) -> None:
        self._bases: dict[int, Tensor] = {}
        self._moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, entry: _Entry) -> Tensor:
        """That of its tensor; raises `ModelError` where it can have none."""
        tensor: Tensor = entry.value
        with torch.no_grad():
            try:
                return self._clone(tensor)
            except RuntimeError:  # of memory that torch has not allocated itself
                self._move(tensor)
            try:
                return self._clone(tensor)
            except RuntimeError as error:
                raise _beyond(entry, f"cannot be cloned: {error}") from error

    def _clone(self, tensor: Tensor) -> Tensor:
        key: int = tensor.untyped_storage()._cdata
        base = self._bases.get(key)
        # A lazy clone is one of the whole storage: what else lies there becomes a view of it, at its old place.
        if base is None:
            base = self._bases[key] = torch._lazy_clone(tensor)
            return base
        return _laid_out(tensor, base.untyped_storage())

    def _move(self, tensor: Tensor) -> None:
        """From memory that is not torch's own (shared, mapped, NumPy's) to some that is."""
        storage = tensor.untyped_storage()
        # The old one is held on to: its address would else be another's, and taken for this one.
        _, moved = self._moved.setdefault(storage._cdata, (storage, storage.clone()))
        tensor.data = _laid_out(tensor, moved)


def _is_plain(value: Any) -> bool:
    """Whether a lazy clone can be made of it: torch does not check, and would crash."""
    if type(value) not in (Tensor, nn.Parameter) or value.requires_grad:
        return False  # what carries a gradient is no state of its own, but something computed
    return value.layout == torch.strided and not value.is_quantized


def _laid_out(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _address(tensor: Tensor) -> int:
    """Where it lies; asking the tensor itself would count as writing into it."""
    return torch._C._data_address(tensor)  # type: ignore[attr-defined,no-any-return]


def _beyond(entry: _Entry, why: str) -> ModelError:
    return ModelError(
        f'"{entry.place.name}" of the layer "{entry.place.module}" {why}: what it was cannot be kept for recomputation',
        hint="plan with `--recompute never`",
    )


def _changed(entry: _Entry) -> ModelError:
    return ModelError(
        f'the layer "{entry.place.module}" changed its "{entry.place.name}" when it was recomputed, '
        "and not in its first forward",
        hint="what is recomputed must do the same each time: plan with `--recompute never`",
    )
