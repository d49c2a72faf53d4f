"""Ghosts: tensors that have a shape and a device, and no values.

A ghost replaces a tensor that is not available: a parameter of another stage, or an output that no stage computes. The
result of an operator on a ghost is a ghost. Code that reads the values of a ghost (`.item()`, an `if`) raises an error.
So if a stage lacks a tensor by mistake, its results are ghosts, never wrong numbers.

A lean ghost replaces a tensor if only its shape is needed. An absent ghost replaces, in a stage, a tensor that another
stage has. Results computed from an absent ghost are absent ghosts, too, so that `check_present` finds them.

A ghost contains one of torch's fake tensors. The model does not get the fake tensor itself, because libraries take fake
tensors for a sign of compilation and then run other code.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from planner.core.errors import ModelError
from planner.model.nests import tensors_in
from planner.model.operators import written_tensors
from planner.model.refusals import control_flow_error, sparse_gradient_error

SHAPE_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    )
)
"""Operators that read the shape of their argument, but none of its values."""


_is_updating = ContextVar("_is_updating", default=False)
"""True inside `refuse_other_stages_tensors`."""


class NeedsValuesError(Exception):
    """Error that an operator needs the values of a ghost (a tensor without values)."""


class Ghost(Tensor):
    """Tensor with a shape, a dtype and a device, but no values."""

    _fake: FakeTensor | None = None

    origin = ""
    """Name of the replaced tensor, which another stage has, for error messages; empty if only a shape is needed."""

    _viewed: "Ghost | None" = None
    """Ghost of which this ghost is a view; None if it is no view or already has a fake tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def fake_tensor(self) -> FakeTensor:
        """Torch's fake tensor with this tensor's shape and dtype. Fake tensors of views share a storage."""
        if self._fake is None:
            # Other modes must not see this operator: a recorder would note the tensor as made by the model's code.
            with _disable_current_modes(), _mode(), torch._C.DisableTorchFunction(), _without_tracing():
                if self._viewed is None:
                    fake = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
                else:
                    fake = self._viewed.fake_tensor.as_strided(self.shape, self.stride(), self.storage_offset())
                    self._viewed = None
            self._fake = fake  # type: ignore[assignment]
        return self._fake  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Determine the shape and dtype of an operator's result, without computing values."""
        if func._schema.name in SHAPE_ONLY and isinstance(args[0], AbsentGhost):
            # The result has values, although the tensor whose shape it copies has none.
            like = zeros_without_memory(args[0].shape, args[0].dtype, args[0].device)
            return func(like, *args[1:], **(kwargs or {}))
        key = _call_key(func, args, kwargs)
        known = None if key is None else _known_results.get(key)
        if known is not None:
            origin = next((t.origin for t in tensors_in((args, kwargs)) if isinstance(t, Ghost) and t.origin), "")
            return _result_like(known, args[0] if func.is_view else None, origin)
        result = cls._result_of_fake(func, args, kwargs)
        if key is not None:
            _remember_result(key, args, result)
        return result

    @classmethod
    def _result_of_fake(cls, func: Any, args: Any, kwargs: Any) -> Any:
        ghosts: dict[int, Ghost] = {}
        origin = ""

        def lay_bare(value: Any) -> Any:
            nonlocal origin
            if isinstance(value, Ghost):
                ghosts[id(value.fake_tensor)] = value
                origin = origin or value.origin
                return value.fake_tensor
            # When torch converts a tensor to a fake one, it reads `.grad`, and warns if the tensor is not a leaf.
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
                raise _needs_values(func, origin) from error
            except UnsupportedOperatorException as error:
                raise NeedsValuesError(f"{func} cannot tell the shape of its result without values") from error
        if torch.Tag.inplace_view in func.tags:
            # `x.transpose_(0, 1)`, which torch's batch-first GRU calls, changes the shape of the ghost itself.
            with no_dispatch():
                func(*args, **(kwargs or {}))
        return _mapped(wrap, result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return shape, dtype and device as text."""
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.device})"


@contextmanager
def _without_tracing() -> Iterator[None]:
    """Pause `torch.jit.trace` in the `with` block, so that ghosts can be created.

    Tracing turns the sizes of tensors into tensors. With such sizes, `torch.empty` may raise an error, after which the
    next trace crashes the process.
    """
    state: Any = torch._C._get_tracing_state()
    if state is None:
        yield
        return
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]


class _KnownTensor(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    strides: tuple[int, ...]
    offset: int


class _KnownResult(NamedTuple):
    """Tensors that an operator returns: one tensor, or a tuple or list (`kind`)."""

    tensors: tuple[_KnownTensor, ...]
    kind: type


_known_results: dict[Any, _KnownResult] = {}
"""Results of operators, by operator and by the shapes of its arguments.

In each forward, a stage repeats the model's own code between the calls of modules in earlier stages. Without this
cache, torch's fake tensors take 0.1 ms for each operator of this code."""

_MOST_RESULTS = 20_000
"""Number of known results at which all are forgotten, because shapes may differ in every step."""

_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


@cache
def _depends_on_shapes(func: Any) -> bool:
    """Return True if the shapes of the arguments determine those of the results, and no argument is written into."""
    tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    schema = func._schema
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    are_tensors = all(str(value.type) in ("Tensor", "List[Tensor]") for value in schema.returns)
    return are_tensors and not writes and not tags.intersection(func.tags)


def _call_key(func: Any, args: Any, kwargs: Any) -> Any:
    """Return a key that determines the shapes of an operator's results; None if there is no such key."""
    is_tracing = torch._C._get_tracing_state() is not None  # sizes are then tensors
    if is_tracing or _is_updating.get() or not _depends_on_shapes(func):
        return None
    try:
        return func, torch.get_default_dtype(), _value_key(args), _value_key(kwargs)
    except TypeError:
        return None


def _value_key(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TypeError
        place = value.stride(), value.storage_offset()
        return isinstance(value, Ghost), value.shape, place, value.dtype, value.device
    if isinstance(value, tuple | list):
        return tuple(map(_value_key, value))
    if isinstance(value, dict):
        return tuple((name, _value_key(item)) for name, item in value.items())
    if not isinstance(value, _CONSTANTS):
        raise TypeError
    return type(value), value


def _remember_result(key: Any, args: Any, result: Any) -> None:
    tensors = (result,) if isinstance(result, Tensor) else result
    if not all(isinstance(tensor, Ghost) and tensor.layout == torch.strided for tensor in tensors):
        return
    if key[0].is_view and not all(_is_plain_view(tensor, args[0]) for tensor in tensors):
        return
    if len(_known_results) >= _MOST_RESULTS:
        _known_results.clear()
    known = (_KnownTensor(t.shape, t.dtype, t.device, t.stride(), int(t.storage_offset())) for t in tensors)
    _known_results[key] = _KnownResult(tuple(known), type(result))


def _is_plain_view(view: Tensor, viewed: Any) -> bool:
    """Return True if `view` is a part of the storage of the ghost `viewed`, read with the same dtype."""
    return isinstance(viewed, Ghost) and view.dtype == viewed.dtype and storage_key(view) == storage_key(viewed)


def _result_like(known: _KnownResult, viewed: Ghost | None, origin: str) -> Any:
    results = []
    for shape, dtype, device, strides, offset in known.tensors:
        ghost = ghost_of_shape(shape, dtype, device, origin=origin, strides=strides, offset=offset)
        ghost._viewed = viewed
        results.append(ghost)
    return known.kind(results) if known.kind in (tuple, list) else results[0]


class AbsentGhost(Ghost):
    """Tensor without values, in place of a tensor that only another stage has."""


def check_present(tensors: Iterable[Any], where: str) -> None:
    """Raise a `ModelError` if a tensor has no values, because it depends on a tensor that only another stage has.

    `where` names the tensors in the message. Values that are no tensors are ignored.
    """
    for tensor in tensors:
        if isinstance(tensor, AbsentGhost):
            raise control_flow_error(f'{where} depends on "{tensor.origin}", which another stage has')


@contextmanager
def refuse_other_stages_tensors(parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Raise a `ModelError` if an optimizer's step in the `with` block uses tensors that only another stage has."""
    token = _is_updating.set(True)
    try:
        yield
    finally:
        _is_updating.reset(token)
    for name, parameter in parameters.items():
        # `parameter.data = ghost` leaves a parameter whose memory does not exist; a read of it would end the process.
        if parameter.numel() and not parameter.is_meta and parameter.data_ptr() == 0:
            raise _update_error(f'replaces "{name}" by a tensor that another stage has')


def _update_error(what: str) -> ModelError:
    return ModelError(
        f"`step()` of the optimizer, or a hook on it, {what}",
        hint="let `step()` update each parameter by its own gradient and state; update a moving average of a weight in "
        "the `forward` of one module that has both the weight and its average",
    )


def ghost_like(tensor: Tensor, device: torch.device, origin: str = "", *, offset: int = 0) -> Ghost:
    """Return a ghost (tensor without values) with the shape, strides and dtype of `tensor`.

    Args:
        tensor: Tensor to imitate.
        device: Device that the ghost reports.
        origin: Name of the tensor of another stage that the ghost replaces; empty if only a shape is needed.
        offset: Offset of the ghost in its storage.
    """
    with _without_tracing():
        return ghost_of_shape(tensor.shape, tensor.dtype, device, origin=origin, strides=tensor.stride(), offset=offset)


def ghost_of_shape(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    origin: str,
    strides: Sequence[int] | None = None,
    offset: int | None = None,
) -> Ghost:
    """Return a ghost (tensor without values). No operator runs, so modes that watch operators do not see this call.

    Args:
        shape: Shape of the ghost.
        dtype: Dtype of the ghost.
        device: Device that the ghost reports.
        origin: Name of the tensor of another stage that the ghost replaces; empty if only a shape is needed.
        strides: Strides of the ghost; None for a contiguous tensor.
        offset: Offset of the ghost in its storage; only with `strides`.
    """
    kind = AbsentGhost if origin else Ghost
    ghost: Ghost = Tensor._make_wrapper_subclass(
        kind, shape, strides=strides, storage_offset=offset, dtype=dtype, device=device
    )
    ghost.origin = origin
    return ghost


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a tensor, also of a tensor without values (`Ghost`). Views share a storage."""
    if not isinstance(tensor, Ghost):
        return tensor.untyped_storage()
    if tensor.fake_tensor.is_sparse:
        raise sparse_gradient_error("a layer")
    return tensor.fake_tensor.untyped_storage()


def zeros_without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return read-only zeros of any shape in the memory of one number.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        device: Device of the tensor.
    """
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage while the storage exists."""
    key: int = storage_of(tensor)._cdata
    return key


def memory_key(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors with the same storage, offset, shape and strides."""
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


@cache
def _mode() -> FakeTensorMode:
    # The mode is made on first use, because torch then imports its compiler, which takes a second.
    return FakeTensorMode(allow_non_fake_inputs=True)


def _grouped_product(func: Any, left: Tensor, right: Tensor, offsets: Tensor, *_: Any) -> Tensor:
    # Torch derives the result's shape only for bfloat16, although it computes the operator for other dtypes on the CPU.
    product: Tensor = func(left.to(torch.bfloat16), right.to(torch.bfloat16), offsets)
    return product.to(left.dtype)


def _needs_values(func: Any, origin: str) -> Exception:
    if not origin:
        return NeedsValuesError(f"{func} needs values")
    return ModelError(
        f'code between modules, which later stages run as well, reads values of "{origin}" ({func})',
        hint="move this code into a module, together with all code that uses its result",
    )


def _wrapped(inner: FakeTensor, origin: str) -> Ghost:
    # The recorder tells views of one storage, such as the results of `chunk`, apart by their offsets.
    ghost = ghost_like(inner, inner.device, origin, offset=int(inner.storage_offset()))
    ghost._fake = inner
    return ghost


def _poison_written(func: Any, args: Any, kwargs: dict[str, Any], origin: str) -> None:
    # An ordinary tensor cannot become a ghost. So NaN marks the values that this stage lacks.
    real = (tensor for tensor in tensors_in((args, kwargs)) if not isinstance(tensor, FakeTensor))
    if _is_updating.get() and any(tensor.ndim > 0 for tensor in real):
        raise _update_error(f'computes with "{origin}", which another stage has')
    for tensor in written_tensors(func, args, kwargs):
        if isinstance(tensor, FakeTensor):
            continue
        if not tensor.is_floating_point():
            raise ModelError(
                f'the model writes "{origin}", which another stage has, into a tensor of {tensor.dtype} ({func})',
                hint="make a new tensor of it (`torch.cat`, `torch.where`) instead of writing into one",
            )
        with torch.no_grad():
            tensor.fill_(torch.nan)


def _mapped(function: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)(_mapped(function, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    return value
