"""Texts of model files as users write them, by kind; this project was not prepared for them."""

from dataclasses import dataclass
from pathlib import Path

from tests.zoo.unprepared import (
    architectures,
    autograd_hooks,
    backwards,
    caches,
    calls,
    conditions,
    containers,
    crossing,
    everyday,
    globals_,
    goals,
    gradients,
    hidden_state,
    hooks,
    late_effects,
    loops,
    losses,
    modules,
    objectives,
    objects,
    optimizers,
    popular,
    pretrained,
    random_draws,
    recipes,
    repositories,
    second_look,
    state,
    stepping,
    structures,
    techniques,
    tensor_kinds,
    ties,
    training_tricks,
    uncommon,
    updates,
    whole_batches,
    without_gradients,
)

__all__ = ["PRELUDE", "UnpreparedModel", "unprepared_models"]

PRELUDE = """
import copy
import functools
import math
import random
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

D = 8


def example_batch(n):
    x = torch.randn(n, D)
    return x, torch.tanh(x.flip(1))


def loss_fn(out, y):
    return F.mse_loss(out, y)


def build_optimizer(ps):
    return torch.optim.AdamW(ps, lr=1e-2)


def build_model():
    return Net()


class Block(nn.Module):
    def __init__(self, d=D):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class OneLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(D, D)


class OneBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
"""


@dataclass(frozen=True, kw_only=True)
class UnpreparedModel:
    """The text of a model file."""

    kind: str
    name: str
    text: str

    @property
    def is_unseeded(self) -> bool:
        """True if initial values come from a generator that no seed reaches."""
        return "default_rng()" in self.text

    @property
    def edits_the_loop(self) -> bool:
        """True if the file adds code to the training loop, which only training runs and can refuse."""
        return "class Loop" in self.text

    def write(self, folder: Path) -> Path:
        """Write the model file to a folder; return its path."""
        path = folder / f"{self.kind}_{self.name}.py"
        path.write_text(f"{PRELUDE}\n\n{self.text.strip()}\n", encoding="utf-8")
        return path


def unprepared_models() -> tuple[UnpreparedModel, ...]:
    """Return all models, kind by kind."""
    kinds = {
        "state": state,
        "globals": globals_,
        "hooks": hooks,
        "optimizers": optimizers,
        "ties": ties,
        "random": random_draws,
        "losses": losses,
        "structures": structures,
        "modules": modules,
        "tricks": training_tricks,
        "late": late_effects,
        "more": second_look,
        "batches": whole_batches,
        "calls": calls,
        "containers": containers,
        "crossing": crossing,
        "updates": updates,
        "conditions": conditions,
        "hidden": hidden_state,
        "gradients": gradients,
        "recipes": recipes,
        "popular": popular,
        "caches": caches,
        "objects": objects,
        "nodes": autograd_hooks,
        "kinds": tensor_kinds,
        "stepping": stepping,
        "objectives": objectives,
        "pretrained": pretrained,
        "everyday": everyday,
        "repositories": repositories,
        "techniques": techniques,
        "goals": goals,
        "loops": loops,
        "backwards": backwards,
        "detached": without_gradients,
        "uncommon": uncommon,
        "architectures": architectures,
    }
    return tuple(
        UnpreparedModel(kind=kind, name=name, text=text)
        for kind, module in kinds.items()
        for name, text in module.MODELS.items()
    )
