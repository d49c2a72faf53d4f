"""Ghosts: tensors that have a shape and a device, and no values.

A ghost stands where a value is not at hand: a parameter of another stage, an output that nobody will read. What is
computed from a ghost is a ghost; a value asked of one (`.item()`, an `if`) is an error. So a mistake about what is
needed shows as a ghost where a value should be, never as a wrong number.

Inside lies a fake tensor of torch's. It is wrapped because libraries look for fake tensors, take them for a sign of
compilation, and do something else then.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

__all__ = ["Ghost", "NeedsValuesError", "ghost_like", "storage_of"]

_MODE = FakeTensorMode(allow_non_fake_inputs=True)

_GROUPED_MM = torch.ops.aten._grouped_mm.default


class NeedsValuesError(Exception):
    """An operator needs the values of a ghost, for a Python number or to know the shape of its result."""


class Ghost(Tensor):
    """A tensor without values."""

    _fake: FakeTensor | None = None

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def bare(self) -> FakeTensor:
        """The fake tensor inside; its storage tells which ghosts are views of one another."""
        if self._fake is None:
            with _MODE, torch._C.DisableTorchFunction():
                self._fake = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)  # type: ignore[assignment]
        return self._fake  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Runs an operator on what is inside."""
        ghosts: dict[int, Ghost] = {}

        def lay_bare(value: Any) -> Any:
            if isinstance(value, Ghost):
                ghosts[id(value.bare)] = value
                return value.bare
            return value

        def wrap(value: Any) -> Any:
            if not isinstance(value, FakeTensor):
                return value
            known = ghosts.get(id(value))
            return _wrapped(value) if known is None else known

        bare, options = _mapped(lay_bare, args), _mapped(lay_bare, kwargs or {})
        with _MODE, torch._C.DisableTorchFunction():
            try:
                result = _grouped_product(*bare) if func is _GROUPED_MM else func(*bare, **options)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise NeedsValuesError(f"{func} needs values") from error
            except UnsupportedOperatorException as error:
                raise NeedsValuesError(f"{func} cannot tell the shape of its result without values") from error
        return _mapped(wrap, result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """There are no values to show."""
        return f"Ghost({list(self.shape)}, {self.dtype}, {self.device})"


def ghost_like(tensor: Tensor, device: torch.device) -> Ghost:
    """A ghost of the shape and dtype of `tensor`."""
    ghost: Ghost = Tensor._make_wrapper_subclass(
        Ghost, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=device
    )
    return ghost


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """The memory that a tensor lies in; a ghost's tells which ghosts share theirs, and how large it would be."""
    return (tensor.bare if isinstance(tensor, Ghost) else tensor).untyped_storage()


def _grouped_product(left: Tensor, right: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    # torch knows the shape of the result for one dtype only, though on the CPU it computes it for others.
    product = _GROUPED_MM(left.to(torch.bfloat16), right.to(torch.bfloat16), offsets)
    return product.to(left.dtype)  # type: ignore[no-any-return]


def _wrapped(inner: FakeTensor) -> Ghost:
    ghost = ghost_like(inner, inner.device)
    ghost._fake = inner
    return ghost


def _mapped(function: Any, value: Any) -> Any:
    """`function` of every tensor in the arguments or the result of an operator."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)(_mapped(function, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    return value
