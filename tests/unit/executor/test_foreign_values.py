"""The equivalence check of models whose code uses other processes, or tensors that other stages have."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.executor.equivalence.check import EquivalenceResult, check_equivalence
from tests.support.measure import loaded_model, sgd

WIDTH = 8


def checked(build: Callable[[], nn.Module], build_optimizer: Callable[[Any], Any] = sgd) -> EquivalenceResult:
    """Return the result of the check of a model."""
    loaded = loaded_model(
        build, WIDTH, loss_fn=lambda output, _target: output.square().mean(), build_optimizer=build_optimizer
    )
    return check_equivalence(loaded, budget_s=30.0)


def block() -> nn.Module:
    """Return a layer with parameters."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class ReducesGradients(torch.autograd.Function):
    """Identity that sums gradients over processes if there are several."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        (gradient,) = gradients
        if dist.is_initialized():
            dist.all_reduce(gradient)
        return gradient


class Centered(nn.Module):
    """Layer that subtracts a moving mean; like DINO's, the mean is reduced over processes if there are several."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))
        self.layer = block()

    def forward(self, value: Tensor) -> Tensor:
        mean = value.detach().mean(0)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.center = 0.9 * self.center + 0.1 * mean
        return ReducesGradients.apply(self.layer(value - self.center))


class SharesWork(torch.optim.SGD):
    """Optimizer whose processes update some parameters each, and exchange them afterwards."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups if dist.is_initialized() else ():
            for number, parameter in enumerate(group["params"]):
                dist.broadcast(parameter.data, number % dist.get_world_size())
        return result


@pytest.mark.slow
def test_code_for_several_processes_runs_as_in_one() -> None:
    """Other ranks run other layers, so a collective operation of one layer would wait forever."""

    def build_optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return SharesWork(parameters, lr=0.1)

    proof = checked(lambda: nn.Sequential(block(), Centered(), block()), build_optimizer).proof
    assert (proof.cuts, proof.uncovered, proof.buffers) == (4, 0, 1)


class Chooses(nn.Module):
    """Returns one of its modules, which the model calls later."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = block(), block()

    def forward(self, value: Tensor) -> tuple[Tensor, nn.Module]:
        return self.layer(value), self.head


class CallsLater(nn.Module):
    """Calls the module that its first module returned after the others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = Chooses(), nn.ModuleList(block() for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        value, head = self.first(value)
        for layer in self.blocks:
            value = layer(value)
        return head(value)


@pytest.mark.slow
def test_a_module_that_a_module_returned_is_that_of_the_stage() -> None:
    """Stages called the module of the model whose layers were found, which has no values."""
    proof = checked(CallsLater).proof
    assert (proof.cuts, proof.uncovered, proof.gradients) == (4, 0, 10)


@pytest.mark.slow
def test_a_file_may_return_the_same_model_each_time() -> None:
    """Building a stage removes the parameters of other stages from the model."""
    model = CallsLater()
    assert checked(lambda: model).proof.cuts == 4


class Followed(nn.Module):
    """Model with a moving average of its weights, which the optimizer's hook updates."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(block(), block())
        self.target = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, value: Tensor) -> Tensor:
        return self.online(value) - self.target(value)


def assigned(target: Tensor, online: Tensor) -> None:
    """Replace the memory of the target."""
    target.data = 0.9 * target.data + 0.1 * online.data


def taken_over(target: Tensor, online: Tensor) -> None:
    """Let the target use the memory of the other parameter."""
    target.data = online.data


def in_place(target: Tensor, online: Tensor) -> None:
    """Write into the target."""
    with torch.no_grad():
        target.lerp_(online, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "why"),
    [
        pytest.param(assigned, r'computes with "\w+\.\d\.0\.\w+", which another stage has', marks=pytest.mark.nightly),
        (in_place, r'computes with "\w+\.\d\.0\.\w+", which another stage has'),
        (taken_over, r'replaces "target\.\d\.0\.\w+" by a tensor that another stage has'),
    ],
)
def test_a_step_that_mixes_parameters_of_two_stages_is_refused(
    update: Callable[[Tensor, Tensor], None], why: str
) -> None:
    """It gave NaN and the advice to lower the learning rate, or ended the process by SIGSEGV."""
    made: list[Followed] = []

    def build() -> nn.Module:
        made[:] = [Followed()]
        return made[0]

    def follow(*_: Any) -> None:
        for online, target in zip(made[0].online.parameters(), made[0].target.parameters(), strict=True):
            update(target, online)

    def build_optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)
        optimizer.register_step_post_hook(follow)
        return optimizer

    with pytest.raises(ModelError, match=why) as refused:
        checked(build, build_optimizer)
    assert "moving average" in refused.value.hint


class Recentered(nn.Module):
    """Model whose own code replaces the data of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        self.mean.data = value.detach().mean(0)
        for each in self.blocks:
            value = each(value) - self.mean
        return value


@pytest.mark.slow
def test_code_that_replaces_the_data_of_a_buffer_is_refused_with_advice() -> None:
    with pytest.raises(ModelError) as refused:
        checked(Recentered)
    assert "self.mean.data = x.mean(0)" in refused.value.hint
