"""In which precision a model runs: what `--dtype` may ask for."""

from typing import Literal, get_args

Precision = Literal["", "fp32", "bf16", "bf16-mixed", "fp16-mixed"]
"""Empty: as the model is built. `fp32`, `bf16`: parameters, buffers and inputs that are floating-point are converted.

`…-mixed`: parameters stay as they are built, and the layers run under `torch.autocast`.
"""

PRECISIONS: tuple[Precision, ...] = get_args(Precision)[1:]


def precision_of(dtype: str) -> Precision:
    """What was asked for, from a profile's `environment.dtype`: else that is the dtype the model is built in."""
    return next((name for name in PRECISIONS if name == dtype), "")
