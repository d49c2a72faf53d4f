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
from planner.model.put_off import OPERATORS, Operands, Operator, Use, use_of, weight_in


@dataclass(slots=True, kw_only=True)
class _Later:
    """What the gradients of one use of a weight are computed from."""

    operator: Operator
    operands: Operands
    """The operands of the use: weight and bias are parameters, or autocast's copies; no bias that is not trained."""
    leaves: tuple[nn.Parameter, ...]
    """The parameters that these are, or are copies of."""
    gradient: Tensor
    """The gradient of what the operator made."""
    versions: tuple[int, int]
    """The versions of x and the gradient: whether somebody has written into them since."""
    backward: int
    """Autograd's number of the backward that came to it."""

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """The gradients of weight and bias.

        Raises:
            RuntimeError: What they are computed from is no longer what it was, as autograd says it.
        """
        x, weight, _ = self.operands
        if (x._version, self.gradient._version) != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation "
                f"between the backward of the input and that of the weights: a {type(self.operator).__name__} of "
                f"shape {list(weight.shape)} needs what it had in forward"
            )
        return self.operator.weight_gradients(self.gradient, self.operands)


PutOff = list[_Later]
"""What a micro-batch keeps on a stage between I and W."""


def additions_of(put_off: PutOff) -> Counter[nn.Parameter]:
    """How often W adds to the gradient of each parameter: once for every backward that came to it, however often."""
    backwards = (together for _, together in groupby(put_off, key=lambda use: use.backward))
    return Counter(leaf for uses in backwards for leaf in {id(p): p for use in uses for p in use.leaves}.values())


class SplitBackward:
    """The backward of one stage, in two parts.

    Args:
        counts_only: Whether a hook on a parameter may be called although its gradient is not complete: it looks at
            none. By default no hook may.
    """

    def __init__(self, counts_only: Callable[[Callable[..., Any]], bool] = lambda _: False) -> None:
        self._counts_only = counts_only
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
        collected: PutOff = []
        self.collected = collected
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
        # Several uses of a weight are added up before they go to the parameter, those of each backward by themselves:
        # what is recomputed has one of its own.
        while put_off:
            together = list(takewhile(lambda use: use.backward == put_off[0].backward, put_off))
            del put_off[: len(together)]
            starts = []
            # Autograd begins with what was made last; so that is what I came to first.
            while together:
                starts.append(_start_of(together.pop()))
            torch.autograd.backward(starts, [start.detach() for start in starts])

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `function`, one of `OPERATORS`, returns; so that the gradients of its weight can be put off."""
        # Most of what a model multiplies is no weight, and a forward waits for what is looked at here.
        use = use_of(function, args, kwargs) if self._is_trained(weight_in(function, args, kwargs)) else None
        if use is None or not self._can_be_put_off(use.operands):
            return function(*args, **kwargs)
        operands = use.operands
        dtype = _autocast_dtype(operands.x) if use.operator.is_cast else None
        if dtype is not None:
            operands = Operands._make(self._cast(tensor, dtype) for tensor in operands)
        if not torch.is_grad_enabled():
            return use.operator.forward(operands)
        return _Whole.apply(self, use, *operands)  # type: ignore[no-untyped-call]

    def _can_be_put_off(self, operands: Operands) -> bool:
        """Whether the gradients of a trained weight and of a bias can be computed later; what x is is not known yet."""
        x, _, bias = operands
        if type(x) not in _PLAIN or x.layout != torch.strided or x.is_complex():
            return False
        if bias is not None and not self._is_trained(bias) and bias.requires_grad:
            return False
        # Transforms of functions (`torch.func`) and forward-mode derivatives ask autograd functions for rules of their
        # own.
        is_transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        needs_something = torch.is_grad_enabled() or _autocast_dtype(x) is not None
        return needs_something and not is_transformed

    def _is_trained(self, weight: Any) -> bool:
        """Whether it is a parameter to which gradients are added, and nobody looks at them before they are complete."""
        if not _is_parameter(weight) or not weight.requires_grad or not weight.is_leaf or weight.is_complex():
            return False
        # A hook would be called in I, with nothing.
        hooks = weight._post_accumulate_grad_hooks
        return not weight._backward_hooks and (not hooks or all(map(self._counts_only, hooks.values())))

    def _cast(self, tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """The tensor as autocast casts it; a parameter's copy leads to the parameter, and is made once."""
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
        # Most calls are none of those, and a forward waits for this. What is compiled is compiled without this mode.
        if torch.compiler.is_dynamo_compiling() or func not in _SEEN:
            return func(*args, **kwargs)
        if not _PLAIN.issuperset(types):
            return func(*args, **kwargs)  # other kinds of tensor have their own ways
        inner = _SEEN_THROUGH.get(func)
        if inner is None:
            return self._split.call(func, args, kwargs)
        with self:
            return inner(*args, **kwargs)


class _Whole(torch.autograd.Function):
    """An operator whose backward is whole, but within an I: there it is without the gradients of its weights."""

    @staticmethod
    def forward(ctx: Any, split: SplitBackward, use: Use, *tensors: Any) -> Tensor:
        operands = Operands._make(tensors)
        # No tensor but weights: what is kept of x, a checkpoint may want to drop.
        ctx.split, ctx.operator, ctx.leaves, ctx.weights = split, use.operator, use.operands[1:], operands[1:]
        # As much as torch keeps: the weight is needed for the gradient of the input alone.
        ctx.save_for_backward(operands.x, operands.weight if operands.x.requires_grad else None)
        ctx.set_materialize_grads(False)
        result = use.operator.forward(operands)
        # A view that an autograd function returns could not be written into behind it.
        return result.detach() if result._is_view() else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors  # where a checkpoint recomputes them, under the mode
        with torch._C.DisableTorchFunction():
            return _Whole._gradients(ctx, gradient, x, weight)

    @staticmethod
    def _gradients(ctx: Any, gradient: Tensor, x: Tensor, weight: Tensor) -> Any:
        wanted = "" if torch.is_grad_enabled() else _wanted(ctx.leaves, is_split=ctx.split.collected is not None)
        if not wanted:
            return None, None, *_replayed(ctx, gradient, x)
        _, _, needs_x, _, needs_bias = ctx.needs_input_grad
        of_input = ctx.operator.input_gradient(gradient, Operands(x, weight, None)) if needs_x else None
        if wanted == "later":
            weights = (ctx.weights[0], ctx.weights[1] if needs_bias else None)
            use = _Later(
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
    """A scalar whose backward computes the gradients of a weight, which nobody else holds then."""

    @staticmethod
    def forward(ctx: Any, use: _Later, *weights: Tensor) -> Tensor:
        ctx.use = use
        return torch.empty((), device=weights[0].device)

    @staticmethod
    def backward(ctx: Any, _nothing: Tensor) -> Any:
        use, ctx.use = ctx.use, None
        of_weight, of_bias = use.gradients()
        return (None, of_weight) if of_bias is None else (None, of_weight, of_bias)


def _start_of(use: _Later) -> Tensor:
    """The scalar from which a backward leads to the weights of a use."""
    weights = [weight for weight in use.operands[1:] if weight is not None]
    start: Tensor = _WeightGradients.apply(use, *weights)  # type: ignore[no-untyped-call]
    return start


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _wanted(leaves: Sequence[nn.Parameter | None], *, is_split: bool) -> str:
    """What the backward that runs now wants of the gradients of weights: "later", "never", or at once (empty)."""
    trained = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    try:
        answers = {torch._C._will_engine_execute_node(get_gradient_edge(leaf).node) for leaf in trained}
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
        operands = [None if tensor is None else tensor.view_as(tensor) for tensor in (x, *ctx.weights)]
        result = ctx.operator.forward(Operands._make(operands))
        inputs = [tensor for tensor, need in zip(operands, needed, strict=True) if tensor is not None and need]
        made = iter(torch.autograd.grad(result, inputs, gradient, create_graph=create_graph))
    return tuple(next(made) if need else None for need in needed)


_PLAIN: Final = frozenset((Tensor, nn.Parameter, Ghost))
"""A ghost of what another stage has is another class: its gradients are nobody's here."""


def _is_parameter(weight: Any) -> bool:
    # A ghost keeps its class when it becomes a parameter.
    return type(weight) is nn.Parameter or (type(weight) is Ghost and isinstance(weight, nn.Parameter))


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
    function: _unasked(function)
    for function in (functional.embedding, functional.multi_head_attention_forward, *_BACKWARDS)
}
_SEEN: Final = frozenset((*OPERATORS, *_SEEN_THROUGH))
