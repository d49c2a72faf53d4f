"""Recompute layers with the state of their first forward, and restore the current state afterwards.

A layer may change state when it runs: running statistics (`InstanceNorm`), the vectors of `spectral_norm`, the codebook
of a quantizer, a queue, a momentum encoder (frozen parameters), a counter. A recomputation with the current state would
count a micro-batch twice, and read values that later micro-batches have changed. So a snapshot of the state is stored
before a forward that will be recomputed. The recomputation starts from the snapshot, and its changes are dropped.

    forward m           snapshot m = state before it; the state changes
    forward m + 1       ...
    backward m          now = state; state := snapshot m; recompute; state := now

It is not known in advance what a layer will write, and version counters do not show all writes (`buffer.data.mul_()`
changes no counter). So every tensor of the state is stored as a lazy clone, which shares the tensor's memory until the
tensor or the clone is written. A changed tensor is replaced by its clone, not overwritten, because another
micro-batch's backward may still read it.

Usually the state has not changed since the last snapshot, which is then used again. The check compares whole lists of
tensors, because a convolutional network has hundreds of them, and its micro-batches take only milliseconds.

Batch normalization is not affected: it collects statistics of whole mini-batches (`planner.model.batch_norm`), so a
forward does not change its state.
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
    """Value of one state location (a buffer, frozen parameter or attribute of a module) when a forward began."""

    location: StateLocation
    value: Any
    clone: Tensor | None = None
    """Lazy clone of a plain tensor."""
    version: int = 0
    """Version counter of a tensor that has no clone, to detect writes."""
    is_changed: bool = False
    """True if the forward that began with this value changed it."""

    @property
    def key(self) -> tuple[int, str]:
        """Key of the location: its holder and its name."""
        return id(self.location.holder), self.location.name

    @property
    def is_assigned_anew(self) -> bool:
        """True if the location now contains another object."""
        return self.location.value is not self.value

    @property
    def is_written(self) -> bool:
        """True if code has requested to write into the tensor's memory."""
        # As soon as a tensor or its lazy clone is written, torch copies the memory, and their addresses differ.
        if self.clone is None:
            return _version(self.value) != self.version
        return _address(self.value) != _address(self.clone)

    @property
    def is_different(self) -> bool:
        """True if the values of the tensor have changed."""
        # A request to write need not change the values. Comparing the values takes time, so it is done last.
        return self.is_written and (self.clone is None or not torch.equal(self.value, self.clone))

    def share_again(self) -> None:
        """Make the tensor share memory with its clone again, if a request to write did not change the values."""
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
    """Tensors and other values at all state locations. Forwards that began with equal values share one object."""

    entries: list[_Entry]
    names: list[Any]
    """Number of buffers of each module, and names of all buffers."""
    values: list[Any]
    """Values of the entries, in the order of `LayerState._values`."""
    plain: list[Tensor]
    """Tensors with clones."""
    addresses: list[int]
    """Addresses of the tensors in `plain`; a write gives a tensor another address."""
    others: list[_Entry]
    """Entries whose value has no clone."""

    @classmethod
    def of(cls, entries: list[_Entry], names: list[Any], values: list[Any]) -> "_Tensors":
        """Clone all tensors of `entries`; tensors that share memory have clones that share memory.

        Args:
            entries: Values at all locations.
            names: Number of buffers of each module, and names of all buffers.
            values: Values of the entries, in the order of `LayerState._values`.
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
        """Return True if all locations contain the same objects as before, and no tensor was written."""
        if self.names != names or len(self.values) != len(values) or not all(map(is_, self.values, values)):
            return False
        # The clone keeps the old memory, so a tensor that was written has another address.
        return list(map(_address, self.plain)) == self.addresses and not any(each.is_written for each in self.others)


class _Snapshot(NamedTuple):
    """State of some layers at one time: tensors with their clones, and numbers."""

    tensors: _Tensors
    numbers: list[Any]


class LayerState:
    """State of some layers: buffers, frozen parameters, and plain attributes that are tensors or numbers.

    Args:
        layers: Names and modules of the layers.
        only: Paths of the modules whose state is included; by default all modules.
    """

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], *, only: Collection[str] | None = None) -> None:
        self._owners = [owner for owner in state_owners(layers) if only is None or owner.path in only]
        self._modules = [owner.module for owner in self._owners]
        self._usual = [each.module for each in self._owners if not (each.elsewhere or each.tensors)]
        """Modules whose state consists of buffers and frozen parameters only; nearly all modules."""
        self._unusual = [each for each in self._owners if each.elsewhere or each.tensors]
        self._numbers = [(vars(owner.module), name) for owner in self._owners for name in owner.numbers]
        self._last: _Snapshot | None = None
        """Latest snapshot."""
        self._rewritten: set[tuple[int, str]] = set()
        """Locations that a forward has changed; their values are not compared in later forwards."""

    def release_snapshot(self) -> None:
        """Release the last snapshot. Later writes into the state then need not copy its tensors."""
        self._last = None

    def snapshot(self) -> _Snapshot:
        """Return a snapshot of the current state."""
        return self._now()

    def restore(self, snapshot: _Snapshot) -> None:
        """Set the state to that of a snapshot."""
        self._begin(snapshot, self._now())

    def with_same_state(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that is called once in forward and once in backward: both calls begin with the same state."""
        before: list[_Snapshot] = []

        def call(*arguments: Any) -> Any:
            # The second call is the recomputation. Remove the snapshot, so that its clones are released.
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
        """Return the number of buffers of each module, and the names of all buffers."""
        buffers = [module._buffers for module in self._modules]
        return [*map(len, buffers), *chain.from_iterable(buffers)]

    def _values(self) -> list[Any]:
        """Return the values at all locations; several times as fast as reading each with `StateLocation.value`."""
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
        # `now` is the state to restore after the recomputation, which begins with `snapshot`.
        now = self._now()
        buffers = [(module._buffers, list(module._buffers)) for module in self._modules]
        kept = self._begin(snapshot, now)
        # Unless another forward began with the same tensors, only the layer refers to them now, so writes copy nothing.
        del snapshot
        try:
            yield
            # `kept` has the state that the first forward did not change, so the recomputation must not change it.
            for entry in kept:
                if entry.is_assigned_anew:
                    raise _changed(entry)
        finally:
            # Also after an error in the user's code, the state of an earlier micro-batch must not remain.
            is_as_it_was = self._are_still(now.tensors)
            if not is_as_it_was:
                self._put_back(now.tensors, buffers)
            self._put_numbers(now.numbers)
        # A tensor that was written in place is still the same object, but may have other values.
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
        """Set the state to that of `snapshot`; return the entries of `now` that already had these values."""
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
            # Use a clone of the clone, because another forward may need the same snapshot.
            entry.put(entry.value if entry.clone is None else clones.of(entry, entry.clone))
        # Remove values that did not exist in the snapshot, so that the layer creates them as it did the first time.
        for entry in present.values():
            entry.put(ABSENT)
        return kept


class _Clones:
    """Lazy clones of tensors; tensors that share memory have clones that share memory."""

    def __init__(self) -> None:
        self._bases: dict[int, Tensor] = {}
        self._moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, entry: _Entry, tensor: Tensor) -> Tensor:
        """Return a lazy clone of a tensor that belongs to an entry.

        Raises:
            ModelError: The tensor cannot be cloned.
        """
        with torch.no_grad():
            try:
                return self._clone(tensor)
            except RuntimeError:  # torch has not allocated the tensor's memory
                self._move(tensor)
            try:
                return self._clone(tensor)
            except RuntimeError as error:
                raise _beyond(entry, f"cannot be cloned: {error}") from error

    def _clone(self, tensor: Tensor) -> Tensor:
        key: int = tensor.untyped_storage()._cdata
        base = self._bases.get(key)
        # A lazy clone covers the whole storage. Other tensors in this storage become views of the clone.
        if base is None:
            base = self._bases[key] = torch._lazy_clone(tensor)
            return base
        return _laid_out(tensor, base.untyped_storage())

    def _move(self, tensor: Tensor) -> None:
        """Move a tensor from memory that torch has not allocated (shared, mapped, NumPy's) to memory of torch."""
        storage = tensor.untyped_storage()
        # Keep the old storage, so that its address is not reused for another storage.
        _, moved = self._moved.setdefault(storage._cdata, (storage, storage.clone()))
        tensor.data = _laid_out(tensor, moved)


@contextmanager
def _explained_resizing() -> Iterator[None]:
    """Replace torch's error about resizing a tensor that has a lazy clone by an explanation."""
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
    """Return True if a tensor can have a lazy clone; torch does not check this, and would crash."""
    if type(value) not in (Tensor, nn.Parameter) or value.requires_grad:
        return False  # a tensor with a gradient is a computed result, not state
    return value.layout == torch.strided and not value.is_quantized


def _laid_out(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's memory without a request to write, which torch's `data_ptr` would be."""
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
        "but not in its first forward",
        hint="recomputed layers must do the same each time: plan with `--recompute never`",
    )
