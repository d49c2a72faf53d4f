"""Operators whose weight gradient (pass W) can be computed later than their input gradient (pass I).

    forward:    y = x w + b             x: input, w: weight, b: bias, y: result
    pass I:     dx = dy wᵀ              dx, dw, db, dy: gradients of the loss with respect to x, w, b, y
    pass W:     dw = xᵀ dy
                db = the sum of dy over rows

Linear layers, convolutions and embeddings contain nearly all parameters of a model. Both passes use the kernels of
torch, with factors in the same order and layout, so that gradients are bit-for-bit equal.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Operands(NamedTuple):
    """Operands of a weight operator: input, weight and optional bias."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Product:
    """Product `x w + b` of an input x, which has two or more dimensions, and a weight w, which is a matrix."""

    forward: Callable[[Operands], Tensor]
    """Function that returns the product of the operands, plus the bias if there is one."""
    is_transposed: bool
    """True if the weight has one row per output feature, as in a linear layer."""

    def input_gradient(self, gradient: Tensor, operands: Operands) -> Tensor:
        """Return the gradient of the input: `gradient` times the transposed weight."""
        # Like `mm_mat1_backward` of torch's FunctionsManual.cpp.
        rows, factor = _rows(gradient), self._factor(operands.weight)
        # A column-major x gets a column-major gradient.
        if _is_by_columns(_rows(operands.x)):
            return factor.mm(rows.t()).t().reshape(operands.x.shape)
        return rows.mm(factor.t()).reshape(operands.x.shape)

    def weight_gradients(self, gradient: Tensor, operands: Operands) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the weight and of the bias (None without a bias).

        The weight's gradient is the transposed input times `gradient`. The bias's is the sum of `gradient` over rows.
        """
        # Like `mm_mat2_backward` of torch's FunctionsManual.cpp.
        rows, inputs = _rows(gradient), _rows(operands.x)
        by_columns = _is_by_columns(self._factor(operands.weight))
        product = rows.t().mm(inputs).t() if by_columns else inputs.t().mm(rows)
        of_weight = product.t() if self.is_transposed else product
        return of_weight, None if operands.bias is None else rows.sum_to_size(operands.bias.shape)

    def _factor(self, weight: Tensor) -> Tensor:
        return weight.t() if self.is_transposed else weight


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """Convolution, or transposed convolution, in one to three dimensions."""

    call: Callable[..., Tensor]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    is_transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    def forward(self, operands: Operands) -> Tensor:
        """Return the convolution of the operands."""
        rest = (self.output_padding, self.groups, self.dilation) if self.is_transposed else (self.dilation, self.groups)
        return self.call(*operands, self.stride, self.padding, *rest)

    def input_gradient(self, gradient: Tensor, operands: Operands) -> Tensor:
        """Return the gradient of the input, computed by torch's kernel."""
        kernel = torch.ops.aten.convolution_backward
        of_input, _, _ = kernel(gradient, operands.x, operands.weight, None, *self._numbers, [True, False, False])
        return of_input  # type: ignore[no-any-return]

    def weight_gradients(self, gradient: Tensor, operands: Operands) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of the weight and of the bias (None without a bias), computed by torch's kernel."""
        kernel, has_bias = torch.ops.aten.convolution_backward, operands.bias is not None
        sizes = None if operands.bias is None else list(operands.bias.shape)
        _, *gradients = kernel(gradient, operands.x, operands.weight, sizes, *self._numbers, [False, True, has_bias])
        return gradients[0], gradients[1]

    @property
    def _numbers(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.is_transposed, self.output_padding, self.groups


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Lookup of rows of the weight by integer indices."""

    padding_idx: int
    scale_grad_by_freq: bool

    def forward(self, operands: Operands) -> Tensor:
        """Return the rows of the weight that the indices `operands.x` select."""
        return torch.embedding(operands.weight, operands.x, self.padding_idx, self.scale_grad_by_freq)

    def input_gradient(self, gradient: Tensor, operands: Operands) -> Tensor:
        """Raise NotImplementedError, because integer indices have no gradient."""
        raise NotImplementedError

    def weight_gradients(self, gradient: Tensor, operands: Operands) -> tuple[Tensor, Tensor | None]:
        """Return the gradient of the weight: for every row, the sum of the gradients of its lookups."""
        options = (operands.weight.shape[0], self.padding_idx, self.scale_grad_by_freq, False)
        return torch.ops.aten.embedding_backward(gradient, operands.x, *options), None


WeightOperator = Product | Convolution | Embedding
"""Operator that is linear in its input and in its weight. Its `weight_gradients` reads no values of weight and bias."""


class WeightOperatorCall(NamedTuple):
    """Call of a weight operator. The types of the operands have not been checked."""

    operator: WeightOperator
    operands: Operands


def weight_argument(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the weight among the arguments of a call; None if it is missing.

    Args:
        function: Function of torch, a key of `OPERATORS`.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    names, place, _ = OPERATORS[function]
    return args[place] if place < len(args) else kwargs.get(names[place])


def weight_operator_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> WeightOperatorCall | None:
    """Return the operator and operands of a call; None if this form of call is not supported.

    Args:
        function: Function of torch, a key of `OPERATORS`.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    names, _, make = OPERATORS[function]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    # Calls with `out=` are not supported. For a wrong call, torch raises an error with a better message.
    if len(args) > len(names) or not arguments.keys() <= set(names):
        return None
    try:
        return make(arguments)
    except (AttributeError, KeyError, TypeError):
        return None


_Arguments = Mapping[str, Any]


class _Form(NamedTuple):
    """Signature of a torch function that applies a weight operator."""

    names: tuple[str, ...]
    """Names of the function's arguments, in order."""
    weight: int
    """Index of the weight among the arguments."""
    use: Callable[[_Arguments], WeightOperatorCall | None]


def _rows(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])  # -1 is not allowed without elements


def _is_by_columns(matrix: Tensor) -> bool:
    return matrix.stride() == (1, matrix.shape[0])


def _added(operands: Operands) -> Tensor:
    assert operands.bias is not None
    return torch.addmm(operands.bias, operands.x, operands.weight)


_LINEAR: Final = Product(forward=lambda operands: functional.linear(*operands), is_transposed=True)
_MATMUL: Final = Product(forward=lambda operands: torch.matmul(operands.x, operands.weight), is_transposed=False)
_ADDMM: Final = Product(forward=_added, is_transposed=False)


def _product(operator: Product, operands: Operands) -> WeightOperatorCall | None:
    # Torch multiplies vectors with another kernel, and a batch of matrices is no weight.
    return WeightOperatorCall(operator, operands) if operands.x.dim() > 1 and operands.weight.dim() == 2 else None


def _linear(arguments: _Arguments) -> WeightOperatorCall | None:
    return _product(_LINEAR, Operands(arguments["input"], arguments["weight"], arguments.get("bias")))


def _matmul(second: str, arguments: _Arguments) -> WeightOperatorCall | None:
    return _product(_MATMUL, Operands(arguments["input"], arguments[second], None))


def _addmm(arguments: _Arguments) -> WeightOperatorCall | None:
    if arguments.get("alpha", 1) != 1 or arguments.get("beta", 1) != 1:
        return None
    return _product(_ADDMM, Operands(arguments["mat1"], arguments["mat2"], arguments["input"]))


def _embedding(arguments: _Arguments) -> WeightOperatorCall:
    operator = Embedding(
        padding_idx=arguments.get("padding_idx", -1),
        scale_grad_by_freq=arguments.get("scale_grad_by_freq", False),
    )
    return WeightOperatorCall(operator, Operands(arguments["indices"], arguments["weight"], None))


def _convolution(call: Callable[..., Tensor], is_transposed: bool, arguments: _Arguments) -> WeightOperatorCall | None:  # noqa: FBT001
    operands = Operands(arguments["input"], arguments["weight"], arguments.get("bias"))
    dimensions = operands.weight.dim() - 2
    stride, dilation = (_per_dimension(arguments.get(name, 1), dimensions) for name in ("stride", "dilation"))
    padding = _padding(arguments.get("padding", 0), tuple(operands.weight.shape[2:]), dilation)
    if padding is None or operands.x.dim() != operands.weight.dim():
        return None  # torch would add a batch dimension or pad the input, which is not supported here
    operator = Convolution(
        call=call,
        stride=stride,
        padding=padding,
        dilation=dilation,
        is_transposed=is_transposed,
        output_padding=_per_dimension(arguments.get("output_padding", 0), dimensions),
        groups=arguments.get("groups", 1),
    )
    return WeightOperatorCall(operator, operands)


def _per_dimension(value: Any, dimensions: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dimensions if len(values) == 1 else values


def _padding(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...] | None:
    if padding == "valid":
        return (0,) * len(kernel)
    if padding != "same":
        return _per_dimension(padding, len(kernel))
    both = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    return None if any(total % 2 for total in both) else tuple(total // 2 for total in both)


_CONVOLUTIONS: Final = (functional.conv1d, functional.conv2d, functional.conv3d)
_TRANSPOSED: Final = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
_FILTER: Final = ("input", "weight", "bias", "stride", "padding")

OPERATORS: Final[Mapping[Any, _Form]] = {
    functional.linear: _Form(("input", "weight", "bias"), 1, _linear),
    Tensor.matmul: _Form(("input", "other"), 1, partial(_matmul, "other")),  # `@`, too
    torch.matmul: _Form(("input", "other"), 1, partial(_matmul, "other")),
    Tensor.mm: _Form(("input", "mat2"), 1, partial(_matmul, "mat2")),
    torch.mm: _Form(("input", "mat2"), 1, partial(_matmul, "mat2")),
    Tensor.addmm: _Form(("input", "mat1", "mat2", "beta", "alpha"), 2, _addmm),
    torch.addmm: _Form(("input", "mat1", "mat2", "beta", "alpha"), 2, _addmm),
    torch.embedding: _Form(("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse"), 0, _embedding),
    **{call: _Form((*_FILTER, "dilation", "groups"), 1, partial(_convolution, call, False)) for call in _CONVOLUTIONS},
    **{
        call: _Form((*_FILTER, "output_padding", "groups", "dilation"), 1, partial(_convolution, call, True))
        for call in _TRANSPOSED
    },
}
"""Functions of torch whose weight gradient can be computed later."""
