"""Precisions of a model: the values of `--dtype`."""

from typing import Literal, get_args

Precision = Literal["", "fp32", "bf16", "bf16-mixed", "fp16-mixed"]
"""Value of `--dtype`; empty if the model runs as it is built.

`fp32`, `bf16`: floating-point parameters, buffers and inputs are converted. `…-mixed`: parameters stay as they are
built, and the layers run under `torch.autocast`.
"""

PRECISIONS: tuple[Precision, ...] = get_args(Precision)[1:]


def precision_of(dtype: str) -> Precision:
    """Return the value of `--dtype` for `environment.dtype` of a profile; empty if the option was not given."""
    return next((name for name in PRECISIONS if name == dtype), "")
