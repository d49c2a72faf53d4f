"""Tests of tensors on several ranks: after training, copies are equal, and equal those of a plain loop."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from planner.model.load import load_model
from planner.model.seeding import example_mini_batch
from tests.support.ranks import run_ranks
from tests.support.training import Case, write_balance

WORKER = """
import torch
from planner.executor import Pipeline

pipeline = Pipeline("balance.yaml", seed=5)
optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
for step in range(2):
    with pipeline.step(*pipeline.own_part(*pipeline.example_batch(step))):
        optimizer.step()
        optimizer.zero_grad()
torch.save([dict(module.state_dict()) for module in pipeline.modules], f"{pipeline.rank}.pt")
pipeline.close()
"""

COMMON = """
import numpy as np
import torch
from torch import nn

class Product(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight
    def forward(self, value):
        return value @ self.weight

def example_batch(size):
    return torch.randn(size, 4), torch.randn(size, 4)

def loss_fn(output, target):
    return ((output - target) ** 2).mean()

def build_optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5)
"""

UNSEEDED = """
def drawn():
    return torch.from_numpy(np.random.default_rng().normal(size=(4, 4)).astype("float32"))

class Shifted(nn.Linear):
    def forward(self, value):
        return super().forward(value) + self.noise[0] * self.is_used

def build_model():
    tied, frozen = nn.Parameter(drawn()), nn.Parameter(drawn(), requires_grad=False)
    noise, is_used = drawn().T, drawn()[0] > 0
    model = nn.Sequential(*[layer for _ in range(2) for layer in (Product(tied), Shifted(4, 4), Product(frozen))])
    for layer in (model[1], model[4]):
        layer.register_buffer("noise", noise)
        layer.register_buffer("is_used", is_used)
    return model
"""


def trained(folder: Path, model: str, balance: tuple[int, ...], replicas: int = 1) -> list[dict[str, Tensor]]:
    """Return the state dicts of all ranks after two steps."""
    (folder / "model.py").write_text(COMMON + model)
    (folder / "worker.py").write_text(WORKER)
    case = Case(model=folder / "model.py", balance=balance, replicas=replicas, micro_batches=2)
    write_balance(case, folder / "balance.yaml")
    run_ranks(case.num_processes, ["worker.py"], folder)
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(case.num_processes)]
    return [{name: tensor for module in modules for name, tensor in module.items()} for modules in ranks]


def in_a_plain_loop(folder: Path, micro_batches: int = 2) -> dict[str, Tensor]:
    """Return the state dict of the same model after the same two steps in one process."""
    loaded = load_model(str(folder / "model.py"))
    torch.manual_seed(5)
    model = loaded.build()
    optimizer = loaded.build_optimizer(model.parameters())
    for step in range(2):
        batch: Any = example_mini_batch(loaded, 8, seed=5, step=step)
        for inputs, targets in zip(batch.inputs.chunk(micro_batches), batch.targets.chunk(micro_batches), strict=True):
            (loaded.loss_fn(model(inputs), targets) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_with_unseeded_initial_values_are_equal(tmp_path: Path, replicas: int) -> None:
    """Compare parameters, frozen parameters and buffers across stages and replicas."""
    ranks = trained(tmp_path, UNSEEDED, (3, 3), replicas)
    for earlier, later in product(ranks[::2], ranks[1::2]):
        for name in ("0.weight", "2.weight", "1.noise", "1.is_used"):
            layer, _, attribute = name.partition(".")
            assert torch.equal(earlier[name], later[f"{int(layer) + 3}.{attribute}"]), name
    for rank in range(2):
        assert all(torch.equal(own[n], t) for own in ranks[rank::2] for n, t in ranks[rank].items())


UNUSED = """
class Unused(Product):
    def forward(self, value):
        return value @ self.weight.detach()

def build_model():
    tied = nn.Parameter(torch.randn(4, 4))
    return nn.Sequential(Unused(tied), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), Unused(tied), nn.Linear(4, 4))
"""


HOOKED = """
def build_model():
    tied = nn.Parameter(torch.randn(4, 4))
    tied.register_hook(lambda gradient: -0.5 * gradient)
    model = nn.Sequential(Product(tied), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), Product(tied))
    model[3].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return model
"""


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("model", "balance", "tolerance"),
    [
        # AdamW skips a parameter only if its gradient is None.
        pytest.param(UNUSED, (3, 3), 1e-6, id="tied parameter without a gradient"),
        # Any hook on a weight of one layer, and an additive one on each copy of a tied weight.
        pytest.param(HOOKED, (3, 2), 1e-5, id="hooks"),
    ],
)
def test_parameters_are_trained_as_in_a_plain_loop(model, balance, tolerance, replicas, tmp_path):
    ranks = trained(tmp_path, model, balance, replicas)
    expected = in_a_plain_loop(tmp_path, 2 * replicas)
    for own in ranks:
        for name, tensor in own.items():
            torch.testing.assert_close(tensor, expected[name], rtol=tolerance, atol=tolerance / 10, msg=name)
