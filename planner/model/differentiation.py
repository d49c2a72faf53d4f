"""Refuse calls of `torch.autograd.grad`, and silence torch's log, while a forward is recorded."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from planner.core.errors import ModelError


class DifferentiatesError(BaseException):
    """Signal that `torch.autograd.grad` is called; no `Exception`, so that the model's handlers do not catch it."""


@contextmanager
def refuse_autograd_grad() -> Iterator[None]:
    """Raise a `ModelError` if code in the `with` block calls `torch.autograd.grad`."""
    # A stage that runs this code again would lack parts of the autograd graph.
    grad = torch.autograd.grad
    torch.autograd.grad = _refuse
    try:
        yield
    except DifferentiatesError:
        raise ModelError(
            "`forward` calls `torch.autograd.grad`: a model that differentiates its own code cannot be cut",
            hint="make it an `nn.Sequential`, in which one child has this call and all modules that it differentiates",
        ) from None
    finally:
        torch.autograd.grad = grad


def _refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
    raise DifferentiatesError


@contextmanager
def without_fake_tensor_log() -> Iterator[None]:
    """Suppress torch's log of errors on tensors without values, such as wrong shapes. Torch still raises them."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
