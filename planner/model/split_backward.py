"""Split the backward of a stage: input gradient (I) first, weight gradients (W) later.

    forward           under `SplitBackward.splitting`: linear layers, convolutions and embeddings record their use
    backward_input    I: the backward without the weight gradients of these operators; x and dy are kept
    backward_weight   W: these weight gradients, added to the parameters as autograd adds them

Here x is the input of an operator, and dy is the gradient of its result.

I is autograd's own backward. It includes recomputation, gradients of other parameters, hooks and streams, and it
releases the graph. W builds a separate graph that leads straight to the parameters.

A function mode intercepts the operators, whether modules call them or not. Some weight gradients are computed in I:

- for operators in compiled code, which the mode cannot intercept
- for weights that are computed from parameters
- for operators whose x is the result of an autograd function that is not from torch, because the backward of this
  function may overwrite or free x
- for parameters with hooks
- for all parameters of a stage whose modules have backward hooks

A backward that a model runs within its forward is not split.

Deferred weight gradients: Qi et al. 2024, arXiv:2401.10241.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby, takewhile
from types import FunctionType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from planner.model.ghosts import Ghost
from planner.model.stage import ModelStage
from planner.model.weight_operators import (
    OPERATORS,
    Embedding,
    Operands,
    WeightOperator,
    WeightOperatorCall,
    weight_argument,
    weight_operator_call,
)


@dataclass(slots=True, kw_only=True)
class _DeferredUse:
    """Call of an operator whose weight gradient is still to be computed."""

    operator: WeightOperator
    operands: Operands
    """Operands of the call. Weight and bias may be autocast's copies of parameters; bias is None if not trained."""
    leaves: tuple[nn.Parameter, ...]
    """Parameters that receive the gradients of weight and bias."""
    gradient: Tensor
    """Gradient of the operator's result."""
    versions: tuple[int, int]
    """Version counters of `operands.x` and of `gradient` during I, to detect later writes."""
    backward: int
    """Autograd's id of the backward that passed `gradient` to the operator."""

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        x, weight, _ = self.operands
        if (x._version, self.gradient._version) != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation "
                f"between the input-gradient and the weight-gradient pass: the weight gradient of a "
                f"{type(self.operator).__name__} of shape {list(weight.shape)} needs the earlier value"
            )
        return self.operator.weight_gradients(self.gradient, self.operands)


DeferredUses = list[_DeferredUse]
"""Deferred weight gradients of one micro-batch on a stage, between its input-gradient and its weight-gradient pass."""


def count_additions(deferred: DeferredUses) -> Counter[nn.Parameter]:
    """Return how often the weight-gradient pass (W) adds to the gradient of each parameter."""
    backwards = (together for _, together in groupby(deferred, key=lambda use: use.backward))
    return Counter(leaf for uses in backwards for leaf in {id(p): p for use in uses for p in use.leaves}.values())


class SplitBackward:
    """Backward of a stage in two passes: input gradients (I) and weight gradients (W).

    Args:
        ignores_gradient: Function that returns True for a hook that does not read the parameter's gradient. By default,
            every hook is assumed to read it.
    """

    # Autograd calls hooks on parameters in I already, before the gradient is complete.

    def __init__(self, ignores_gradient: Callable[[Callable[..., Any]], bool] = lambda _: False) -> None:
        self._ignores_gradient = ignores_gradient
        self.collected: DeferredUses | None = None
        """Weight gradients that the running pass I has deferred; None if no pass I is running."""
        self._casts: dict[nn.Parameter, Tensor] | None = None
        self._mode = _OperatorMode(self)

    @contextmanager
    def weight_cast_cache(self) -> Iterator[None]:
        """Cache autocast's copies of weights in the `with` block, if the gradients of these weights can be deferred."""
        self._casts = {}
        try:
            yield
        finally:
            self._casts = None

    def splitting(self, *modules: nn.Module) -> AbstractContextManager[Any]:
        """Return the context manager in which to run a forward of `modules` if its backward will be split.

        If the modules have backward hooks, pass I computes all gradients.
        """
        return nullcontext() if _have_backward_hooks(modules) else self._mode

    def backward_input(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> DeferredUses:
        """Run pass I: compute gradients, and return the deferred weight gradients for `backward_weight`.

        The forward that computed `outputs` must have run in the context manager `splitting`.
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
        """Run pass W: compute deferred weight gradients, add them to the parameters, and clear `deferred`.

        Raise a `RuntimeError` if code has modified a tensor that a weight gradient needs.
        """
        # As in autograd, the gradients of all uses of a weight in one backward are summed, then added to the parameter.
        # Recomputed code (a checkpoint) has a backward of its own.
        while deferred:
            together = list(takewhile(lambda use: use.backward == deferred[0].backward, deferred))
            del deferred[: len(together)]
            starts = []
            # Autograd starts with the newest node, so the node of the use that I reached first must be created last.
            while together:
                starts.append(_start_of(together.pop()))
            torch.autograd.backward(starts, [start.detach() for start in starts])

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function so that its weight gradients can be deferred, if possible. Return its result.

        Args:
            function: Torch function in `OPERATORS`.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the function.
        """
        # Most products have no trained weight. For speed, this cheap test comes first.
        is_trained = self._is_trained(weight_argument(function, args, kwargs))
        use = weight_operator_call(function, args, kwargs) if is_trained else None
        if use is None or not self._can_be_deferred(use.operands):
            return function(*args, **kwargs)
        operands = use.operands
        # Autocast runs all weight operators except embeddings in low precision.
        dtype = None if isinstance(use.operator, Embedding) else _autocast_dtype(operands.x)
        if dtype is not None:
            operands = Operands._make(self._cast(tensor, dtype) for tensor in operands)
        if not torch.is_grad_enabled():
            return use.operator.forward(operands)
        return _WeightOperation.apply(self, use, *operands)  # type: ignore[no-untyped-call]

    def _can_be_deferred(self, operands: Operands) -> bool:
        x, _, bias = operands
        if type(x) not in _PLAIN or x.layout != torch.strided or x.is_complex():
            return False
        if _is_result_of_function(x) or (bias is not None and not self._is_trained(bias) and bias.requires_grad):
            return False
        # Function transforms (`torch.func`) and forward-mode derivatives need additional rules of autograd functions.
        is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        needs_something = torch.is_grad_enabled() or _autocast_dtype(x) is not None
        return needs_something and not is_transformed

    def _is_trained(self, weight: Any) -> bool:
        """Return True if `weight` is a trained parameter whose hooks allow deferred gradients."""
        if not _is_parameter(weight) or not weight.requires_grad or not weight.is_leaf or weight.is_complex():
            return False
        # Autograd would call a hook in I, without a gradient.
        hooks = weight._post_accumulate_grad_hooks
        return not weight._backward_hooks and (not hooks or all(map(self._ignores_gradient, hooks.values())))

    def _cast(self, tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        if tensor is None or tensor.dtype in {dtype, torch.float64}:
            return tensor
        if not isinstance(tensor, nn.Parameter):
            return tensor.to(dtype)
        casts = self._casts if torch.is_autocast_cache_enabled() else None
        copy = None if casts is None else casts.get(tensor)
        if copy is None:
            with torch.enable_grad():  # a later use of the cached copy may need the graph
                copy = tensor.to(dtype)
            if casts is not None:
                casts[tensor] = copy
        return copy


class _OperatorMode(TorchFunctionMode):
    def __init__(self, split: SplitBackward) -> None:
        super().__init__()
        self._split = split

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # The common case comes first, for speed. `torch.compile` traces code without this mode.
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
    @staticmethod
    def forward(ctx: Any, split: SplitBackward, use: WeightOperatorCall, *tensors: Any) -> Tensor:
        operands = Operands._make(tensors)
        # Only weights are attributes of `ctx`; x is a saved tensor, so that a checkpoint can drop it.
        ctx.split, ctx.operator, ctx.leaves, ctx.weights = split, use.operator, use.operands[1:], operands[1:]
        # Torch saves the same tensors: the weight is needed only for the gradient of the input.
        ctx.save_for_backward(operands.x, operands.weight if operands.x.requires_grad else None)
        ctx.set_materialize_grads(False)
        result = use.operator.forward(operands)
        # Later code could not write into a view that an autograd function returns.
        return result.detach() if result._is_view() else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors  # a checkpoint recomputes its tensors here, under the mode
        with torch._C.DisableTorchFunction():
            return _WeightOperation._gradients(ctx, gradient, x, weight)

    @staticmethod
    def _gradients(ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor) -> Any:
        is_split = ctx.split.collected is not None
        wanted = "now" if torch.is_grad_enabled() else _when_weight_gradients(ctx.leaves, is_split=is_split)
        if wanted == "now":
            return None, None, *_replayed(ctx, gradient, x)
        _, _, needs_x, _, needs_bias = ctx.needs_input_grad
        of_input = ctx.operator.input_gradient(gradient, Operands(x, weight, None)) if needs_x else None
        if wanted == "later":
            weights = (ctx.weights[0], ctx.weights[1] if needs_bias else None)
            use = _DeferredUse(
                operator=ctx.operator,
                # `detach` releases the graph of x.
                operands=Operands(x.detach(), *weights),
                leaves=tuple(leaf for leaf, weight in zip(ctx.leaves, weights, strict=True) if weight is not None),
                gradient=gradient,
                versions=(x._version, gradient._version),
                backward=torch._C._current_graph_task_id(),
            )
            ctx.split.collected.append(use)
        return None, None, of_input, None, None


class _WeightGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, use: _DeferredUse, *weights: Tensor) -> Tensor:
        ctx.use = use
        return torch.empty((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, _nothing: Tensor) -> Any:
        use, ctx.use = ctx.use, None
        of_weight, of_bias = use.gradients()
        return (None, of_weight) if of_bias is None else (None, of_weight, of_bias)


def _have_backward_hooks(modules: Sequence[nn.Module]) -> bool:
    roots = [module.model if isinstance(module, ModelStage) else module for module in modules]
    return any(each._backward_hooks or each._backward_pre_hooks for root in roots for each in root.modules())


def _start_of(use: _DeferredUse) -> Tensor:
    # In `backward_weight` itself, a variable would keep the last use's tensors in memory during the backward.
    weights = [weight for weight in use.operands[1:] if weight is not None]
    start: Tensor = _WeightGradients.apply(use, *weights)  # type: ignore[no-untyped-call]
    return start


def _is_result_of_function(x: Tensor) -> bool:
    """Return True if an autograd function, except those of torch, returned `x` or the tensor of which `x` is a view."""
    node: Any = (x if x._base is None else x._base).grad_fn
    if not isinstance(node, BackwardCFunction):
        return False
    return node._forward_cls.__module__.partition(".")[0] not in ("torch", "planner")  # type: ignore[attr-defined]


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _when_weight_gradients(leaves: Sequence[nn.Parameter | None], *, is_split: bool) -> str:
    """Return when to compute weight gradients: `now` (in the running backward), `later` (in W), or `never`.

    `is_split` is True during pass I of a split backward.
    """
    trained = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    try:
        answers = {torch._C._will_engine_execute_node(get_gradient_edge(leaf).node) for leaf in trained}
    except RuntimeError:  # `torch.autograd.grad` is running, which returns the gradient instead of accumulating it
        return "now"
    if answers == {False}:
        return "never"
    return "later" if is_split and answers == {True} else "now"


def _replayed(ctx: Any, gradient: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    create_graph = torch.is_grad_enabled()
    needed = ctx.needs_input_grad[2:]
    with torch.enable_grad():
        # Views separate the gradients if one tensor serves as several operands.
        operands = [None if tensor is None else tensor.view_as(tensor) for tensor in (x, *ctx.weights)]
        result = ctx.operator.forward(Operands._make(operands))
        inputs = [tensor for tensor, need in zip(operands, needed, strict=True) if tensor is not None and need]
        made = iter(torch.autograd.grad(result, inputs, gradient, create_graph=create_graph))
    return tuple(next(made) if need else None for need in needed)


_PLAIN: Final = frozenset((Tensor, nn.Parameter, Ghost))
"""Types of operands for which weight gradients can be deferred; not `AbsentGhost`, whose gradients are not used."""


def _is_parameter(weight: Any) -> bool:
    # `nn.Parameter(ghost)` returns an object of the class `Ghost`.
    return type(weight) is nn.Parameter or (type(weight) is Ghost and isinstance(weight, nn.Parameter))


def _never(*_: Any) -> bool:
    return False


def _not_intercepted(function: Any) -> Any:
    """Return a copy of a torch function that is implemented in Python.

    Calls of the copy are not intercepted, but calls of torch functions inside it are.
    """
    # Torch passes such a function to the mode as one call, and then does not pass the functions inside.
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    inside = {**function.__globals__, **dict.fromkeys(names, _never)}
    copy = FunctionType(function.__code__, inside, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_BACKWARDS: Final = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""Functions that run a backward. Calls inside are intercepted, so that recomputed checkpoints save the same tensors."""
_SEEN_THROUGH: Final = {
    function: _not_intercepted(function)
    for function in (functional.embedding, functional.multi_head_attention_forward, *_BACKWARDS)
}
_SEEN: Final = frozenset((*OPERATORS, *_SEEN_THROUGH))
