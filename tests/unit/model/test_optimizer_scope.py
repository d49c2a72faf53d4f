"""Which optimizers step a part of a model's parameters as they step all, and what is said of the others."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.model.optimizer_scope import check_optimizer
from planner.model.optimizers import OPTIMIZERS, ModelOptimizer

MODEL = nn.Sequential(*[nn.Sequential(nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 12)) for _ in range(3)])


class ClippedSGD(torch.optim.SGD):
    """SGD that clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip, then step."""
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step(closure)


class OneStepSize(torch.optim.SGD):
    """SGD with a step size that is found from all gradients, as D-Adaptation and Prodigy do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Find the step size, then step."""
        own = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        self.param_groups[0]["lr"] = max(1e-6, 0.1 / float(torch.nn.utils.get_total_norm(own)))
        super().step(closure)


class SkipsLarge(torch.optim.SGD):
    """SGD that leaves out a step in which any gradient is large."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Look at all gradients, then step or not."""
        own = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
        if max(float(gradient.abs().max()) for gradient in own) < self.param_groups[0]["limit"]:
            super().step(closure)


class Lamb(torch.optim.SGD):
    """SGD with a trust ratio for each parameter."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Scale each gradient, then step."""
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(p.detach().norm() / p.grad.norm())
        super().step(closure)


class SlowWeights(torch.optim.SGD):
    """SGD with copies by position of the parameters that there are when it is built."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step, then go halfway back."""
        super().step(closure)
        for p, slow in zip(self.param_groups[0]["params"], self.slow, strict=False):
            p.data.lerp_(slow, 0.5)


class NoisySGD(torch.optim.SGD):
    """SGD with noise (Langevin dynamics)."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step, then add noise."""
        super().step(closure)
        for p in self.param_groups[0]["params"]:
            p.data.add_(torch.randn_like(p), alpha=0.01)


def by_position(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Another rate for each parameter."""
    return torch.optim.Adam([{"params": [p], "lr": 0.1 * 0.9**n} for n, p in enumerate(parameters)])


def by_shape(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """No decay for what is no matrix."""
    both: tuple[list[Tensor], list[Tensor]] = ([], [])
    for p in parameters:
        both[p.ndim < 2].append(p)
    return torch.optim.AdamW([{"params": both[0]}, {"params": both[1], "weight_decay": 0.0}], foreach=True)


def check(build: Callable[..., torch.optim.Optimizer]) -> None:
    check_optimizer(build, MODEL.parameters(), torch.device("cpu"))


@pytest.mark.parametrize(
    "build",
    [
        *OPTIMIZERS.values(),
        *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.ASGD),
        *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.Rprop),
        lambda parameters: torch.optim.AdamW(parameters, fused=True),
        *(by_position, by_shape, Lamb),
        lambda parameters: torch.optim.SGD(list(parameters)[-1:], lr=0.1),
    ],
)
def test_what_steps_each_parameter_by_itself_is_accepted(build: Callable[..., torch.optim.Optimizer]) -> None:
    """And no random number is drawn, and no parameter changed."""
    state, before = torch.get_rng_state(), [p.detach().clone() for p in MODEL.parameters()]
    check(build)
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, MODEL.parameters(), before))


@pytest.mark.parametrize("build", [ClippedSGD, OneStepSize])
def test_what_looks_at_all_parameters_is_refused(build: Callable[..., torch.optim.Optimizer]) -> None:
    """A clip in `step()`, and a step size of all parameters."""
    with pytest.raises(ModelError, match=f"{build.__name__} reads all parameters in `step") as refused:
        check(lambda parameters: build(parameters, lr=0.1))
    assert "`pipeline.clip_gradients(max_norm)` in train.py" in refused.value.hint


@pytest.mark.parametrize("limit", [1e-2, 0.2, 10.0, 100.0])
def test_a_limit_on_the_largest_gradient_is_refused(limit: float) -> None:
    """A part whose gradients are small would step where the whole does not."""

    def build(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return SkipsLarge([{"params": list(parameters), "limit": limit}], lr=1e-3)

    with pytest.raises(ModelError, match=r"reads all parameters"):
        check(build)


def test_what_goes_by_position_in_step_is_refused() -> None:
    """Its lists are of the whole model, and a stage has a part of it."""
    with pytest.raises(ModelError, match="SlowWeights raised RuntimeError") as refused:
        check(SlowWeights)
    assert "the parameters of one stage alone" in refused.value.hint


def test_a_closure_is_refused() -> None:
    """LBFGS computes the loss several times in a step."""
    with pytest.raises(ModelError, match="LBFGS needs a closure in `step") as refused:
        check(torch.optim.LBFGS)
    assert "`--optimizer adamw`" in refused.value.hint


def test_noise_is_refused() -> None:
    """Ranks would draw other numbers than a plain loop, and the copies of a tied weight would drift apart."""
    with pytest.raises(ModelError, match="NoisySGD draws random numbers in `step"):
        check(lambda parameters: NoisySGD(parameters, lr=0.1))


class SkipsInfinite(torch.optim.SGD):
    """SGD that leaves out a step in which any gradient is not finite."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Look at all gradients, then step or not."""
        own = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in own):
            super().step(closure)


def test_a_skip_of_what_is_not_finite_is_refused() -> None:
    """A rank would skip a step that others take."""
    with pytest.raises(ModelError, match="SkipsInfinite reads all parameters") as refused:
        check(SkipsInfinite)
    assert "skip steps by the norm" in refused.value.hint


def test_complex_parameters_may_become_not_a_number() -> None:
    """Each by itself."""
    parameters = [nn.Parameter(torch.zeros(3, dtype=torch.cfloat)) for _ in range(4)]
    check_optimizer(lambda given: torch.optim.AdamW(given, lr=0.1), parameters, torch.device("cpu"))


def test_an_error_for_what_is_not_finite_is_allowed() -> None:
    """It ends the run on every rank."""

    class Strict(SkipsInfinite):
        """Raises instead."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Check all gradients."""
            torch.nn.utils.get_total_norm([p.grad for p in self.param_groups[0]["params"]], error_if_nonfinite=True)
            torch.optim.SGD.step(self, closure)

    check(Strict)


def test_a_step_that_fails_is_refused() -> None:
    """With what it said, which is often what to do."""

    class Unready(torch.optim.SGD):
        """Wants to be told that it trains."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Refuse."""
            raise RuntimeError("call `optimizer.train()` first")

    with pytest.raises(ModelError, match=r"Unready raised RuntimeError.*call `optimizer.train\(\)` first"):
        check(Unready)


def test_a_builder_that_reads_values_is_refused() -> None:
    """A rank has no values of other stages' parameters."""
    with pytest.raises(ModelError, match="meta") as refused:
        check(lambda parameters: torch.optim.SGD([p for p in parameters if float(p.sum()) > 0], lr=0.1))
    assert "no values of other stages" in refused.value.hint


def test_a_tensor_that_is_no_parameter_of_the_model_is_refused() -> None:
    """Its value would be in no checkpoint, and every rank would have one of its own."""
    with pytest.raises(ModelError, match=r"shape \[3\] that is not among the `parameters`"):
        check(lambda parameters: torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(3))], lr=0.1))


def test_absent_parameters_leave_their_groups_and_their_state() -> None:
    """Groups stay, empty or not; names in them are those of the parameters that are left."""
    parameters = list(MODEL.parameters())

    def build(given: Iterable[Tensor]) -> torch.optim.Optimizer:
        named = [(f"p{n}", p) for n, p in enumerate(given)]
        return torch.optim.Adagrad([{"params": named[:3]}, {"params": named[3:], "lr": 0.5}])

    optimizer = ModelOptimizer(build, parameters).build_for([(parameters[n], parameters[n]) for n in (4, 5)])
    assert [group["params"] for group in optimizer.param_groups] == [[], parameters[4:6]]
    assert [group["param_names"] for group in optimizer.param_groups] == [[], ["p4", "p5"]]
    assert list(optimizer.state) == parameters[4:6]


class HalvesRates(torch.optim.SGD):
    """SGD that from the fifth step on halves all rates if any gradient is large."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Look at all gradients, then step."""
        group = self.param_groups[0]
        group["steps"] = group.get("steps", 0) + 1
        if group["steps"] > 5 and max(float(p.grad.abs().max()) for p in group["params"]) > 1.0:
            group["lr"] /= 2
        super().step(closure)


def test_an_optimizer_that_looks_at_all_gradients_later_is_refused() -> None:
    """The last steps have large gradients in one part only."""
    with pytest.raises(ModelError, match="HalvesRates reads all parameters"):
        check(lambda parameters: HalvesRates(parameters, lr=0.1))


def test_parameters_that_the_model_leaves_out_are_not_optimized() -> None:
    """A model may have a method `parameters` of its own; a stage has the others, too."""
    parameters = list(MODEL.parameters())
    optimizer = ModelOptimizer(OPTIMIZERS["sgd"], parameters[:2]).build_for([(p, p) for p in parameters[1:4]])
    assert optimizer.param_groups[0]["params"] == parameters[1:2]
