"""Recomputation that begins with the state that the first forward began with, and leaves none behind.

A layer may change state of its own as it runs: running statistics (`InstanceNorm`), the vectors of `spectral_norm`, the
codebook of a quantiser, a queue, a momentum encoder (frozen parameters), a counter. Run again in backward, it would
count a micro-batch twice, and compute with what later micro-batches left. So what a forward begins with is remembered
if it is to be recomputed; the recomputation begins with the same, and what it changes is dropped.

What a layer will write is not known before it has run, and no version tells it afterwards (`buffer.data.mul_()` makes
none). So every tensor of its state is remembered as a lazy clone, which shares the memory of the tensor until either is
written into, and takes none before. What has changed since gives way to its clone and is not written over: nothing that
another micro-batch's backward still reads changes.

Nearly always nothing has changed since a forward was last about to begin: then what was remembered there serves again.
That is found out a list at a time: a convolutional net has hundreds of places, and a micro-batch of it milliseconds.

Batch normalisation collects statistics of whole mini-batches (`planner.model.batch_norm`): its state does not
change in a forward.
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
from planner.model.state import ABSENT, NUMBERS, Place, state_owners


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

    def share_again(self) -> None:
        """Its tensor was only read, as a kernel of one's own does it: what it has now need not be there twice."""
        assert self.clone is not None
        self.value.data = torch._lazy_clone(self.clone)

    def put(self, value: Any) -> None:
        """Has `value` in its place."""
        if value is ABSENT:
            self.place.holder.pop(self.place.name, None)
        else:
            self.place.holder[self.place.name] = value


@dataclass(frozen=True)
class _Tensors:
    """What lay in all places at one moment: shared by all forwards that began with the same."""

    entries: list[_Entry]
    names: list[Any]
    """The names of all buffers, and how many each module has."""
    values: list[Any]
    """What the entries hold, in an order of its own."""
    plain: list[Tensor]
    """Tensors of which there are clones."""
    addresses: list[int]
    """Where the tensors in `plain` lie until somebody writes into them."""
    others: list[_Entry]

    @classmethod
    def of(cls, entries: list[_Entry], names: list[Any], values: list[Any]) -> "_Tensors":
        """With clones that are of one moment: buffers that share memory must share it in what is remembered, too."""
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
        """Whether the same lies in the same places, and nobody has written into any of it."""
        if self.names != names or len(self.values) != len(values) or not all(map(is_, self.values, values)):
            return False
        # A clone holds on to its memory: what has been written into since cannot lie where it lay.
        return list(map(_address, self.plain)) == self.addresses and not any(each.is_written for each in self.others)


class _Moment(NamedTuple):
    """The state at one moment."""

    tensors: _Tensors
    numbers: list[Any]


class LayerState:
    """The state of some layers: buffers, frozen parameters, and plain attributes that are tensors or numbers.

    Args:
        layers: The layers, by name.
        only: Paths of the modules whose state counts; by default all.
    """

    def __init__(self, layers: Iterable[tuple[str, nn.Module]], *, only: Collection[str] | None = None) -> None:
        self._owners = [owner for owner in state_owners(layers) if only is None or owner.path in only]
        self._modules = [owner.module for owner in self._owners]
        self._usual = [each.module for each in self._owners if not (each.elsewhere or each.tensors)]
        """Modules whose buffers and frozen parameters all are state, and nothing else: nearly all."""
        self._unusual = [each for each in self._owners if each.elsewhere or each.tensors]
        self._numbers = [(vars(owner.module), name) for owner in self._owners for name in owner.numbers]
        self._last: _Moment | None = None
        """The latest that was remembered."""
        self._rewritten: set[tuple[int, str]] = set()
        """Places that a forward has been seen to change: from then on nobody compares values there."""

    def forget(self) -> None:
        """Lets go of what is remembered and waits for no recomputation, so that whoever writes next copies nothing."""
        self._last = None

    def moment(self) -> _Moment:
        """Remember the state as it is now."""
        return self._now()

    def return_to(self, moment: _Moment) -> None:
        """Make the state what it was at a moment."""
        self._begin(moment, self._now())

    def replaying(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, to be called in forward and once more in backward: then with the state as it was the first time."""
        before: list[_Moment] = []

        def call(*arguments: Any) -> Any:
            # Called a second time it is the recomputation; the moment is used up, so that its clones go.
            if before:
                with self._as_at(before.pop()):
                    return run(*arguments)
            moment = self._now()
            with _resizing_told():
                result = run(*arguments)
            self._note_changes(moment.tensors)
            before.append(moment)
            return result

        return call

    def _now(self) -> _Moment:
        last = self._last
        tensors = last.tensors if last is not None and self._are_still(last.tensors) else self._remembered()
        numbers: list[Any] = [holder.get(name) for holder, name in self._numbers]
        if last is not None and all(map(is_, numbers, last.numbers)):
            numbers = last.numbers
        else:
            numbers = [value if type(value) in NUMBERS else ABSENT for value in numbers]
        self._last = _Moment(tensors, numbers)
        return self._last

    def _remembered(self) -> _Tensors:
        entries = [_Entry(place, place.value) for owner in self._owners for place in owner.places()]
        return _Tensors.of(entries, self._names(), self._values())

    def _are_still(self, tensors: _Tensors) -> bool:
        return tensors.are_still(self._names(), self._values())

    def _names(self) -> list[Any]:
        """The names of all buffers, and how many each module has."""
        buffers = [module._buffers for module in self._modules]
        return [*map(len, buffers), *chain.from_iterable(buffers)]

    def _values(self) -> list[Any]:
        """What lies in all places; without a `Place` for each, which takes several times as long."""
        buffers = filter(None, [module._buffers for module in self._usual])
        parameters = filter(None, [module._parameters for module in self._usual])
        return [
            *chain.from_iterable(map(dict.values, buffers)),
            *[each for held in parameters for each in held.values() if each is not None and not each.requires_grad],
            *[place.value for owner in self._unusual for place in owner.places()],
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
    def _as_at(self, moment: _Moment) -> Iterator[None]:
        """Meanwhile the state is that of `moment`, which is used up."""
        # Twice remembered: what the recomputation begins with, and what is to be there again behind it.
        now = self._now()
        buffers = [(module._buffers, list(module._buffers)) for module in self._modules]
        kept = self._begin(moment, now)
        # Nobody else holds what was put, unless another forward began with it, so that writing into it takes no copy.
        del moment
        try:
            yield
            # What the first forward left alone was not put back, so the recomputation has to leave it alone as well.
            for entry in kept:
                if entry.is_assigned_anew:
                    raise _changed(entry)
        finally:
            # Also where it failed: the error is the user's, and the state must not be that of an earlier micro-batch.
            is_as_it_was = self._are_still(now.tensors)
            if not is_as_it_was:
                self._put_back(now.tensors, buffers)
            self._put_numbers(now.numbers)
        # Written into in place: what is there again is the same tensor, and no longer what it was.
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
                # What was made is dropped, and the order is as it was.
                present = dict(holder)
                holder.clear()
                holder.update((name, present[name]) for name in names if name in present)

    def _put_numbers(self, numbers: list[Any]) -> None:
        for (holder, name), number in zip(self._numbers, numbers, strict=True):
            if number is not ABSENT:
                holder[name] = number

    def _begin(self, moment: _Moment, now: _Moment) -> list[_Entry]:
        """Puts the state of `moment` in place of today's; returns what is the same."""
        if moment.numbers is not now.numbers:
            self._put_numbers(moment.numbers)
        if moment.tensors is now.tensors:
            return now.tensors.entries
        present = {entry.key: entry for entry in now.tensors.entries}
        kept, clones = [], _Clones()
        for entry in moment.tensors.entries:
            today = present.pop(entry.key, None)
            if today is not None and not (entry.is_changed or entry.is_assigned_anew or entry.is_written):
                kept.append(today)
                continue
            # Clones of the clones: these may be another forward's beginning, too.
            entry.put(entry.value if entry.clone is None else clones.of(entry, entry.clone))
        # What has come about since then is taken away, so that the layer makes it as it did the first time.
        for entry in present.values():
            entry.put(ABSENT)
        return kept


class _Clones:
    """Lazy clones of tensors; those of tensors that share memory share theirs."""

    def __init__(self) -> None:
        self._bases: dict[int, Tensor] = {}
        self._moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def of(self, entry: _Entry, tensor: Tensor) -> Tensor:
        """The clone of a tensor of an entry; raises `ModelError` where it can have none."""
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


@contextmanager
def _resizing_told() -> Iterator[None]:
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
            "a layer resizes one of its buffers in `forward`, as quantization-aware training does: what the buffer was "
            "cannot be kept for recomputation",
            hint="plan with `--recompute never`",
        ) from error


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
