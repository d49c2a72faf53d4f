"""One of the models of `tests/support/real_models.py`, in training mode: dropout and batch normalisation work."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.real_models import REAL_MODELS, loss_of


def build_model(name: str = "GPT-2") -> nn.Module:
    """By its name there."""
    return REAL_MODELS[name].build().train()


def example_batch(batch_size: int, name: str = "GPT-2") -> tuple[Any, Tensor]:
    """Inputs with whatever the model calls them."""
    return REAL_MODELS[name].inputs(batch_size), torch.zeros(batch_size)


def loss_fn(output: Any, _target: Any) -> Tensor:
    """The model's own, where it has one; else a mean over the samples that every number has a part in."""
    if getattr(output, "loss", None) is not None:
        return loss_of(output)
    values = output.flatten(1)
    return (values * torch.cos(torch.arange(values.shape[1]))).mean()


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Plain gradient descent: its parameters show any wrong gradient."""
    return torch.optim.SGD(parameters, lr=0.01)
