"""Ghosts: tensors that have a shape and a device, and no values.

A ghost stands where a value is not at hand: a parameter of another stage, an output that nobody will read. What is
computed from a ghost is a ghost; a value asked of one (`.item()`, an `if`) is an error. So a mistake about what is
needed shows as a ghost where a value should be, never as a wrong number.

Of two kinds, a ghost is either lean (its model has no values yet, and shapes are all that is asked for), or absent: it
stands, in a stage, where another stage has the value. What an absent ghost goes into is absent, too, so that nothing
which reaches an output or another stage can be made of one unseen (`expect_present`).

Inside lies a fake tensor of torch's. It is wrapped because libraries look for fake tensors, take them for a sign of
compilation, and do something else then.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch

from planner.core.errors import ModelError
from planner.model.refusals import another_path, sparse_gradients

SHAPE_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    )
)
"""Operators that read no value of the tensor that they get."""


class NeedsValuesError(Exception):
    """An operator needs the values of a ghost, for a Python number or to know the shape of its result."""


class Ghost(Tensor):
    """A tensor without values."""

    _fake: FakeTensor | None = None

    origin = ""
    """What is absent, for a message; empty for a lean ghost."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def bare(self) -> FakeTensor:
        """The fake tensor inside; its storage tells which ghosts are views of one another."""
        if self._fake is None:
            with _mode(), torch._C.DisableTorchFunction():
                self._fake = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)  # type: ignore[assignment]
        return self._fake  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs an operator on what is inside."""
        if func._schema.name in SHAPE_ONLY and isinstance(args[0], Absent):
            # What is made has values, though what it is made like has none.
            like = zeros_without_memory(args[0].shape, args[0].dtype, args[0].device)
            return func(like, *args[1:], **(kwargs or {}))
        ghosts: dict[int, Ghost] = {}
        origin = ""

        def lay_bare(value: Any) -> Any:
            nonlocal origin
            if isinstance(value, Ghost):
                ghosts[id(value.bare)] = value
                origin = origin or value.origin
                return value.bare
            # Torch asks a tensor that it makes a fake one of for its gradient, and warns where there can be none.
            return value.detach() if value.requires_grad else value

        def wrap(value: Any) -> Any:
            if not isinstance(value, FakeTensor):
                return value
            ghost = ghosts.get(id(value))
            return _wrapped(value, origin) if ghost is None else ghost

        bare, options = _mapped(lay_bare, args), _mapped(lay_bare, kwargs or {})
        if origin:
            _poison_written(func, bare, options, origin)
        with _mode(), torch._C.DisableTorchFunction():
            try:
                is_grouped = func._schema.name == "aten::_grouped_mm"
                result = _grouped_product(func, *bare) if is_grouped else func(*bare, **options)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise NeedsValuesError(f"{func} needs values") from error
            except UnsupportedOperatorException as error:
                raise NeedsValuesError(f"{func} cannot tell the shape of its result without values") from error
        if torch.Tag.inplace_view in func.tags:
            # `x.transpose_(0, 1)`, with which torch ends a batch-first GRU: the ghost itself has another shape now.
            with no_dispatch():
                func(*args, **(kwargs or {}))
        return _mapped(wrap, result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """There are no values to show."""
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.device})"


class Absent(Ghost):
    """A ghost of what another stage has."""


def absent(like: Tensor, device: torch.device, origin: str) -> Absent:
    """An absent ghost.

    Args:
        like: Has its shape, strides and dtype.
        device: Where it seems to be.
        origin: What it stands for: the name of a parameter, or of the module that returned it.
    """
    ghost: Absent = Tensor._make_wrapper_subclass(
        Absent, like.shape, strides=like.stride(), dtype=like.dtype, device=device
    )
    ghost.origin = origin
    return ghost


def expect_present(tensors: Iterable[Any], where: str) -> None:
    """Makes sure that no absent ghost went into any of `tensors`.

    Raises:
        ModelError: One did.
    """
    for tensor in tensors:
        if isinstance(tensor, Absent):
            raise another_path(f'{where} depends on "{tensor.origin}", which another stage has')


def ghost_like(tensor: Tensor, device: torch.device) -> Ghost:
    """A ghost of the shape and dtype of `tensor`."""
    ghost: Ghost = Tensor._make_wrapper_subclass(
        Ghost, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=device
    )
    return ghost


def drop_computed(value: Any) -> Any:
    """Return `value` with a ghost in place of every tensor that has a graph, in objects and containers that it holds.

    Objects, lists and dicts are changed in place. The graph of a tensor holds the parameters that it was computed from.
    """
    return _without_computed(value, set())


def _without_computed(value: Any, seen: set[int]) -> Any:
    if isinstance(value, Tensor):
        has_graph = value.grad_fn is not None and not isinstance(value, Ghost)
        return ghost_like(value, value.device) if has_graph else value
    if id(value) in seen or isinstance(value, nn.Module | type | ModuleType | FunctionType):
        return value
    seen.add(id(value))
    if type(value) is tuple:
        return tuple(_without_computed(item, seen) for item in value)
    if isinstance(value, list):
        value[:] = [_without_computed(item, seen) for item in value]
    for holder in (value, getattr(value, "__dict__", None)):
        if isinstance(holder, dict):
            holder.update({key: _without_computed(item, seen) for key, item in holder.items()})
    return value


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The memory that a tensor lies in; a ghost's tells which ghosts share theirs, and how large it would be."""
    if not isinstance(tensor, Ghost):
        return tensor.untyped_storage()
    if tensor.bare.is_sparse:
        raise sparse_gradients("a layer")
    return tensor.bare.untyped_storage()


def zeros_without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of any shape that take no more memory than one; nothing can be written into them."""
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def storage_key(tensor: Tensor) -> int:
    """What tells a tensor's storage from all others that there are at the same time."""
    key: int = storage_of(tensor)._cdata
    return key


def memory_key(tensor: Tensor) -> tuple[object, ...]:
    """Return what is equal for tensors that cover the same memory in the same order; see `storage_key`."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


@cache
def _mode() -> FakeTensorMode:
    # For it torch imports its compiler, which takes a second: who makes no ghosts need not wait.
    return FakeTensorMode(allow_non_fake_inputs=True)


def _grouped_product(func: Any, left: Tensor, right: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    # torch knows the shape of the result for one dtype only, though on the CPU it computes it for others.
    product: Tensor = func(left.to(torch.bfloat16), right.to(torch.bfloat16), offsets)
    return product.to(left.dtype)


def _wrapped(inner: FakeTensor, origin: str) -> Ghost:
    ghost = absent(inner, inner.device, origin) if origin else ghost_like(inner, inner.device)
    ghost._fake = inner
    return ghost


def _poison_written(func: Any, args: Any, kwargs: dict[str, Any], origin: str) -> None:
    """Makes numbers that an absent ghost is written over into none: the tensor itself cannot become a ghost."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        target = args[position] if position < len(args) else kwargs.get(argument.name)
        for tensor in target if isinstance(target, tuple | list) else [target]:
            if not isinstance(tensor, Tensor) or isinstance(tensor, FakeTensor):
                continue
            if not tensor.is_floating_point():
                raise ModelError(
                    f'the model writes "{origin}", which another stage has, into a tensor of {tensor.dtype} ({func})',
                    hint="make a new tensor of it (`torch.cat`, `torch.where`) instead of writing into one",
                )
            with torch.no_grad():
                tensor.fill_(torch.nan)


def _mapped(function: Any, value: Any) -> Any:
    """`function` of every tensor in the arguments or the result of an operator."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)(_mapped(function, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    return value
