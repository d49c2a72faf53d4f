"""Build a model in which only some tensors take memory, with the same values as in the whole model.

Initial values come from a random generator that every layer advances in turn, so a rank cannot build its own layers
alone. The model is therefore built twice with fake tensors, which have a shape and no memory. The first time, the
storages that every operator reads and writes are recorded. The record shows on which operators the wanted tensors
depend (backward slice). The second time, these operators run on real tensors, and all others on fake ones. A fake
operator that draws random numbers draws them into a scratch tensor, which is released at once.

The peak memory is the sum of the wanted tensors, their operands, and the largest scratch tensor.

The meta device cannot be used instead, because `nn.init` draws no random numbers for meta tensors.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from planner.executor.run.parts import tensors_in_value
from planner.model.ghosts import storage_key
from planner.model.module_tensors import replace_tensors
from planner.model.seeding import seed_process

_UNRECORDED = (torch.ops.aten.detach.default, torch.ops.aten.alias.default, torch.ops.prim.device.default)
"""Operators that copy no values. They are not recorded, because the two builds in `build_with_values` may call them
a different number of times."""

_DRAWS_BY_SHAPE = frozenset(
    f"aten::{name}"
    for name in (
        *("uniform", "uniform_", "normal", "normal_", "random_", "bernoulli", "bernoulli_", "exponential_"),
        *("log_normal_", "cauchy_", "geometric_", "rand", "rand_like", "randn", "randn_like", "randint"),
        *("randint_like", "randperm", "native_dropout"),
    )
)
"""Random operators for which the shape of the result determines how many numbers they draw."""


class BuildError(Exception):
    """Error for a model that must be built as a whole, because its stages cannot be built alone."""


def build_with_values(
    build: Callable[[], nn.Module], wanted: Callable[[nn.Module], Iterable[Tensor]], *, seed: int
) -> nn.Module:
    """Build a model with only the wanted tensors in memory, and all other tensors on the meta device.

    The wanted tensors have the values that `seed_process(seed); build()` gives them.

    Args:
        build: Function that builds the model.
        wanted: Function that returns the tensors of a built model that must be in memory.
        seed: Seed of the initial values.

    Raises:
        BuildError: The model's construction reads values of tensors, or differs between two calls, or the number of its
            random draws depends on values.
    """
    notes = _StorageRecorder()
    seed_process(seed)  # a construction may draw layers, such as random connections
    try:
        with notes:
            model = build()
        # Only a built model shows which tensors are wanted, so take them from the fake model.
        replay = _PartialReplay(notes, notes.backward_slice(wanted(model)))
        seed_process(seed)  # again, because values may come from NumPy, as in DLRM
        with replay:
            model = build()
    except BuildError:
        raise
    # Fake tensors may lack support for an operator. An error in the user's code occurs again when the whole model is
    # built.
    except Exception as error:
        raise BuildError(f"{type(error).__name__}: {error}") from error
    # A construction that ended early, or ran other code, has not made the wanted tensors.
    if replay.number != len(notes.names) or any(_is_empty(tensor) for tensor in wanted(model)):
        raise BuildError("some tensors are made in a way that cannot be followed")
    # Writes to `.data`, views and tied parameters change the same storage.
    kept = {storage_key(tensor) for tensor in wanted(model)}
    # Compare by storage, so that ties are kept.
    replace_tensors(
        model, lambda tensor: to_meta(tensor) if _is_empty(tensor) or storage_key(tensor) not in kept else tensor
    )
    return model


def to_meta(tensor: Tensor) -> Tensor:
    """Return a meta tensor of the same shape and dtype. A parameter remains a parameter."""
    shape = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(shape, requires_grad=tensor.requires_grad)
    return shape.requires_grad_(tensor.requires_grad)


class _StorageRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.names: list[str] = []
        self._touched: list[set[int]] = []
        self._writers: dict[int, list[int]] = {}
        self._alive: list[Tensor] = []  # a storage's address identifies the storage only while it is allocated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Record only operators that both builds call in the same order.
        result = _run_on_fake(self.fake, func, args, kwargs or {})
        if func in _UNRECORDED:
            return result
        operands, results = tensors_in_value((args, kwargs)), tensors_in_value(result)
        self._alive.extend((*operands, *results))
        before, after = {storage_key(t) for t in operands}, {storage_key(t) for t in results}
        number = len(self.names)
        self.names.append(str(func))
        self._touched.append(before | after)
        for key in after - before if not _writes(func) else after | before:
            self._writers.setdefault(key, []).append(number)
        return result

    def backward_slice(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        needed: set[int] = set()
        todo = [number for tensor in tensors for number in self._writers.get(storage_key(tensor), [])]
        while todo:
            number = todo.pop()
            if number in needed:
                continue
            needed.add(number)
            # Add all earlier operators that wrote into the same storages, because in-place operators depend on them.
            for key in self._touched[number]:
                todo.extend(earlier for earlier in self._writers.get(key, []) if earlier < number)
        return frozenset(needed)


class _PartialReplay(TorchDispatchMode):
    def __init__(self, notes: _StorageRecorder, needed: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._names = notes.names
        self._needed = needed
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _UNRECORDED:
            return func(*args, **kwargs)
        number, self.number = self.number, self.number + 1
        if number >= len(self._names) or self._names[number] != str(func):
            raise BuildError(f"the model is not built the same way twice ({func})")
        if number in self._needed:  # the operands are real, because the operators that made them are needed as well
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            # The generator must advance as if the whole model were built, or later operators would draw other numbers.
            if func._schema.name not in _DRAWS_BY_SHAPE:
                raise BuildError(f"how many random numbers {func} draws depends on values")
            operands = tensors_in_value((args, kwargs))
            if any(tensor.data.device.type == "meta" for tensor in operands):
                # The user's code builds on the meta device, where no random numbers are drawn.
                return _run_on_fake(self._fake, func, args, kwargs)
            if operands and not any(map(_is_empty, operands)):
                # The operands are real, for example those of a weight-normed weight, so draw now instead of below.
                return func(*args, **kwargs)
            func(*tree_map_only(Tensor, _scratch, args), **tree_map_only(Tensor, _scratch, kwargs))
        return _run_on_fake(self._fake, func, args, kwargs)


def _run_on_fake(fake: FakeTensorMode, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    operands = tensors_in_value((args, kwargs))
    if operands and not any(map(_is_empty, operands)):
        return func(*args, **kwargs)
    with fake:
        return func(*args, **kwargs)


def _is_empty(tensor: Tensor) -> bool:
    # A parameter made of a fake tensor is fake too, but only its `data` shows it.
    return tensor.is_meta or isinstance(tensor, FakeTensor) or isinstance(tensor.data, FakeTensor)


def _writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _scratch(tensor: Tensor) -> Tensor:
    if not _is_empty(tensor):
        return tensor.clone()
    # Fill with zeros, because uninitialized values might be invalid arguments, such as a probability.
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu").zero_()
