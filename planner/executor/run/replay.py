"""Recompute layers with the state of their first forward, and restore the current state afterwards.

A layer may change state when it runs: buffers such as running statistics (`InstanceNorm`) or a codebook, frozen
parameters such as those of a momentum encoder, and counters. A recomputation with the current state would count a
micro-batch twice, and read values that later micro-batches have changed. A snapshot of the state is therefore stored
before a forward that will be recomputed. The recomputation starts from the snapshot, and its changes are dropped.

    forward m           snapshot m = state before it; the state changes
    forward m + 1       ...
    backward m          now = state; state := snapshot m; recompute; state := now

It is not known in advance what a layer will write, and version counters do not show all writes (`buffer.data.mul_()`
changes no counter). Every tensor of the state is therefore stored as a copy-on-write clone, which shares the memory of
the tensor until one of the two is written. A changed tensor is replaced by its clone, not overwritten, because another
micro-batch's backward may still read it.

If the state has not changed since the last snapshot, that snapshot is used again. This is the usual case, because a
forward does not change the state of batch normalization (`planner.model.batch_norm`).
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
from planner.model.nests import ABSENT
from planner.model.python_state import HOOKS, NUMBERS
from planner.model.state import StateLocation, stateful_modules


@dataclass(slots=True)
class _Entry:
    """One value of the state when a forward began: a buffer, a frozen parameter or an attribute of a module."""

    location: StateLocation
    value: Any
    clone: Tensor | None = None
    """Copy-on-write clone of the value; None if torch cannot make one."""
    version: int = 0
    """Autograd's version counter of the value, to detect writes; read only if `clone` is None."""
    is_changed: bool = False
    """True if the forward that began with this value changed it."""

    @property
    def key(self) -> tuple[int, str]:
        return id(self.location.holder), self.location.name

    @property
    def is_replaced(self) -> bool:
        return self.location.value is not self.value

    @property
    def is_written(self) -> bool:
        # As soon as a tensor or its lazy clone is written, torch copies the memory, and their addresses differ.
        if self.clone is None:
            return _version(self.value) != self.version
        return _address(self.value) != _address(self.clone)

    @property
    def is_different(self) -> bool:
        # A request to write need not change the values. Comparing the values takes time, so it is done last.
        return self.is_written and (self.clone is None or not torch.equal(self.value, self.clone))

    def share_again(self) -> None:
        assert self.clone is not None
        self.value.data = torch._lazy_clone(self.clone)

    def store(self, value: Any) -> None:
        if value is ABSENT:
            self.location.holder.pop(self.location.name, None)
        else:
            self.location.holder[self.location.name] = value


@dataclass(frozen=True)
class _StateTensors:
    """Tensors of the state before a forward: buffers, frozen parameters and tensors in attributes."""

    entries: list[_Entry]
    names: list[Any]
    """Number of buffers of each module, then the names of all buffers, to detect added and renamed buffers."""
    values: list[Any]
    """Tensors of the state, to detect replaced tensors."""
    cloned: list[Tensor]
    """State tensors of which a copy-on-write clone is stored."""
    addresses: list[int]
    """Memory addresses of `cloned`. A write moves the tensor to another address; its clone stays at the old address."""
    others: list[_Entry]
    """Entries that have no copy-on-write clone."""

    @classmethod
    def of(cls, entries: list[_Entry], names: list[Any], values: list[Any]) -> "_StateTensors":
        clones = _Clones()
        for entry in entries:
            if _supports_lazy_clone(entry.value):
                entry.clone = clones.of(entry, entry.value)
            else:
                entry.version = _version(entry.value)
        cloned = [entry.value for entry in entries if entry.clone is not None]
        others = [entry for entry in entries if entry.clone is None]
        return cls(entries, names, values, cloned, list(map(_address, cloned)), others)

    def are_still(self, names: list[Any], values: list[Any]) -> bool:
        if self.names != names or len(self.values) != len(values) or not all(map(is_, self.values, values)):
            return False
        # Compare whole lists, because a convolutional network has hundreds of tensors, and its micro-batches take only
        # milliseconds.
        return list(map(_address, self.cloned)) == self.addresses and not any(each.is_written for each in self.others)


class _Snapshot(NamedTuple):
    tensors: _StateTensors
    numbers: list[Any]
    structure: list[Any]
    """Number of hooks of each module, class of each submodule, and `id()` of each trained parameter."""
    versions: list[int]
    """Autograd's version counters of trained parameters."""


class LayerState:
    """State of some layers: buffers, frozen parameters, and plain attributes that are tensors or numbers.

    With `only`, the state includes only modules at these paths.
    """

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], *, only: Collection[str] | None = None) -> None:
        self._owners = [owner for owner in stateful_modules(layers) if only is None or owner.path in only]
        self._modules = [owner.module for owner in self._owners]
        self._usual = [each.module for each in self._owners if not (each.in_other_layers or each.tensors)]
        """Modules without tensors in plain attributes and without tensors of other layers; nearly all modules."""
        self._unusual = [each for each in self._owners if each.in_other_layers or each.tensors]
        self._numbers = [(vars(owner.module), name) for owner in self._owners for name in owner.numbers]
        self._hooks = [getattr(module, name) for module in self._modules for name in HOOKS]
        self._submodules = [module._modules for module in self._modules]
        self._parameters = [module._parameters for module in self._modules]
        self._last: _Snapshot | None = None
        self._rewritten: set[tuple[int, str]] = set()
        """Keys of the entries that a forward has changed. Later forwards do not compare their values."""
        self._writes_parameters: bool | None = None
        """True if the first recomputable forward wrote into trained parameters; None before that forward.

        If it did, later forwards may write into them as well, because the equivalence check has compared these layers.
        """

    def release_snapshot(self) -> None:
        """Release the last snapshot."""
        self._last = None

    def snapshot(self) -> _Snapshot:
        """Return a snapshot of the current state."""
        last = self._last
        if last is not None and self._are_still(last.tensors):
            tensors = last.tensors
        else:
            entries = [_Entry(location, location.value) for owner in self._owners for location in owner.locations()]
            tensors = _StateTensors.of(entries, self._names(), self._values())
        numbers: list[Any] = [holder.get(name) for holder, name in self._numbers]
        if last is not None and all(map(is_, numbers, last.numbers)):
            numbers = last.numbers
        else:
            numbers = [value if type(value) in NUMBERS else ABSENT for value in numbers]
        trained = self._trained()
        versions = [parameter._version for parameter in trained]
        self._last = _Snapshot(tensors, numbers, self._structure(trained), versions)
        return self._last

    def restore(self, snapshot: _Snapshot) -> None:
        """Set the state to that of a snapshot."""
        self._set_state(snapshot, self.snapshot())

    def with_same_state(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `run` whose second call, the recomputation, begins in the state of the first call."""
        before: list[_Snapshot] = []

        def call(*arguments: Any) -> Any:
            # The second call is the recomputation. Remove the snapshot, so that its clones are released.
            if before:
                with self._in_state_of(before.pop()):
                    return run(*arguments)
            snapshot = self.snapshot()
            with _explained_resizing():
                result = run(*arguments)
            self._note_changes(snapshot.tensors)
            if self._writes_parameters is None:
                self._writes_parameters = [each._version for each in self._trained()] != snapshot.versions
            before.append(snapshot)
            return result

        return call

    def _are_still(self, tensors: _StateTensors) -> bool:
        return tensors.are_still(self._names(), self._values())

    def _names(self) -> list[Any]:
        buffers = [module._buffers for module in self._modules]
        return [*map(len, buffers), *chain.from_iterable(buffers)]

    def _trained(self) -> list[nn.Parameter]:
        # Frozen parameters are state, which a forward may replace.
        parameters = chain.from_iterable(map(dict.values, self._parameters))
        return [each for each in parameters if each is not None and each.requires_grad]

    def _structure(self, trained: list[nn.Parameter]) -> list[Any]:
        submodules = chain.from_iterable(map(dict.values, self._submodules))
        return [*map(len, filter(None, self._hooks)), *map(type, submodules), *map(id, trained)]

    def _values(self) -> list[Any]:
        # Reading each value with `StateLocation.value` takes several times as long.
        buffers = filter(None, [module._buffers for module in self._usual])
        parameters = filter(None, [module._parameters for module in self._usual])
        return [
            *chain.from_iterable(map(dict.values, buffers)),
            *[each for held in parameters for each in held.values() if each is not None and not each.requires_grad],
            *[location.value for owner in self._unusual for location in owner.locations()],
        ]

    def _note_changes(self, tensors: _StateTensors) -> None:
        if self._are_still(tensors):
            return
        for entry in tensors.entries:
            written = entry.is_written
            entry.is_changed = written or entry.is_replaced
            if not written or entry.key in self._rewritten:
                continue
            if entry.clone is None:
                raise _no_snapshot_error(entry, f"is a {type(entry.value).__name__} that a forward writes into")
            if torch.equal(entry.value, entry.clone):
                entry.share_again()
            else:
                self._rewritten.add(entry.key)

    @contextmanager
    def _in_state_of(self, snapshot: _Snapshot) -> Iterator[None]:
        # `now` is the state to restore after the recomputation, which begins with `snapshot`.
        now = self.snapshot()
        is_written = now.versions != snapshot.versions and not self._writes_parameters
        if is_written or now.structure != snapshot.structure:
            is_same = now.structure == snapshot.structure
            what = "written into trained" if is_same else "changed a module's hooks, submodules or trained"
            raise ModelError(
                f"`forward` has {what} parameters: earlier micro-batches used the old ones, so they cannot be "
                "recomputed",
                hint="plan with `--recompute never`",
            )
        buffers = [(module._buffers, list(module._buffers)) for module in self._modules]
        kept = self._set_state(snapshot, now)
        # Unless another forward began with the same tensors, only the layer refers to them now, so writes copy nothing.
        del snapshot
        try:
            yield
            # `kept` has the state that the first forward did not change, so the recomputation must not change it.
            for entry in kept:
                if entry.is_replaced:
                    raise _changed_error(entry)
        finally:
            # Also after an error in the user's code, the state of an earlier micro-batch must not remain.
            is_as_it_was = self._are_still(now.tensors)
            if not is_as_it_was:
                self._put_back(now.tensors, buffers)
            self._put_numbers(now.numbers)
        # A tensor that was written in place is still the same object, but may have other values.
        for entry in () if is_as_it_was else now.tensors.entries:
            if entry.is_different:
                raise _changed_error(entry)
            if entry.is_written:
                entry.share_again()

    def _put_back(self, tensors: _StateTensors, buffers: list[tuple[dict[str, Any], list[str]]]) -> None:
        for entry in tensors.entries:
            entry.store(entry.value)
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

    def _set_state(self, snapshot: _Snapshot, now: _Snapshot) -> list[_Entry]:
        """Change the state from `now` to `snapshot`, and return the entries of `now` that are equal in both."""
        if snapshot.numbers is not now.numbers:
            self._put_numbers(snapshot.numbers)
        if snapshot.tensors is now.tensors:
            return now.tensors.entries
        present = {entry.key: entry for entry in now.tensors.entries}
        kept, clones = [], _Clones()
        for entry in snapshot.tensors.entries:
            today = present.pop(entry.key, None)
            if today is not None and not (entry.is_changed or entry.is_replaced or entry.is_written):
                kept.append(today)
                continue
            # Use a clone of the clone, because another forward may need the same snapshot.
            entry.store(entry.value if entry.clone is None else clones.of(entry, entry.clone))
        # Remove values that did not exist in the snapshot, so that the layer creates them as it did the first time.
        for entry in present.values():
            entry.store(ABSENT)
        return kept


class _Clones:
    """Copy-on-write clones of tensors."""

    def __init__(self) -> None:
        self._bases: dict[int, Tensor] = {}
        self._moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, entry: _Entry, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            try:
                return self._clone(tensor)
            except RuntimeError:  # torch has not allocated the tensor's memory
                self._move(tensor)
            try:
                return self._clone(tensor)
            except RuntimeError as error:
                raise _no_snapshot_error(entry, f"cannot be cloned: {error}") from error

    def _clone(self, tensor: Tensor) -> Tensor:
        key: int = tensor.untyped_storage()._cdata
        base = self._bases.get(key)
        # A lazy clone covers the whole storage. Other tensors in this storage become views of the clone.
        if base is None:
            base = self._bases[key] = torch._lazy_clone(tensor)
            return base
        return _laid_out(tensor, base.untyped_storage())

    def _move(self, tensor: Tensor) -> None:
        # Only memory that torch has allocated can have lazy clones.
        storage = tensor.untyped_storage()
        # Keep the old storage, so that its address is not reused for another storage.
        _, moved = self._moved.setdefault(storage._cdata, (storage, storage.clone()))
        tensor.data = _laid_out(tensor, moved)


@contextmanager
def _explained_resizing() -> Iterator[None]:
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


def _supports_lazy_clone(value: Any) -> bool:
    # torch does not check this, and would crash.
    if type(value) not in (Tensor, nn.Parameter) or value.requires_grad:
        return False  # a tensor with a gradient is a computed result, not state
    return value.layout == torch.strided and not value.is_quantized


def _laid_out(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    return tensor.new_empty(0).set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def _version(value: Any) -> int:
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0


def _address(tensor: Tensor) -> int:
    # `data_ptr` would count as a write, so torch would copy the memory of a lazy clone.
    return torch._C._data_address(tensor)  # type: ignore[attr-defined,no-any-return]


def _no_snapshot_error(entry: _Entry, why: str) -> ModelError:
    name, layer = entry.location.name, entry.location.module
    return ModelError(
        f'"{name}" of the layer "{layer}" {why}: its earlier content cannot be kept for recomputation',
        hint="plan with `--recompute never`",
    )


def _changed_error(entry: _Entry) -> ModelError:
    return ModelError(
        f'the layer "{entry.location.module}" changed its "{entry.location.name}" when it was recomputed, '
        "but not in its first forward",
        hint="recomputed layers must do the same each time: plan with `--recompute never`",
    )
