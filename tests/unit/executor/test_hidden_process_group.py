"""The process group is hidden from the user's code, and only from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.executor.build.building import build_structure
from planner.executor.run.shapes import chain_shapes
from planner.model.load import load_model
from planner.model.process_group import hide_process_group, hide_process_group_in_step


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def test_the_group_is_visible_again_after_an_error() -> None:
    with pytest.raises(ValueError, match="not been initialized"), hide_process_group(), hide_process_group():
        dist.get_world_size()
    assert dist.get_world_size() == 1


def test_explicit_groups_work_in_the_block() -> None:
    """Gradients are summed over replicas while a backward of the model runs."""
    group = dist.new_group([0])
    with hide_process_group():
        dist.all_reduce(torch.ones(1), group=group)


def test_a_step_sees_no_group_and_is_counted_by_schedulers() -> None:
    seen: list[bool] = []
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    optimizer.register_step_post_hook(lambda *_: seen.append(dist.is_initialized()))
    before = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    hide_process_group_in_step(optimizer)
    after = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    optimizer.step()
    before.step()
    after.step()
    assert seen == [False]
    assert dist.is_initialized()


def test_a_skipped_step_does_nothing() -> None:
    """An optimizer of the user may count steps, even if no parameter has a gradient."""
    optimizer = torch.optim.SGD([parameter := nn.Parameter(torch.ones(1))], lr=1.0)
    parameter.grad = torch.ones(1)
    skipped = [True, False]
    hide_process_group_in_step(optimizer, is_skipped=lambda: skipped.pop(0))
    optimizer.step()
    assert parameter.tolist() == [1.0]
    optimizer.step()
    assert parameter.tolist() == [0.0]


@pytest.mark.parametrize("model", ["Asks()", "nn.Sequential(Asks(), nn.Linear(4, 4))"])
def test_finding_layers_and_shapes_sees_no_group(model: str, tmp_path: Path) -> None:
    """Libraries cache their first answer to `dist.is_initialized()`."""
    file = tmp_path / "model.py"
    file.write_text(ASKS.replace("MODEL", model), encoding="utf-8")
    loaded = load_model(str(file))
    chain_shapes(build_structure(loaded), torch.randn(2, 4))


ASKS = """
import torch
import torch.distributed as dist
from torch import nn


class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        assert not dist.is_initialized()
        return self.second(self.first(x))


def build_model():
    return MODEL


def example_batch(n):
    return torch.randn(n, 4), torch.randn(n, 4)


def loss_fn(out, y):
    return (out - y).square().mean()
"""
