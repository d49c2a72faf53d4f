"""Optimizers by name, for models that do not build their own."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from planner.core.errors import UsageError

Builder = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Builder] = {
    "adafactor": torch.optim.Adafactor,
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
}


def optimizer_builder(user_builder: Callable[..., Any] | None, name: str) -> tuple[Builder, str]:
    """The user's `build_optimizer` if there is one, else the optimizer of that name; and what to call it.

    Raises:
        UsageError: No optimizer of that name.
    """
    if user_builder is not None:
        return user_builder, "build_optimizer"
    if name not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer `{name}`", hint=f"one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name], name
