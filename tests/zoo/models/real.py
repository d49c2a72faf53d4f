"""A model of `tests/zoo/real_models.py` in training mode, with dropout and batch norm."""

from typing import Any

import torch
from torch import Tensor, nn

from planner.model.nests import tensors_in
from tests.zoo.real_models import REAL_MODELS, loss_of


def build_model(name: str = "GPT-2") -> nn.Module:
    return REAL_MODELS[name].build().train()


def example_batch(batch_size: int, name: str = "GPT-2") -> tuple[Any, Tensor]:
    return REAL_MODELS[name].inputs(batch_size), torch.zeros(batch_size)


def loss_fn(output: Any, _target: Any) -> Tensor:
    """Return the model's own loss if it has one, else a mean over samples with every element."""
    if getattr(output, "loss", None) is not None:
        return loss_of(output)
    values = [tensor.flatten(1) for tensor in tensors_in(output) if tensor.is_floating_point()]
    # Squares, of which none takes another away: a loss close to zero would make much of its last digits.
    return torch.stack([(each * torch.cos(torch.arange(each.shape[1]))).square().mean() for each in values]).sum()


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD without momentum, which shows any wrong gradient."""
    return torch.optim.SGD(parameters, lr=0.01)
