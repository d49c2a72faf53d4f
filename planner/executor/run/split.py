"""A stage's backward in two parts: I, the gradient of its input, and W, the gradients of its weights, put off.

    forward           under `SplitBackward.splitting`: linear layers, convolutions and embeddings keep what they would
    backward_input    I: all of the backward but the gradients of their weights; (x, dy) stays of each of them
    backward_weight   W: these gradients, added to the parameters as autograd adds them

I is autograd's own backward, so that everything else in it is done once and let go of: what is recomputed, other
parameters, hooks, streams. W makes a graph of its own that leads straight to the parameters.

What W takes, a function mode sees as it is called: by a module or not. What it cannot see (compiled code, a weight that
is computed from others) or should not touch (a parameter with hooks) stays whole, in I. Backwards that a model runs by
itself within its forward, for the sake of some gradient, are whole as well, and may be differentiated again.

Putting off the gradients of weights: Qi et al. 2024, arXiv:2401.10241.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from planner.executor.run.put_off import BINDINGS, Operator, Use
from planner.executor.run.replicas import ReplicaGradients

__all__ = ["PutOff", "SplitBackward"]


@dataclass(slots=True, kw_only=True)
class _Product:
    """What the gradients of one use of a weight are computed from."""

    operator: Operator
    x: Tensor
    gradient: Tensor
    """Of what the operator made."""
    weight: Tensor
    """The parameter, or autocast's copy of it."""
    bias: Tensor | None
    versions: tuple[int, int]
    """Of `x` and `gradient`: whether somebody has written into them since."""

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Those of weight and bias.

        Raises:
            RuntimeError: What they are computed from is no longer what it was, as autograd says it.
        """
        if (self.x._version, self.gradient._version) != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation "
                f"between the backward of the input and that of the weights: a {type(self.operator).__name__} of "
                f"shape {list(self.weight.shape)} needs what it had in forward"
            )
        return self.operator.weight_gradients(self.gradient, self.x, self.weight, self.bias)


PutOff = list[_Product]
"""What a micro-batch keeps on a stage between I and W."""


class SplitBackward:
    """The backward of one stage, in two parts."""

    def __init__(self) -> None:
        self.collected: PutOff | None = None
        """What is put off by the I that runs now; None where none does."""
        self._casts: dict[nn.Parameter, Tensor] | None = None
        self._mode = _Seeing(self)

    @contextmanager
    def keeping_casts(self) -> Iterator[None]:
        """Meanwhile autocast's copies of weights that are put off are kept, as torch keeps those of the others."""
        self._casts = {}
        try:
            yield
        finally:
            self._casts = None

    def splitting(self) -> AbstractContextManager[Any]:
        """What a forward runs in whose backward will be run in two parts."""
        return self._mode

    def backward_input(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> PutOff:
        """I: adds gradients to all leaves but to weights that are put off.

        Args:
            outputs: Of a forward that ran in `splitting`.
            gradients: Theirs.

        Returns:
            What `backward_weight` needs.
        """
        self.collected = collected = []
        try:
            with self._mode:  # what is recomputed is seen as it was seen the first time
                torch.autograd.backward(outputs, gradients)
        finally:
            self.collected = None
        return collected

    def backward_weight(self, put_off: PutOff) -> None:
        """W: adds the gradients of weights; `put_off` is empty then.

        Raises:
            RuntimeError: A tensor was written into that they need.
        """
        starts = []
        # Autograd begins with what was made last, and that is what I came to first: the order of one backward, in which
        # the gradients of several uses are added up.
        while put_off:
            product = put_off.pop()
            weights = (product.weight,) if product.bias is None else (product.weight, product.bias)
            starts.append(_WeightGradients.apply(product, *weights))  # type: ignore[no-untyped-call]
        if starts:
            torch.autograd.backward(starts, [start.detach() for start in starts])

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `function` returns, so that the gradients of its weight can be put off if they can be."""
        use = _taken_apart(function, args, kwargs)
        if use is None:
            return function(*args, **kwargs)
        operator, x, weight, bias = use
        dtype = _autocast_dtype(x.device.type) if operator.is_cast else None
        if dtype is not None:
            x, weight, bias = self._cast(x, dtype), self._cast(weight, dtype), self._cast(bias, dtype)
        if not torch.is_grad_enabled():
            return operator.forward(x, weight, bias)
        return _Whole.apply(self, use, x, weight, bias)  # type: ignore[no-untyped-call]

    # Private methods

    def _cast(self, tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """As autocast does it; a parameter's copy leads to the parameter, and is made once."""
        if tensor is None or tensor.dtype in {dtype, torch.float64}:
            return tensor
        if not isinstance(tensor, nn.Parameter):
            return tensor.to(dtype)
        casts = self._casts if torch.is_autocast_cache_enabled() else None
        copy = None if casts is None else casts.get(tensor)
        if copy is None:
            with torch.enable_grad():  # it may be needed first where no graph is made, and later where one is
                copy = tensor.to(dtype)
            if casts is not None:
                casts[tensor] = copy
        return copy


class _Seeing(TorchFunctionMode):
    """Sees the functions of torch that a forward calls."""

    def __init__(self, split: SplitBackward) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What `func` returns."""
        kwargs = kwargs or {}
        # Other kinds of tensor have their own ways; and what is compiled is compiled without this mode.
        if not _PLAIN.issuperset(types) or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func in BINDINGS:
            return self._split.call(func, args, kwargs)
        inner = _SEEN_THROUGH.get(func)
        if inner is None:
            return func(*args, **kwargs)
        with self:
            return inner(*args, **kwargs)


class _Whole(torch.autograd.Function):
    """An operator whose backward is whole, but within an I: there it is without the gradients of its weights."""

    @staticmethod
    def forward(
        ctx: Any, split: SplitBackward, use: Use, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.split, ctx.operator, ctx.weight, ctx.bias = split, use.operator, weight, bias
        ctx.leaves = tuple(p for p in (use.weight, use.bias) if p is not None and p.requires_grad)
        # As much as torch keeps: the weight is needed for the gradient of the input alone.
        ctx.save_for_backward(x, weight if x.requires_grad else None)
        ctx.set_materialize_grads(False)
        result = use.operator.forward(x, weight, bias)
        # A view that an autograd function returns could not be written into behind it.
        return result.detach() if result._is_view() else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled() or not (wanted := _wanted(ctx.leaves, ctx.split.collected is not None)):
            return None, None, *_replayed(ctx, gradient, x)
        of_input = ctx.operator.input_gradient(gradient, x, weight) if ctx.needs_input_grad[2] else None
        if wanted == "later":
            product = _Product(
                operator=ctx.operator,
                x=x.detach(),  # without the graph that it came from
                gradient=gradient,
                weight=ctx.weight,
                bias=ctx.bias if ctx.needs_input_grad[4] else None,
                versions=(x._version, gradient._version),
            )
            ctx.split.collected.append(product)
        return None, None, of_input, None, None


class _WeightGradients(torch.autograd.Function):
    """A scalar whose backward computes the gradients of a weight, which nobody else holds then."""

    @staticmethod
    def forward(ctx: Any, product: _Product, *weights: Tensor) -> Tensor:
        ctx.product = product
        return torch.empty((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, _nothing: Tensor) -> Any:
        product, ctx.product = ctx.product, None
        of_weight, of_bias = product.gradients()
        return (None, of_weight) if product.bias is None else (None, of_weight, of_bias)


# Private functions


def _taken_apart(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Use | None:
    """A call whose weight's gradient can be put off; None for others."""
    try:
        use = BINDINGS[function](*args, **kwargs)
    except (AttributeError, TypeError):
        return None  # called in a way that is not known here, or wrongly, which torch says better
    if use is None or not _is_trained(use.weight) or not _is_plain(use.x):
        return None
    if use.bias is not None and not (_is_trained(use.bias) or not use.bias.requires_grad):
        return None
    # Transforms of functions (`torch.func`) and forward-mode derivatives ask autograd functions for rules of their own.
    is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    needs_nothing = not torch.is_grad_enabled() and not _autocast_dtype(use.x.device.type)
    return None if is_transformed or needs_nothing else use


def _is_plain(x: Any) -> bool:
    return type(x) in _PLAIN and x.layout == torch.strided and not x.is_complex()


def _is_trained(weight: Any) -> bool:
    """Whether it is a parameter to which gradients are added, and nobody looks at them before they are complete."""
    if type(weight) is not nn.Parameter or not weight.requires_grad or not weight.is_leaf or weight.is_complex():
        return False
    # A hook would be called in I, with nothing. That of replicas counts, and begins to count with the last W.
    hooks = getattr(weight, "_post_accumulate_grad_hooks", None) or {}
    others = [hook for hook in hooks.values() if not isinstance(getattr(hook, "__self__", None), ReplicaGradients)]
    return not weight._backward_hooks and not others


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _wanted(leaves: Sequence[nn.Parameter], is_split: bool) -> str:
    """What the backward that runs now wants of the gradients of `leaves`: "later", "never", or at once (empty)."""
    try:
        answers = {torch._C._will_engine_execute_node(get_gradient_edge(leaf).node) for leaf in leaves}
    except RuntimeError:  # says it of a leaf whose gradient is to be returned, not added up
        return ""
    if answers == {False}:
        return "never"
    return "later" if is_split and answers == {True} else ""


def _replayed(ctx: Any, gradient: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of x, weight and bias, which can be differentiated again where that is asked for."""
    create_graph = torch.is_grad_enabled()
    needed = ctx.needs_input_grad[2:]
    with torch.enable_grad():
        # Views: one and the same tensor may be several of them, and each has its own gradient.
        given = [None if t is None else t.view_as(t) for t in (x, ctx.weight, ctx.bias)]
        result = ctx.operator.forward(*given)
        inputs = [tensor for tensor, need in zip(given, needed, strict=True) if need]
        made = iter(torch.autograd.grad(result, inputs, gradient, create_graph=create_graph))
    return tuple(next(made) if need else None for need in needed)


_PLAIN: Final = frozenset((Tensor, nn.Parameter))


def _never(*_: Any) -> bool:
    return False


def _unasked(function: Any) -> Any:
    """A copy of a function that does not ask for modes before it begins: those see what it calls."""
    # Torch hands a function that is written in Python to the mode as a whole, and what it calls to nobody.
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    inside = {**function.__globals__, **dict.fromkeys(names, _never)}
    copy = FunctionType(function.__code__, inside, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_BACKWARDS: Final = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""They recompute checkpoints, whose tensors must be those of their first forward, in the same order."""
_SEEN_THROUGH: Final = {
    function: _unasked(function) for function in (F.embedding, F.multi_head_attention_forward, *_BACKWARDS)
}
