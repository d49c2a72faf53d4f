"""Precisions of a model: the values of `--dtype`."""

from typing import Literal, get_args

Precision = Literal["", "fp32", "bf16", "bf16-mixed", "fp16-mixed"]
"""Value of `--dtype`; empty if the model runs as it is built.

`fp32`, `bf16`: floating-point parameters, buffers and inputs are converted. `…-mixed`: parameters stay as they are
built, and the layers run under `torch.autocast`.
"""

PRECISIONS: tuple[Precision, ...] = get_args(Precision)[1:]


def precision_option_of(dtype: str) -> Precision:
    """Return the value of the option `--dtype` that is equal to `dtype`; an empty string if there is none.

    The field `environment.dtype` of a profile is a value of `--dtype`. If the option was not given, the field is the
    data type of the parameters, such as `float32`.
    """
    return next((name for name in PRECISIONS if name == dtype), "")
