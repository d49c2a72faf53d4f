"""Operators whose weight's gradient can be computed later than their input's.

    y = x W + b      I: dx = dy Wᵀ      W: dW = xᵀ dy, db = sum of dy over rows

Linear layers, convolutions and embeddings: they hold nearly all that a model trains, and each has a backward that falls
into two parts of which neither needs what the other computes. What torch does in one go is done here in the same words
(the order of the factors, the layout, the kernel), so that gradients are the same to the bit.

A call is taken apart by `BINDINGS`, which knows functions of torch by what they are, not by their name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["BINDINGS", "Operator", "Use"]


class Operator(Protocol):
    """One way to make a tensor of an input and a weight; linear in each."""

    @property
    def is_cast(self) -> bool:
        """Whether autocast runs it in low precision."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """What the operator makes."""

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of `x`, from that of what was made."""

    def weight_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The gradients of weight and bias; of these only shape and layout are looked at."""


class Use(NamedTuple):
    """A call of an operator."""

    operator: Operator
    x: Any
    weight: Any
    bias: Any = None


@dataclass(frozen=True, kw_only=True)
class Product:
    """`x W + b` with a matrix W: `x` has any number of dimensions from two on."""

    call: Callable[..., Tensor]
    """Takes x, W and b."""
    is_transposed: bool
    """Whether W has a row for every output, as that of a linear layer has."""
    is_cast: bool = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As `call` does it."""
        return self.call(x, weight, bias)

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """`dy Wᵀ`, as `mm_mat1_backward` of torch's FunctionsManual.cpp computes it."""
        rows, factor = _rows(gradient), self._factor(weight)
        # What lies column by column gets a gradient that lies so, too.
        if _is_by_columns(_rows(x)):
            return factor.mm(rows.t()).t().reshape(x.shape)
        return rows.mm(factor.t()).reshape(x.shape)

    def weight_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """`xᵀ dy`, as `mm_mat2_backward` computes it, and the sum over rows."""
        rows, inputs = _rows(gradient), _rows(x)
        by_columns = _is_by_columns(self._factor(weight))
        product = rows.t().mm(inputs).t() if by_columns else inputs.t().mm(rows)
        of_weight = product.t() if self.is_transposed else product
        return of_weight, None if bias is None else rows.sum_to_size(bias.shape)

    def _factor(self, weight: Tensor) -> Tensor:
        """The second factor of the product: with a column for every output."""
        return weight.t() if self.is_transposed else weight


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution over one, two or three dimensions, transposed or not."""

    call: Callable[..., Tensor]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    is_transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    is_cast: bool = True

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As the function that was called does it."""
        rest = (self.output_padding, self.groups, self.dilation) if self.is_transposed else (self.dilation, self.groups)
        return self.call(x, weight, bias, self.stride, self.padding, *rest)

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The first of the three gradients that torch's kernel gives."""
        of_input: Tensor = self._backward(gradient, x, weight, None, (True, False, False))[0]
        return of_input

    def weight_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The second and the third of them."""
        sizes = None if bias is None else list(bias.shape)
        _, of_weight, of_bias = self._backward(gradient, x, weight, sizes, (False, True, bias is not None))
        return of_weight, of_bias

    def _backward(  # noqa: PLR0917 - as the kernel takes them
        self, gradient: Tensor, x: Tensor, weight: Tensor, bias: list[int] | None, wanted: Sequence[bool]
    ) -> Any:
        kernel = torch.ops.aten.convolution_backward
        shape = (self.stride, self.padding, self.dilation, self.is_transposed, self.output_padding, self.groups)
        return kernel(gradient, x, weight, bias, *shape, list(wanted))


@dataclass(frozen=True, kw_only=True)
class Embedding:
    """Rows of the weight by their numbers, which carry no gradient."""

    padding_idx: int
    scale_grad_by_freq: bool
    sparse: bool
    is_cast: bool = False

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The rows."""
        return torch.embedding(weight, x, self.padding_idx, self.scale_grad_by_freq, self.sparse)

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Never asked for: numbers of rows carry none."""
        raise NotImplementedError

    def weight_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Every row's gradients added up; sparse, if the layer is."""
        options = (weight.shape[0], self.padding_idx, self.scale_grad_by_freq, self.sparse)
        return torch.ops.aten.embedding_backward(gradient, x, *options), None


# Private functions

_LINEAR: Final = Product(call=F.linear, is_transposed=True)
_MATMUL: Final = Product(call=lambda x, weight, _: torch.matmul(x, weight), is_transposed=False)
_ADDMM: Final = Product(call=lambda x, weight, bias: torch.addmm(bias, x, weight), is_transposed=False)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _is_by_columns(matrix: Tensor) -> bool:
    return matrix.stride() == (1, matrix.shape[0])


def _linear(input: Any, weight: Any, bias: Any = None) -> Use | None:  # noqa: A002 - torch's names
    return Use(_LINEAR, input, weight, bias) if input.dim() > 1 and weight.dim() == 2 else None


def _matmul(input: Any, other: Any) -> Use | None:  # noqa: A002
    return Use(_MATMUL, input, other) if input.dim() > 1 and other.dim() == 2 else None


def _mm(input: Any, mat2: Any) -> Use | None:  # noqa: A002
    return _matmul(input, mat2)


def _addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Use | None:  # noqa: A002
    return Use(_ADDMM, mat1, mat2, input) if beta == alpha == 1 else None


def _embedding(
    weight: Any,
    input: Any,  # noqa: A002
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Use:
    options = {"padding_idx": padding_idx, "scale_grad_by_freq": scale_grad_by_freq, "sparse": sparse}
    return Use(Embedding(**options), input, weight)  # type: ignore[arg-type]


def _convolution(call: Callable[..., Tensor], dimensions: int) -> Callable[..., Use | None]:
    def bind(  # noqa: PLR0913, PLR0917
        input: Any,  # noqa: A002
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Use | None:
        strides, dilations = _each(stride, dimensions), _each(dilation, dimensions)
        paddings = _padding(padding, tuple(weight.shape[2:]), dilations)
        if paddings is None or input.dim() != dimensions + 2:
            return None
        operator = Convolution(
            call=call,
            stride=strides,
            padding=paddings,
            dilation=dilations,
            is_transposed=False,
            output_padding=(0,) * dimensions,
            groups=groups,
        )
        return Use(operator, input, weight, bias)

    return bind


def _transposed(call: Callable[..., Tensor], dimensions: int) -> Callable[..., Use | None]:
    def bind(  # noqa: PLR0913, PLR0917
        input: Any,  # noqa: A002
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
    ) -> Use | None:
        if input.dim() != dimensions + 2:
            return None
        operator = Convolution(
            call=call,
            stride=_each(stride, dimensions),
            padding=_each(padding, dimensions),
            dilation=_each(dilation, dimensions),
            is_transposed=True,
            output_padding=_each(output_padding, dimensions),
            groups=groups,
        )
        return Use(operator, input, weight, bias)

    return bind


def _each(value: Any, dimensions: int) -> tuple[int, ...]:
    """A number for every dimension, of one for all or a sequence."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dimensions if len(values) == 1 else values


def _padding(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...] | None:
    """On either side; None where one side has more than the other."""
    if padding == "valid":
        return (0,) * len(kernel)
    if padding != "same":
        return _each(padding, len(kernel))
    both = [step * (size - 1) for size, step in zip(kernel, dilation, strict=True)]
    return None if any(total % 2 for total in both) else tuple(total // 2 for total in both)


BINDINGS: Final[Mapping[Any, Callable[..., Use | None]]] = {
    F.linear: _linear,
    Tensor.matmul: _matmul,  # `@`, too
    torch.matmul: _matmul,
    Tensor.mm: _mm,
    torch.mm: _mm,
    Tensor.addmm: _addmm,
    torch.addmm: _addmm,
    torch.embedding: _embedding,
    **{call: _convolution(call, n) for n, call in enumerate((F.conv1d, F.conv2d, F.conv3d), 1)},
    **{
        call: _transposed(call, n)
        for n, call in enumerate((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), 1)
    },
}
"""By function of torch: what it was called with; None, or a `TypeError`, for a call that cannot be taken apart."""
