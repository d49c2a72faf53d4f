"""Check that an optimizer steps a part of a model's parameters as it steps all of them."""

from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.model.optimizer_scope import check_optimizer, optimizer_step_check
from planner.model.optimizers import OPTIMIZERS, WholeModelOptimizer

MODEL = nn.Sequential(*[nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 12)) for _ in range(3)])


class ClippedSGD(torch.optim.SGD):
    """SGD that clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step(closure)


class OneStepSize(torch.optim.SGD):
    """SGD with a step size that is found from all gradients, as D-Adaptation and Prodigy do."""

    def step(self, closure: Any = None) -> None:
        own = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        self.param_groups[0]["lr"] = max(1e-6, 0.1 / float(torch.nn.utils.get_total_norm(own)))
        super().step(closure)


class SkipsLarge(torch.optim.SGD):
    """SGD that leaves out a step in which any gradient is large."""

    def step(self, closure: Any = None) -> None:
        own = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        if max(float(gradient.abs().max()) for gradient in own) < self.param_groups[0]["limit"]:
            super().step(closure)


class Lamb(torch.optim.SGD):
    """SGD with a trust ratio for each parameter."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(p.detach().norm() / p.grad.norm())
        super().step(closure)


class SlowWeights(torch.optim.SGD):
    """SGD with copies by position of the parameters that there are when it is built."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=False):
            p.data.lerp_(slow, 0.5)


class NoisySGD(torch.optim.SGD):
    """SGD with noise (Langevin dynamics)."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.data.add_(torch.randn_like(p), alpha=0.01)


class SkipsInfinite(torch.optim.SGD):
    """SGD that leaves out a step in which any gradient is not finite."""

    def step(self, closure: Any = None) -> None:
        own = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in own):
            super().step(closure)


class HalvesRates(torch.optim.SGD):
    """SGD that from the fifth step on halves all rates if any gradient is large."""

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["steps"] = group.get("steps", 0) + 1
        if group["steps"] > 5 and max(float(p.grad.abs().max()) for p in group["params"]) > 1.0:
            group["lr"] /= 2
        super().step(closure)


class LateClip(ClippedSGD):
    """SGD that begins to clip after 20 steps."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        (super() if self.steps > 20 else super(ClippedSGD, self)).step(closure)


class CountsInClass(torch.optim.SGD):
    """SGD with a count of steps in a class attribute, and a number that is not equal to itself."""

    steps, unused = 0, float("nan")

    def step(self, closure: Any = None) -> None:
        type(self).steps += 1
        super().step(closure)


class KeepsClass(torch.optim.SGD):
    """SGD with numbers in class attributes that `step` only reads."""

    limit, unused = 1, float("nan")

    def step(self, closure: Any = None) -> None:
        super().step(closure)


NUM_STEPS, LAST = 0, 0.0


class CountsInFile(torch.optim.SGD):
    """SGD with a count of steps in a variable of its file."""

    def step(self, closure: Any = None) -> None:
        global NUM_STEPS  # noqa: PLW0603 - as in the file of a user
        NUM_STEPS += 1
        super().step(closure)


class WritesToFile(torch.optim.SGD):
    """SGD that stores the time of a step in a variable of its file, which no step reads."""

    def step(self, closure: Any = None) -> None:
        global LAST  # noqa: PLW0603 - as in the file of a user
        super().step(closure)
        LAST = perf_counter()


class SmallRateClip(ClippedSGD):
    """SGD that clips when a scheduler has lowered the rate."""

    def step(self, closure: Any = None) -> None:
        (super() if self.param_groups[0]["lr"] < 0.01 else super(ClippedSGD, self)).step(closure)


class LateNoise(NoisySGD):
    """SGD with noise after 20 steps."""

    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        group["steps"] = group.get("steps", 0) + 1
        (super() if group["steps"] > 20 else super(NoisySGD, self)).step(closure)


class Unready(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("call `optimizer.train()` first")


def by_position(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return Adam with another rate for each parameter."""
    return torch.optim.Adam([{"params": [p], "lr": 0.1 * 0.9**n} for n, p in enumerate(parameters)])


def by_shape(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Return AdamW without weight decay for parameters that are no matrix."""
    both: tuple[list[Tensor], list[Tensor]] = ([], [])
    for p in parameters:
        both[p.ndim < 2].append(p)
    return torch.optim.AdamW([{"params": both[0]}, {"params": both[1], "weight_decay": 0.0}], foreach=True)


def limited(parameters: Iterable[Tensor], limit: float) -> torch.optim.Optimizer:
    return SkipsLarge([{"params": list(parameters), "limit": limit}], lr=1e-3)


def check(build: Callable[..., torch.optim.Optimizer]) -> None:
    check_optimizer(build, MODEL.parameters(), torch.device("cpu"))


@pytest.mark.parametrize(
    "build",
    [
        *OPTIMIZERS.values(),
        *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.ASGD),
        *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        *(by_position, by_shape, Lamb, KeepsClass, WritesToFile),
        lambda parameters: torch.optim.SGD(list(parameters)[-1:], lr=0.1),
    ],
)
def test_optimizers_that_step_each_parameter_alone_are_accepted(build: Callable[..., torch.optim.Optimizer]) -> None:
    """The check draws no random number and changes no parameter."""
    state, before = torch.get_rng_state(), [p.detach().clone() for p in MODEL.parameters()]
    check(build)
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, MODEL.parameters(), before))


class OwnAverage(torch.optim.SGD):
    """SGD that keeps the average of each parameter in an attribute of the parameter."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.average.lerp_(parameter.detach(), 0.1)


def with_averages(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    parameters = list(parameters)
    for parameter in parameters:
        vars(parameter).setdefault("average", torch.zeros_like(parameter, device="meta"))
    return OwnAverage(parameters, lr=0.1)


REFUSED = {
    "clip": (partial(ClippedSGD, lr=0.1), "ClippedSGD reads all parameters in `step", "`pipeline.clip_gradients("),
    "step size": (
        partial(OneStepSize, lr=0.1),
        "OneStepSize reads all parameters in `step",
        "`pipeline.clip_gradients(",
    ),
    # A stage with small gradients would step where the whole model does not.
    **{f"limit {n}": (partial(limited, limit=n), "reads all parameters", "") for n in (1e-2, 0.2, 10.0, 100.0)},
    "positions": (SlowWeights, "SlowWeights raised RuntimeError", "the parameters of one stage alone"),
    "closure": (torch.optim.LBFGS, "LBFGS needs a closure in `step", "`--optimizer adamw`"),
    # Copies of a tied weight would drift apart.
    "random numbers": (partial(NoisySGD, lr=0.1), "NoisySGD draws random numbers in `step", ""),
    "skipped steps": (SkipsInfinite, "SkipsInfinite reads all parameters", "skip steps by the norm"),
    "failing step": (Unready, r"Unready raised RuntimeError.*call `optimizer.train\(\)` first", ""),
    "tensor in an attribute": (with_averages, "OwnAverage raised", "of one stage alone"),
    "count in a file": (CountsInFile, 'CountsInFile changes "NUM_STEPS"', "`self.steps`"),
    "count in a class": (CountsInClass, 'CountsInClass changes "steps"', "`self.steps`"),
    "values": (
        lambda parameters: torch.optim.SGD([p for p in parameters if float(p.sum()) > 0], lr=0.1),
        "meta",
        "no values of other stages",
    ),
    "foreign tensor": (
        lambda parameters: torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(3))], lr=0.1),
        r"shape \[3\] that is not among the `parameters`",
        "",
    ),
    "fifth step": (partial(HalvesRates, lr=0.1), "HalvesRates reads all parameters", ""),
    "step 21": (partial(LateClip, lr=0.1), "LateClip reads all parameters", ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_optimizers_that_do_not_step_each_parameter_alone_are_refused(case: str) -> None:
    build, message, hint = REFUSED[case]
    with pytest.raises(ModelError, match=message) as refused:
        check(build)
    assert hint in refused.value.hint


def steps_until_refused(build: Callable[..., torch.optim.Optimizer], most: int, begun: int = 0) -> tuple[int, str]:
    """Step an optimizer of a part of the parameters, with a rate that falls; return the number of steps made."""
    parameters = list(MODEL.parameters())
    own = [nn.Parameter(p.detach().clone()) for p in parameters[:5]]
    optimizer = WholeModelOptimizer(build, parameters).build_for(zip(parameters, own, strict=False))
    optimizer.param_groups[0]["steps"] = begun
    watch = optimizer_step_check(optimizer, build, parameters)
    assert watch is not None
    for step in range(most):
        try:
            watch()
        except ModelError as error:
            return step, str(error)
        for p in own:
            p.grad = torch.randn_like(p)
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
    return most, ""


@pytest.mark.parametrize(
    ("kind", "begun", "steps", "message"),
    [
        pytest.param(LateClip, 0, 20, "from step 21 of this run on", id="count of steps"),
        pytest.param(SmallRateClip, 0, 22, "from step 23 of this run on", id="learning rate"),
        pytest.param(LateNoise, 0, 20, "draws random numbers", id="random numbers"),
        pytest.param(LateNoise, 15, 5, "draws random numbers", id="resumed run"),
        pytest.param(Lamb, 0, 30, "", id="independent"),
        pytest.param(Unready, 0, 0, "", id="cannot be compared"),
    ],
)
def test_a_run_is_refused_at_the_first_step_that_depends_on_other_parameters(
    kind: type[torch.optim.Optimizer], begun: int, steps: int, message: str
) -> None:
    made, said = steps_until_refused(partial(kind, lr=0.1), steps + (message != ""), begun)
    assert made == steps
    assert message in said


def test_random_draws_of_a_run_are_the_same_with_the_comparison_of_its_optimizer() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    optimizer = Lamb(MODEL.parameters(), lr=0.1)
    watch = optimizer_step_check(optimizer, partial(Lamb, lr=0.1), MODEL.parameters())
    assert watch is not None
    watch()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("build", OPTIMIZERS.values())
def test_steps_of_torchs_optimizers_need_no_comparison(build: Callable[..., torch.optim.Optimizer]) -> None:
    assert optimizer_step_check(build(MODEL.parameters()), build, MODEL.parameters()) is None


def test_optimizers_of_complex_parameters_are_accepted() -> None:
    parameters = [nn.Parameter(torch.zeros(3, dtype=torch.cfloat)) for _ in range(4)]
    check_optimizer(lambda given: torch.optim.AdamW(given, lr=0.1), parameters, torch.device("cpu"))


def test_raising_for_infinite_gradients_is_accepted() -> None:
    """It ends the run on every rank."""

    class Strict(SkipsInfinite):
        def step(self, closure: Any = None) -> None:
            torch.nn.utils.get_total_norm([p.grad for p in self.param_groups[0]["params"]], error_if_nonfinite=True)
            torch.optim.SGD.step(self, closure)

    check(Strict)


def test_optimizer_of_a_stage_drops_absent_parameters() -> None:
    """Groups stay, even if empty."""
    parameters = list(MODEL.parameters())

    def build(given: Iterable[Tensor]) -> torch.optim.Optimizer:
        named = [(f"p{n}", p) for n, p in enumerate(given)]
        return torch.optim.Adagrad([{"params": named[:3]}, {"params": named[3:], "lr": 0.5}])

    optimizer = WholeModelOptimizer(build, parameters).build_for([(parameters[n], parameters[n]) for n in (4, 5)])
    assert [group["params"] for group in optimizer.param_groups] == [[], parameters[4:6]]
    assert [group["param_names"] for group in optimizer.param_groups] == [[], ["p4", "p5"]]
    assert list(optimizer.state) == parameters[4:6]


def test_parameters_that_the_model_leaves_out_are_not_optimized() -> None:
    """A model may define `parameters` itself."""
    parameters = list(MODEL.parameters())
    optimizer = WholeModelOptimizer(OPTIMIZERS["sgd"], parameters[:2]).build_for([(p, p) for p in parameters[1:4]])
    assert optimizer.param_groups[0]["params"] == parameters[1:2]
