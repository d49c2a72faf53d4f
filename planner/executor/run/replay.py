"""Recompute layers with the state of their first forward, and restore the current state afterwards.

A layer may change state as it runs: running statistics (`InstanceNorm`), the vectors of `spectral_norm`, the codebook
of a quantizer, a queue, a momentum encoder (frozen parameters), a counter. If it ran again in backward with the current
state, it would count a micro-batch twice, and use values that later micro-batches left. So the state before a forward
that will be recomputed is stored. The recomputation starts with it, and its changes are dropped.

    forward m           snapshot m = state before it; the state changes
    forward m + 1       ...
    backward m          now = state; state := snapshot m; recompute; state := now

It is not known in advance what a layer will write, and version counters do not show all writes (`buffer.data.mul_()`
changes none). So every tensor of its state is stored as a lazy clone, which shares the tensor's memory until either is
written. A changed tensor is replaced by its clone and not overwritten, so that nothing changes that another
micro-batch's backward still reads.

Nearly always nothing has changed since the last snapshot: then that is used again. The comparison handles whole lists
at a time, because a convolutional net has hundreds of tensors, and its micro-batches take only milliseconds.

Batch normalization collects statistics of whole mini-batches (`planner.model.batch_norm`): its state does not change in
a forward.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.model.python_state import NUMBERS
from planner.model.state import ABSENT, StateLocation, state_owners


@dataclass(slots=True)
class _Entry:
    """Value at one location when a forward began."""

    location: StateLocation
    value: Any
    clone: Tensor | None = None
    """Lazy clone of a plain tensor."""
    version: int = 0
    """Version counter of a tensor that has no clone, to detect writes."""
    is_changed: bool = False
    """True if that forward changed it."""

    @property
    def key(self) -> tuple[int, str]:
        """Key of the location."""
        return id(self.location.holder), self.location.name

    @property
    def is_assigned_anew(self) -> bool:
        """True if the location now has another tensor or value."""
        return self.location.value is not self.value

    @property
    def is_written(self) -> bool:
        """True if code has requested the tensor's memory for writing."""
        # A lazy clone is copied as soon as it or its tensor is written: then they have two addresses.
        if self.clone is None:
            return _version(self.value) != self.version
        return _address(self.value) != _address(self.clone)

    @property
    def is_different(self) -> bool:
        """Return True if the values of the tensor have changed."""
        # A request to write need not change the values. Comparing these takes time, so it comes last.
        return self.is_written and (self.clone is None or not torch.equal(self.value, self.clone))

    def share_again(self) -> None:
        """Share memory with the clone again, after a custom kernel that only read the tensor."""
        assert self.clone is not None
        self.value.data = torch._lazy_clone(self.clone)

    def put(self, value: Any) -> None:
        """Store `value` at the location."""
        if value is ABSENT:
            self.location.holder.pop(self.location.name, None)
        else:
            self.location.holder[self.location.name] = value


@dataclass(frozen=True)
class _Tensors:
    """Values at all locations at one time, shared by all forwards that began with the same values."""

    entries: list[_Entry]
    names: list[Any]
    """Names of all buffers, and their number in each module."""
    values: list[Any]
    """Values of the entries, in another order."""
    plain: list[Tensor]
    """Tensors with clones."""
    addresses: list[int]
    """Addresses of the tensors in `plain`; a write gives a tensor another address."""
    others: list[_Entry]

    @classmethod
    def of(cls, entries: list[_Entry], names: list[Any], values: list[Any]) -> "_Tensors":
        """Return a snapshot with clones; buffers that share memory share it in the clones, too.

        Args:
            entries: Values at all locations.
            names: Names of all buffers, and their number in each module.
            values: Values of the entries, in another order.
        """
        clones = _Clones()
        for entry in entries:
            if _is_plain(entry.value):
                entry.clone = clones.of(entry, entry.value)
            else:
                entry.version = _version(entry.value)
        plain = [entry.value for entry in entries if entry.clone is not None]
        others = [entry for entry in entries if entry.clone is None]
        return cls(entries, names, values, plain, list(map(_address, plain)), others)

    def are_still(self, names: list[Any], values: list[Any]) -> bool:
        """Return True if the same values are at the same locations, and none was written."""
        if self.names != names or len(self.values) != len(values) or not all(map(is_, self.values, values)):
            return False
        # A clone keeps its memory, so a tensor that was written since has another address.
        return list(map(_address, self.plain)) == self.addresses and not any(each.is_written for each in self.others)


class _Snapshot(NamedTuple):
    """State at one time."""

    tensors: _Tensors
    numbers: list[Any]


class LayerState:
    """State of some layers: buffers, frozen parameters, and plain attributes that are tensors or numbers.

    Args:
        layers: The layers, by name.
        only: Paths of the modules whose state counts; by default all.
    """

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], *, only: Collection[str] | None = None) -> None:
        self._owners = [owner for owner in state_owners(layers) if only is None or owner.path in only]
        self._modules = [owner.module for owner in self._owners]
        self._usual = [each.module for each in self._owners if not (each.elsewhere or each.tensors)]
        """Modules whose state is exactly their buffers and frozen parameters: nearly all."""
        self._unusual = [each for each in self._owners if each.elsewhere or each.tensors]
        self._numbers = [(vars(owner.module), name) for owner in self._owners for name in owner.numbers]
        self._last: _Snapshot | None = None
        """Latest snapshot."""
        self._rewritten: set[tuple[int, str]] = set()
        """Locations that a forward was seen to change: their values are not compared again."""

    def forget(self) -> None:
        """Release the last snapshot before code writes into the state, so that the write copies nothing."""
        self._last = None

    def snapshot(self) -> _Snapshot:
        """Return a snapshot of the current state."""
        return self._now()

    def restore(self, snapshot: _Snapshot) -> None:
        """Set the state to that of a snapshot."""
        self._begin(snapshot, self._now())

    def replaying(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `run` for one call in forward and one in backward, so that both begin with the same state."""
        before: list[_Snapshot] = []

        def call(*arguments: Any) -> Any:
            # The second call is the recomputation; its snapshot is removed, so that its clones are released.
            if before:
                with self._restored(before.pop()):
                    return run(*arguments)
            snapshot = self._now()
            with _explained_resizing():
                result = run(*arguments)
            self._note_changes(snapshot.tensors)
            before.append(snapshot)
            return result

        return call

    def _now(self) -> _Snapshot:
        last = self._last
        tensors = last.tensors if last is not None and self._are_still(last.tensors) else self._remembered()
        numbers: list[Any] = [holder.get(name) for holder, name in self._numbers]
        if last is not None and all(map(is_, numbers, last.numbers)):
            numbers = last.numbers
        else:
            numbers = [value if type(value) in NUMBERS else ABSENT for value in numbers]
        self._last = _Snapshot(tensors, numbers)
        return self._last

    def _remembered(self) -> _Tensors:
        entries = [_Entry(location, location.value) for owner in self._owners for location in owner.locations()]
        return _Tensors.of(entries, self._names(), self._values())

    def _are_still(self, tensors: _Tensors) -> bool:
        return tensors.are_still(self._names(), self._values())

    def _names(self) -> list[Any]:
        """Return the names of all buffers, and their number in each module."""
        buffers = [module._buffers for module in self._modules]
        return [*map(len, buffers), *chain.from_iterable(buffers)]

    def _values(self) -> list[Any]:
        """Return the values at all locations; several times as fast as through a location object for each."""
        buffers = filter(None, [module._buffers for module in self._usual])
        parameters = filter(None, [module._parameters for module in self._usual])
        return [
            *chain.from_iterable(map(dict.values, buffers)),
            *[each for held in parameters for each in held.values() if each is not None and not each.requires_grad],
            *[location.value for owner in self._unusual for location in owner.locations()],
        ]

    def _note_changes(self, tensors: _Tensors) -> None:
        if self._are_still(tensors):
            return
        for entry in tensors.entries:
            written = entry.is_written
            entry.is_changed = written or entry.is_assigned_anew
            if not written or entry.key in self._rewritten:
                continue
            if entry.clone is None:
                raise _beyond(entry, f"is a {type(entry.value).__name__} that a forward writes into")
            if torch.equal(entry.value, entry.clone):
                entry.share_again()
            else:
                self._rewritten.add(entry.key)

    @contextmanager
    def _restored(self, snapshot: _Snapshot) -> Iterator[None]:
        """Set the state to that of `snapshot` inside the block, and release `snapshot`."""
        # Two states are involved: the one the recomputation begins with, and the one to restore after it.
        now = self._now()
        buffers = [(module._buffers, list(module._buffers)) for module in self._modules]
        kept = self._begin(snapshot, now)
        # Only the layer refers to these tensors now, unless another forward began with them: a write copies nothing.
        del snapshot
        try:
            yield
            # State that the first forward did not change was not replaced, so the recomputation must not change it.
            for entry in kept:
                if entry.is_assigned_anew:
                    raise _changed(entry)
        finally:
            # Also after an error of the user's: the state must not remain that of an earlier micro-batch.
            is_as_it_was = self._are_still(now.tensors)
            if not is_as_it_was:
                self._put_back(now.tensors, buffers)
            self._put_numbers(now.numbers)
        # Written in place: the restored tensor is the same object with other values.
        for entry in () if is_as_it_was else now.tensors.entries:
            if entry.is_different:
                raise _changed(entry)
            if entry.is_written:
                entry.share_again()

    def _put_back(self, tensors: _Tensors, buffers: list[tuple[dict[str, Any], list[str]]]) -> None:
        for entry in tensors.entries:
            entry.put(entry.value)
        for holder, names in buffers:
            if list(holder) != names:
                # Drop new buffers and restore the order.
                present = dict(holder)
                holder.clear()
                holder.update((name, present[name]) for name in names if name in present)

    def _put_numbers(self, numbers: list[Any]) -> None:
        for (holder, name), number in zip(self._numbers, numbers, strict=True):
            if number is not ABSENT:
                holder[name] = number

    def _begin(self, snapshot: _Snapshot, now: _Snapshot) -> list[_Entry]:
        """Set the state to that of `snapshot`; return the entries that are unchanged."""
        if snapshot.numbers is not now.numbers:
            self._put_numbers(snapshot.numbers)
        if snapshot.tensors is now.tensors:
            return now.tensors.entries
        present = {entry.key: entry for entry in now.tensors.entries}
        kept, clones = [], _Clones()
        for entry in snapshot.tensors.entries:
            today = present.pop(entry.key, None)
            if today is not None and not (entry.is_changed or entry.is_assigned_anew or entry.is_written):
                kept.append(today)
                continue
            # Clones of the clones: another forward may have the same snapshot.
            entry.put(entry.value if entry.clone is None else clones.of(entry, entry.clone))
        # Values that are new since then are removed, so that the layer makes them as it did the first time.
        for entry in present.values():
            entry.put(ABSENT)
        return kept


class _Clones:
    """Lazy clones of tensors; clones of tensors that share memory share theirs."""

    def __init__(self) -> None:
        self._bases: dict[int, Tensor] = {}
        self._moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, entry: _Entry, tensor: Tensor) -> Tensor:
        """Return the clone of a tensor of an entry.

        Raises:
            ModelError: It cannot be cloned.
        """
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
        # A lazy clone covers the whole storage: other tensors in it become views of the clone at the same offset.
        if base is None:
            base = self._bases[key] = torch._lazy_clone(tensor)
            return base
        return _laid_out(tensor, base.untyped_storage())

    def _move(self, tensor: Tensor) -> None:
        """Move a tensor from memory that torch has not allocated (shared, mapped, NumPy's) to memory of torch's."""
        storage = tensor.untyped_storage()
        # The old storage is kept, so that its address is not reused for another one.
        _, moved = self._moved.setdefault(storage._cdata, (storage, storage.clone()))
        tensor.data = _laid_out(tensor, moved)


@contextmanager
def _explained_resizing() -> Iterator[None]:
    """Explain torch's error about a tensor with a lazy clone that is given more memory.

    Raises:
        ModelError: There was such an error.
    """
    try:
        yield
    except RuntimeError as error:
        if "COW.cpp" not in str(error):
            raise
        raise ModelError(
            "a layer resizes one of its buffers in `forward`, as quantization-aware training does: its earlier "
            "content cannot be kept for recomputation",
            hint="plan with `--recompute never`",
        ) from error


def _is_plain(value: Any) -> bool:
    """Return True if a lazy clone of the tensor is safe: torch does not check, and would crash."""
    if type(value) not in (Tensor, nn.Parameter) or value.requires_grad:
        return False  # a tensor with a gradient is a computed result, not state
    return value.layout == torch.strided and not value.is_quantized


def _laid_out(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _address(tensor: Tensor) -> int:
    """Return the address of the tensor's memory; torch's `data_ptr` would count as a request to write."""
    return torch._C._data_address(tensor)  # type: ignore[attr-defined,no-any-return]


def _beyond(entry: _Entry, why: str) -> ModelError:
    name, layer = entry.location.name, entry.location.module
    return ModelError(
        f'"{name}" of the layer "{layer}" {why}: its earlier content cannot be kept for recomputation',
        hint="plan with `--recompute never`",
    )


def _changed(entry: _Entry) -> ModelError:
    return ModelError(
        f'the layer "{entry.location.module}" changed its "{entry.location.name}" when it was recomputed, '
        "and not in its first forward",
        hint="recomputed layers must do the same each time: plan with `--recompute never`",
    )
