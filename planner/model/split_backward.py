"""Split the backward of a stage: input gradient (I) first, weight gradients (W) later.

    forward           under `SplitBackward.splitting`: linear layers, convolutions and embeddings note their use
    backward_input    I: the whole backward except for gradients of their weights; (x, dy) of each is kept
    backward_weight   W: these gradients, added to the parameters as autograd adds them

I is autograd's own backward. Everything else in it is done once and then released: recomputation, other parameters,
hooks, streams. W builds a separate graph that leads straight to the parameters.

A function mode sees the operators as they are called, by a module or not. The following remain whole, in I: compiled
code and weights computed from other weights, which the mode cannot see, and parameters with hooks. A backward that a
model runs within its forward is whole as well, and may be differentiated again.

Deferred weight gradients: Qi et al. 2024, arXiv:2401.10241.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import groupby, takewhile
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from planner.model.ghosts import Ghost
from planner.model.weight_operators import OPERATORS, Operands, Use, WeightOperator, use_of, weight_in


@dataclass(slots=True, kw_only=True)
class _DeferredUse:
    """Deferred weight gradients of one use of a weight."""

    operator: WeightOperator
    operands: Operands
    """Operands of the use: parameters, or autocast's copies of them; the bias is None if it is not trained."""
    leaves: tuple[nn.Parameter, ...]
    """Parameters that these operands are, or are copies of."""
    gradient: Tensor
    """Gradient of the operator's result."""
    versions: tuple[int, int]
    """Version counters of x and of the gradient, to detect writes since."""
    backward: int
    """Autograd's number of the backward that reached it."""

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of weight and bias.

        Raises:
            RuntimeError: One of their operands was modified since, as autograd reports it.
        """
        x, weight, _ = self.operands
        if (x._version, self.gradient._version) != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation "
                f"between the backward of the input and that of the weights: a {type(self.operator).__name__} of "
                f"shape {list(weight.shape)} needs what it had in forward"
            )
        return self.operator.weight_gradients(self.gradient, self.operands)


DeferredUses = list[_DeferredUse]
"""Deferred weight gradients of one micro-batch on a stage, between I and W."""


def additions_of(deferred: DeferredUses) -> Counter[nn.Parameter]:
    """Return how many times W adds to the gradient of each parameter: once for every backward that reached it."""
    backwards = (together for _, together in groupby(deferred, key=lambda use: use.backward))
    return Counter(leaf for uses in backwards for leaf in {id(p): p for use in uses for p in use.leaves}.values())


class SplitBackward:
    """Backward of one stage, in two parts.

    Args:
        counts_only: Returns True for a hook on a parameter that does not read its gradient, so that it may run before
            the gradient is complete. By default no hook may.
    """

    def __init__(self, counts_only: Callable[[Callable[..., Any]], bool] = lambda _: False) -> None:
        self._counts_only = counts_only
        self.collected: DeferredUses | None = None
        """Deferred gradients of the running I; None if none runs."""
        self._casts: dict[nn.Parameter, Tensor] | None = None
        self._mode = _OperatorMode(self)

    @contextmanager
    def keeping_casts(self) -> Iterator[None]:
        """Cache autocast's copies of the weights with deferred gradients inside the block, as torch does for others."""
        self._casts = {}
        try:
            yield
        finally:
            self._casts = None

    def splitting(self) -> AbstractContextManager[Any]:
        """Return the context for a forward whose backward is split."""
        return self._mode

    def backward_input(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> DeferredUses:
        """Run I: add gradients to all leaves except for weights whose gradients are deferred.

        Args:
            outputs: Outputs of a forward that ran in `splitting`.
            gradients: Gradients of the outputs.

        Returns:
            The argument of `backward_weight`.
        """
        collected: DeferredUses = []
        self.collected = collected
        try:
            with self._mode:  # recomputation is intercepted like the first forward
                torch.autograd.backward(outputs, gradients)
        finally:
            self.collected = None
        return collected

    def backward_weight(self, deferred: DeferredUses) -> None:
        """Run W: add the deferred gradients of weights, and empty `deferred`.

        Raises:
            RuntimeError: A tensor that they need was modified.
        """
        # Uses of a weight are summed before they are added to the parameter, separately for each backward: recomputed
        # code has its own.
        while deferred:
            together = list(takewhile(lambda use: use.backward == deferred[0].backward, deferred))
            del deferred[: len(together)]
            starts = []
            # Autograd starts with the newest node, so the use that I reached first must be made last.
            while together:
                starts.append(_start_of(together.pop()))
            torch.autograd.backward(starts, [start.detach() for start in starts])

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of `function`, one of `OPERATORS`, so that the gradients of its weight can be deferred.

        Args:
            function: The function of torch.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            Its result.
        """
        # Most products have no trained weight; the cheap test comes first, for speed.
        use = use_of(function, args, kwargs) if self._is_trained(weight_in(function, args, kwargs)) else None
        if use is None or not self._can_be_deferred(use.operands):
            return function(*args, **kwargs)
        operands = use.operands
        dtype = _autocast_dtype(operands.x) if use.operator.is_cast else None
        if dtype is not None:
            operands = Operands._make(self._cast(tensor, dtype) for tensor in operands)
        if not torch.is_grad_enabled():
            return use.operator.forward(operands)
        return _WeightOperation.apply(self, use, *operands)  # type: ignore[no-untyped-call]

    def _can_be_deferred(self, operands: Operands) -> bool:
        """Return True if the gradients of a trained weight and of a bias can be deferred, given the type of x."""
        x, _, bias = operands
        if type(x) not in _PLAIN or x.layout != torch.strided or x.is_complex():
            return False
        if bias is not None and not self._is_trained(bias) and bias.requires_grad:
            return False
        # Function transforms (`torch.func`) and forward-mode derivatives need additional rules of autograd functions.
        is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        needs_something = torch.is_grad_enabled() or _autocast_dtype(x) is not None
        return needs_something and not is_transformed

    def _is_trained(self, weight: Any) -> bool:
        """Return True if gradients accumulate in the parameter, and no hook reads them before they are complete."""
        if not _is_parameter(weight) or not weight.requires_grad or not weight.is_leaf or weight.is_complex():
            return False
        # A hook would be called in I, without a gradient.
        hooks = weight._post_accumulate_grad_hooks
        return not weight._backward_hooks and (not hooks or all(map(self._counts_only, hooks.values())))

    def _cast(self, tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Return the tensor as autocast casts it; a parameter's copy is made once, with a graph to the parameter."""
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


class _OperatorMode(TorchFunctionMode):
    """Mode that intercepts the functions of torch that a forward calls."""

    def __init__(self, split: SplitBackward) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the result of `func`."""
        kwargs = kwargs or {}
        # The common case comes first, for speed. Code is compiled without this mode.
        if torch.compiler.is_dynamo_compiling() or func not in _SEEN:
            return func(*args, **kwargs)
        if not _PLAIN.issuperset(types):
            return func(*args, **kwargs)  # other tensor classes are not supported
        inner = _SEEN_THROUGH.get(func)
        if inner is None:
            return self._split.call(func, args, kwargs)
        with self:
            return inner(*args, **kwargs)


class _WeightOperation(torch.autograd.Function):
    """Operator with an ordinary backward, which leaves out the gradients of weights within an I."""

    @staticmethod
    def forward(ctx: Any, split: SplitBackward, use: Use, *tensors: Any) -> Tensor:
        operands = Operands._make(tensors)
        # Only weights are kept here; x is a saved tensor, which a checkpoint may drop.
        ctx.split, ctx.operator, ctx.leaves, ctx.weights = split, use.operator, use.operands[1:], operands[1:]
        # The same tensors as torch saves: the weight is needed only for the gradient of the input.
        ctx.save_for_backward(operands.x, operands.weight if operands.x.requires_grad else None)
        ctx.set_materialize_grads(False)
        result = use.operator.forward(operands)
        # Later code could not write into a view that an autograd function returns.
        return result.detach() if result._is_view() else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors  # where a checkpoint recomputes them, under the mode
        with torch._C.DisableTorchFunction():
            return _WeightOperation._gradients(ctx, gradient, x, weight)

    @staticmethod
    def _gradients(ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor) -> Any:
        wanted = "" if torch.is_grad_enabled() else _wanted(ctx.leaves, is_split=ctx.split.collected is not None)
        if not wanted:
            return None, None, *_replayed(ctx, gradient, x)
        _, _, needs_x, _, needs_bias = ctx.needs_input_grad
        of_input = ctx.operator.input_gradient(gradient, Operands(x, weight, None)) if needs_x else None
        if wanted == "later":
            weights = (ctx.weights[0], ctx.weights[1] if needs_bias else None)
            use = _DeferredUse(
                operator=ctx.operator,
                # Without the graph that x came from.
                operands=Operands(x.detach(), *weights),
                leaves=tuple(leaf for leaf, weight in zip(ctx.leaves, weights, strict=True) if weight is not None),
                gradient=gradient,
                versions=(x._version, gradient._version),
                backward=torch._C._current_graph_task_id(),
            )
            ctx.split.collected.append(use)
        return None, None, of_input, None, None


class _WeightGradients(torch.autograd.Function):
    """Scalar whose backward computes the gradients of a weight, and holds the only reference to them."""

    @staticmethod
    def forward(ctx: Any, use: _DeferredUse, *weights: Tensor) -> Tensor:
        ctx.use = use
        return torch.empty((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, _nothing: Tensor) -> Any:
        use, ctx.use = ctx.use, None
        of_weight, of_bias = use.gradients()
        return (None, of_weight) if of_bias is None else (None, of_weight, of_bias)


def _start_of(use: _DeferredUse) -> Tensor:
    """Return the scalar from which a backward leads to the weights of a use."""
    weights = [weight for weight in use.operands[1:] if weight is not None]
    start: Tensor = _WeightGradients.apply(use, *weights)  # type: ignore[no-untyped-call]
    return start


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _wanted(leaves: Sequence[nn.Parameter | None], *, is_split: bool) -> str:
    """Return when gradients of weights are computed: in W ("later"), "never", or in this backward (empty)."""
    trained = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    try:
        answers = {torch._C._will_engine_execute_node(get_gradient_edge(leaf).node) for leaf in trained}
    except RuntimeError:  # says it of a leaf whose gradient is to be returned, not added up
        return ""
    if answers == {False}:
        return "never"
    return "later" if is_split and answers == {True} else ""


def _replayed(ctx: Any, gradient: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias; they can be differentiated again if the backward creates a graph."""
    create_graph = torch.is_grad_enabled()
    needed = ctx.needs_input_grad[2:]
    with torch.enable_grad():
        # Views: one and the same tensor may be several of them, and each has its own gradient.
        operands = [None if tensor is None else tensor.view_as(tensor) for tensor in (x, *ctx.weights)]
        result = ctx.operator.forward(Operands._make(operands))
        inputs = [tensor for tensor, need in zip(operands, needed, strict=True) if tensor is not None and need]
        made = iter(torch.autograd.grad(result, inputs, gradient, create_graph=create_graph))
    return tuple(next(made) if need else None for need in needed)


_PLAIN: Final = frozenset((Tensor, nn.Parameter, Ghost))
"""Types of tensors that are supported. An absent ghost has another class, because its gradients are unused."""


def _is_parameter(weight: Any) -> bool:
    # A ghost keeps its class when it becomes a parameter.
    return type(weight) is nn.Parameter or (type(weight) is Ghost and isinstance(weight, nn.Parameter))


def _never(*_: Any) -> bool:
    return False


def _unasked(function: Any) -> Any:
    """Return a copy of a function of torch that is written in Python, so that modes see the functions that it calls."""
    # Torch passes a function that is written in Python to the mode as a whole, without the functions it calls.
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    inside = {**function.__globals__, **dict.fromkeys(names, _never)}
    copy = FunctionType(function.__code__, inside, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_BACKWARDS: Final = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""Functions during which checkpoints are recomputed; these must save the same tensors as their first forward."""
_SEEN_THROUGH: Final = {
    function: _unasked(function)
    for function in (functional.embedding, functional.multi_head_attention_forward, *_BACKWARDS)
}
_SEEN: Final = frozenset((*OPERATORS, *_SEEN_THROUGH))
