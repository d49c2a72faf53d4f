"""Replace errors of a model's code by errors with a hint on what to change."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from planner.core.errors import ModelError, PlannerError

_IN_PLACE = re.compile(r"in an in-place operation|modified by an inplace operation|to be modified inplace")

_NOT_ON_CPU = re.compile(r"\bon (the )?CPU\b|arguments from the 'CPU' backend")

_HIGHER_ORDER = re.compile(r"(?:HigherOrderOperator|HOP) (\w+) and mode")

_DTYPES = re.compile(r"self\.dtype|same dtype|scalar type|BFloat16")

_DTYPE_HINT = (
    "`--dtype bf16-mixed` and `fp16-mixed` run the model under `torch.autocast`, where some results have 16 bits: cast "
    "where dtypes must agree (`h.to(x.dtype)`); else check the dtypes of `example_batch`"
)

INPUT_HINT = (
    "check that `example_batch` fits the model (and the `--set` settings); a dict of inputs is passed as keyword "
    "arguments"
)

STAGE_HINT = (
    "the whole model runs, but not when it begins at this layer: let modules return what later code reads, instead of "
    "keeping it in hooks, closures or global variables, or use a larger `--proof-budget` to find and exclude such cuts"
)
"""Hint for an error of a stage, if the whole model runs without errors."""

_HOOK = "cannot register a hook on a tensor that doesn't require gradient"

_ONE_VALUE = "Expected more than 1 value per channel when training"


class RefusedLossError(ModelError):
    """Error for a loss that a pipeline cannot train."""


class TooFewSamplesError(ModelError):
    """Error that a micro-batch has too few samples for a layer. Larger micro-batches may work."""


def check_scalar_loss(loss: object) -> None:
    """Raise a `RefusedLossError` if a result of `loss_fn` is not a tensor with one element."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        hint = "return one loss, the mean over samples; print or log other losses within `loss_fn`"
        raise RefusedLossError(f"`loss_fn` returned {shape}, expected a scalar tensor", hint=hint)


def explain_error(where: str, error: BaseException, inputs: str, *, hint: str = INPUT_HINT) -> PlannerError:
    """Return an error with a hint, to be raised instead of `error`.

    Args:
        where: Name of the layer or the model, for the message.
        error: Error that the layer or the model raised. A `PlannerError` is returned unchanged.
        inputs: Description of the inputs, for the message.
        hint: Hint for errors without a specific hint.
    """
    if isinstance(error, PlannerError):
        return error
    refusal = _refusal_of_code(where, error)
    if refusal is not None:
        return refusal
    if "don't yet support saved tensor hooks" in str(error):
        return ModelError(
            f"{where} calls `torch.func.grad`, `vjp`, `jacrev` or `hessian`: what they save cannot be measured",
            hint="use `torch.autograd.grad(…, create_graph=True)` there; `torch.vmap` and `functional_call` can stay",
        )
    if isinstance(error, ValueError) and str(error).startswith(_ONE_VALUE):
        return TooFewSamplesError(
            f"{where} cannot train on {inputs}: batch normalization needs more than one value per channel",
            hint="take larger micro-batches only, `--batch-sizes 4,8` say, or a norm that is not over the batch",
        )
    return ModelError(
        f"{where} raised {type(error).__name__} on {inputs}: {_first_line(error)}",
        hint=_DTYPE_HINT if _DTYPES.search(str(error)) else hint,
    )


def control_flow_error(deviation: str) -> ModelError:
    """Return the error for a model that ran other code than when it was profiled."""
    return ModelError(
        f"the model took another path than when it was profiled: {deviation}",
        hint="every step must run the same layers and code: switch off what skips layers by chance or by the data; "
        "give each phase of a curriculum its own `--set` setting, profile and plan, and continue with `--weights`",
    )


def sparse_gradient_error(where: str) -> ModelError:
    """Return the error for a layer with sparse gradients; `where` describes the layer."""
    return ModelError(f"{where} makes sparse gradients, which are not supported", hint="build it with `sparse=False`")


@contextmanager
def explain_refusals(where: str) -> Iterator[None]:
    """Replace torch's errors about in-place writes and hooks, in the `with` block, by a `ModelError` with a hint."""
    try:
        yield
    except RuntimeError as error:
        refusal = _refusal_of_code(where, error)
        if refusal is None:
            raise
        raise refusal from error


def _refusal_of_code(where: str, error: BaseException) -> ModelError | None:
    if isinstance(error, RuntimeError) and str(error).startswith(_HOOK):
        return ModelError(
            f"{where} registers a hook on an activation, also where no gradients are computed: "
            "in evaluation, and in the first forward of recomputed layers",
            hint="register it only `if h.requires_grad:`, h being that tensor",
        )
    operator = _HIGHER_ORDER.search(str(error))
    if isinstance(error, NotImplementedError) and operator is not None:
        return ModelError(
            f"{where} calls the higher-order operator {operator[1]} of torch, whose inner operators cannot be recorded",
            hint="write a Python loop or condition there, or use `torch.where`",
        )
    if isinstance(error, NotImplementedError) and _NOT_ON_CPU.search(str(error)):
        return ModelError(
            f"{where} calls a function that does not run on the CPU: {_first_line(error)}",
            hint="`profile` also runs the model on the CPU, to compare its stages: call another function there if "
            "`x.device.type` is `cpu`, such as `scaled_dot_product_attention` instead of `flex_attention`",
        )
    if not isinstance(error, RuntimeError) or _IN_PLACE.search(str(error)) is None:
        return None
    return ModelError(
        f"{where} writes in place where torch's backward does not allow it: {_first_line(error)}",
        hint="make a new tensor there: `x = x + y` in place of `x += y`, `inplace=False` in activations",
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0].partition(" Hint: ")[0] if lines else ""
