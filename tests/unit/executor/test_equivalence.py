"""Tests of the equivalence check, which verifies stages and removes wrong cuts."""

import math
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.executor.build import assembly
from planner.executor.equivalence import check, differences, rounds, subject
from planner.executor.equivalence.check import EquivalenceResult, check_equivalence
from planner.executor.equivalence.differences import largest_difference
from planner.executor.equivalence.isolation import ChildError, ChildProcess, run_in_child
from planner.model.cuts import PossibleCuts
from planner.model.nests import tensors_in
from planner.model.stand_ins import StandInFactory
from planner.profile.units import layer_digests
from tests.support.measure import loaded_model

WIDTH = 8


def checked(build: nn.Module | Callable[[], nn.Module], cuts: Sequence[int] | None = None) -> EquivalenceResult:
    """Return the result of the check of a model."""

    def loss_fn(output: Any, _target: Any) -> Tensor:
        return torch.stack([tensor.square().mean() for tensor in tensors_in(output)]).sum()

    loaded = loaded_model(build, WIDTH, loss_fn=loss_fn)
    return check_equivalence(loaded, budget_s=60.0, cuts=cuts)


def block() -> nn.Module:
    """Return two layers; each further layer takes a process of a check."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


class Scaled(nn.Module):
    """Scales outputs by parameters that have the width of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(3))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(3))

    def forward(self, value: Tensor) -> list[Tensor]:
        outputs = []
        for layer, head, scale in zip(self.blocks, self.heads, self.scales, strict=True):
            value = layer(value)
            outputs.append(F.relu(head(value)[..., None] * scale))
        return outputs


class DropsBetweenBlocks(nn.Module):
    """Adds two tensors and applies dropout between blocks, as in BioGPT, where the cut has the fewest bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = block(), block(), block()
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        first = self.first(value)
        both = F.dropout(first + self.second(value), 0.5, self.training)
        return self.head(self.third(both))


class _Notes:
    """State that modules share invisibly."""

    width = 0


class Writes(nn.Module):
    """Stores a number."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self.layer, self.notes = block(), notes

    def forward(self, value: Tensor) -> Tensor:
        self.notes.width = value.shape[1]
        return self.layer(value)


class Reads(Writes):
    """Computes with the stored number."""

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value) * 8 / self.notes.width


class Counts(nn.Module):
    """Counts its calls invisibly, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, times = block(), iter(range(1, 1000))
        self.again = lambda: next(times)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value) * self.again()


@pytest.mark.slow
def test_every_gradient_buffer_and_cut_is_compared() -> None:
    found = checked(lambda: nn.Sequential(block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), block()))
    assert (found.proof.layers, found.proof.cuts, found.proof.covers_recompute, found.warnings) == (6, 5, True, ())
    assert (found.proof.gradients, found.proof.buffers, found.proof.reason) == (6, 3, "")
    assert found.proof.worst < 1e-6
    assert str(found.proof).startswith(
        "verified against the unpartitioned model: loss, 6 gradients, 3 buffers, 5 of 5 cuts (also"
    )


@pytest.mark.slow
def test_later_stages_have_parameters_that_scale_earlier_outputs() -> None:
    found = checked(Scaled)
    assert (found.warnings, found.proof.covers_recompute) == ((), True)


@pytest.mark.slow
def test_dropout_between_modules_belongs_to_the_previous_layer() -> None:
    found = checked(DropsBetweenBlocks)
    assert (found.warnings, found.proof.cuts, found.proof.covers_recompute) == ((), 3, True)


@pytest.mark.slow
@pytest.mark.nightly
def test_zeros_in_place_of_a_parameter_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:

    def model_tensors(self: PossibleCuts, first: int, end: int) -> frozenset[str]:
        inside = (o.model_tensors for o in self.recording.operators if first <= o.time < end)
        return frozenset(n for names in inside for n in names) | self.crossing(first, used_before=end).model_tensors

    monkeypatch.setattr(PossibleCuts, "model_tensors", model_tensors)
    found = checked(Scaled)
    assert found.warnings
    assert all(", which another stage has" in warning for warning in found.warnings)
    monkeypatch.setattr(StandInFactory, "parameter", lambda _self, _name, tensor: torch.zeros(tensor.shape))
    found = checked(Scaled)
    assert found.warnings
    assert any(" differs by " in warning for warning in found.warnings)


@pytest.mark.slow
def test_cuts_between_modules_with_hidden_communication_are_removed() -> None:

    def build() -> nn.Module:
        notes = _Notes()
        return nn.Sequential(linear(), Writes(notes), linear(), Reads(notes))

    found = checked(build)
    assert found.proof.cuts == len(found.loaded.chain(build()).layers) - 1
    assert 0 < found.proof.cuts < 3
    assert all("cannot be cut after" in warning for warning in found.warnings)
    assert not found.proof.differs_recomputed


def test_models_without_correct_cuts_are_refused() -> None:

    def build() -> nn.Module:
        notes = _Notes()
        return nn.Sequential(Writes(notes), Reads(notes))

    with pytest.raises(ModelError, match="cannot be cut") as caught:
        checked(build)
    assert "forward" in caught.value.hint


@pytest.mark.slow
def test_layers_that_differ_when_run_again_are_not_recomputed() -> None:
    found = checked(lambda: nn.Sequential(linear(), Counts(), linear()))
    assert (found.warnings, found.proof.cuts, found.proof.covers_recompute) == ((), 2, False)
    assert "differs by" in found.proof.differs_recomputed


class TrainsItself(nn.Linear):
    """Takes a step in each forward, and returns a result without gradient, so that it is never recomputed alone."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(F.linear(x.detach(), self.weight).square().mean(), self.weight)
        self.weight.data.sub_(0.1 * gradient)
        return super().forward(x).detach()


@pytest.mark.slow
def test_layers_without_gradients_are_recomputed_with_later_layers() -> None:
    found = checked(lambda: nn.Sequential(*(TrainsItself(WIDTH, WIDTH) for _ in range(3)), linear()))
    assert (found.warnings, found.proof.cuts, found.proof.covers_recompute) == ((), 3, False)
    assert "differs by" in found.proof.differs_recomputed


class Chaotic(nn.Module):
    """Amplifies rounding errors, and uses another kernel without a graph."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(3e3 * (x if torch.is_grad_enabled() else x * (1 + self.error)) + self.shift)


@pytest.mark.slow
@pytest.mark.parametrize(("error", "recomputed"), [(3e-8, True), (1e-2, False)])
def test_other_kernels_without_autograd_are_accepted_up_to_rounding(error: float, *, recomputed: bool) -> None:
    found = checked(lambda: nn.Sequential(nn.Linear(8, 4), Chaotic(error), nn.Linear(4, 4)))
    assert found.proof.covers_recompute is recomputed
    assert found.proof.cuts == 2


def test_models_that_do_not_run_name_the_layer() -> None:
    with pytest.raises(ModelError, match="cannot be multiplied"):
        checked(lambda: nn.Sequential(nn.Linear(3, 3), block()))


def test_models_that_do_not_train_are_not_compared() -> None:

    def loss_fn(_output: Any, _target: Any) -> Tensor:
        raise ValueError("no such target")

    found = check_equivalence(
        loaded_model(lambda: nn.Sequential(block(), block()), WIDTH, loss_fn=loss_fn), budget_s=60.0
    )
    assert (found.proof.cuts, found.proof.covers_recompute) == (0, False)
    with pytest.raises(ModelError, match="cannot be compared with the model in a plain loop: ValueError: no such"):
        found.raise_if_failed()


@pytest.mark.slow
def test_rounding_errors_amplified_by_the_model_are_accepted(monkeypatch):
    monkeypatch.setattr(differences, "LIMIT", 0.0)
    assert checked(Scaled).proof.cuts > 0


@pytest.mark.slow
def test_the_check_does_not_change_the_model() -> None:
    model = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), linear())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    checked(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_stages_of_several_layers_can_be_checked() -> None:
    found = checked(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))), cuts=(2, 5))
    assert (found.proof.cuts, found.proof.layers) == (2, 6)


_COUNT = 0


class GloballyCounted(nn.Module):
    """Computes with a module-level count, which differs between processes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = block()

    def forward(self, value: Tensor) -> Tensor:
        global _COUNT  # noqa: PLW0603 - that is the fault
        _COUNT += 1
        return self.layer(value) * (1 + _COUNT % 7)


class NumpyMasked(nn.Module):
    """Draws a mask from NumPy's generator, and skips itself by Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = block()

    def forward(self, value: Tensor) -> Tensor:
        mask = torch.tensor(np.random.rand(WIDTH) > 0.3, dtype=torch.float32)  # noqa: NPY002 - as users do
        return self.layer(value) * mask if random.random() > 0.2 else value


class UnseededUse(nn.Module):
    """Uses a weight with unseeded initial values."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(value @ self.weight)


def unseeded() -> nn.Parameter:
    """Return a weight from an unseeded NumPy generator."""
    return nn.Parameter(torch.tensor(np.random.default_rng().normal(size=(WIDTH, WIDTH)) / 3, dtype=torch.float32))


class ClippingSGD(torch.optim.SGD):
    """An optimizer that clips by the norm of all gradients that it has."""

    def step(self, closure: Any = None) -> Any:
        # `clip_grad_norm_` would be refused before the comparison.
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            parameter.grad.mul_(0.01 / norm)
        return super().step(closure)


@pytest.mark.slow
@pytest.mark.nightly
def test_layers_with_a_module_level_count_stay_in_one_stage() -> None:
    found = checked(lambda: nn.Sequential(GloballyCounted(), GloballyCounted(), block()))
    assert "0" in found.loaded.uncut
    assert "1" not in found.loaded.uncut


@pytest.mark.slow
def test_optimizers_that_read_all_parameters_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """`profile` would refuse it earlier, and a run before its first step."""
    monkeypatch.setattr("planner.executor.pipeline.optimizer_step_check", lambda *_: None)
    loaded = loaded_model(
        lambda: nn.Sequential(linear(), linear()), WIDTH, build_optimizer=lambda ps: ClippingSGD(ps, lr=0.1)
    )
    with pytest.raises(ModelError, match="the updated parameter"):
        check_equivalence(loaded, budget_s=60.0)


@pytest.mark.slow
def test_draws_of_numpy_and_python_equal_those_of_a_plain_loop() -> None:
    found = checked(lambda: nn.Sequential(NumpyMasked(), NumpyMasked(), linear()))
    assert (found.warnings, found.proof.cuts, found.proof.covers_recompute) == ((), 2, True)


@pytest.mark.slow
@pytest.mark.nightly
def test_unseeded_initial_values_are_accepted() -> None:
    found = checked(lambda: nn.Sequential(UnseededUse(unseeded()), linear(), UnseededUse(unseeded())))
    assert (found.warnings, found.proof.covers_recompute) == ((), True)


@pytest.mark.slow
def test_tied_weights_with_different_initial_values_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:

    def build() -> nn.Module:
        weight = unseeded()
        return nn.Sequential(UnseededUse(weight), linear(), UnseededUse(weight))

    assert checked(build).warnings == ()
    monkeypatch.setattr(assembly, "equalize_copies", lambda *_args, **_options: None)
    with pytest.raises(ModelError, match="has different initial values on the stages"):
        checked(build)


@pytest.mark.slow
def test_a_counter_of_the_model_counts_a_recomputation_once() -> None:

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.calls = nn.ModuleList(block() for _ in range(3)), 0

        def forward(self, value: Tensor) -> Tensor:
            self.calls += 1
            for layer in self.blocks:
                value = layer(value) * (1 + self.calls % 5)
            return value

    found = checked(Counting)
    assert (found.warnings, found.proof.covers_recompute) == ((), True)


@pytest.mark.slow
def test_equal_cuts_are_compared_once() -> None:
    said: list[str] = []
    loaded = loaded_model(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(14))), WIDTH)
    found = check_equivalence(loaded, budget_s=60.0, digests=layer_digests, progress=said.append)
    assert (found.proof.cuts, found.proof.uncovered) == (13, 0)
    assert "comparing cuts 1 to 3 of 3" in said


class Stack(nn.Module):
    """Equal blocks that are no Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(8))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for layer in self.blocks:
            value = layer(value)
        return self.head(value)


@pytest.mark.slow
@pytest.mark.parametrize(
    "build",
    [
        Stack,
        pytest.param(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(9))), marks=pytest.mark.nightly),
    ],
)
def test_a_large_model_is_compared_without_most_of_its_repeated_layers(build, monkeypatch):
    """Fewer gradients than the model has cover all cuts."""
    monkeypatch.setattr(subject, "_MANY_PARAMETERS", 0)
    loaded = loaded_model(build, WIDTH)
    found = check_equivalence(loaded, budget_s=60.0, digests=layer_digests).proof
    assert (found.uncovered, found.cuts, found.covers_recompute) == (0, found.layers - 1, True)
    assert 0 < found.gradients < len(list(build().parameters()))


class Logarithms(Stack):
    """Trains only with its own initial values."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = nn.Parameter(torch.ones(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value + self.positive.log())


@pytest.mark.slow
def test_a_large_model_that_needs_its_own_initial_values_is_compared_with_them(monkeypatch):
    """Random values give an infinite loss. If memory does not suffice, the result says so."""
    monkeypatch.setattr(subject, "_MANY_PARAMETERS", 0)
    loaded = loaded_model(Logarithms, WIDTH)
    found = check_equivalence(loaded, budget_s=60.0, digests=layer_digests).proof
    assert (found.uncovered, found.cuts) == (0, found.layers - 1)
    monkeypatch.setattr(subject, "_LEAN_BYTES", 0)
    with pytest.raises(ModelError, match="the loss is nan in step 0"):
        check_equivalence(loaded, budget_s=60.0, digests=layer_digests)


def test_rounding_errors_are_measured_in_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def build() -> nn.Module:
        layers = nn.Sequential(block(), nn.Linear(WIDTH, WIDTH))
        nn.init.zeros_(layers[1].weight)
        return layers

    def note(_relative: Mapping[str, float], noise: Callable[[], Mapping[str, float]]) -> str:
        sizes = [size for what, size in noise().items() if what.startswith('the gradient of "0.')]
        (tmp_path / "sizes").write_text(" ".join(map(str, sizes)), encoding="utf-8")
        return ""

    monkeypatch.setattr(rounds, "largest_unexplained_difference", note)  # called in a process of its own
    check_equivalence(loaded_model(build, WIDTH), budget_s=60.0)
    sizes = [float(size) for size in (tmp_path / "sizes").read_text(encoding="utf-8").split()]
    assert sizes
    assert max(sizes) > 0


def test_nan_differs_from_every_number() -> None:
    nan, inf = math.nan, math.inf
    cases = [([nan, 1.0], [0.0, 1.0], inf), ([nan], [nan], 0.0), ([inf, 1.0], [inf, 3.0], 2.0), ([inf], [-inf], inf)]
    for value, right, difference in cases:
        assert largest_difference(torch.tensor(value), torch.tensor(right)) == difference
        assert largest_difference(torch.tensor(right), torch.tensor(value)) == difference
    assert largest_difference(torch.tensor([True, False]), torch.tensor([False, False])) == 1.0
    assert largest_difference(torch.tensor([1 + 1j]), torch.tensor([1 - 1j])) == 2.0


@pytest.mark.slow
def test_a_check_that_does_not_fit_in_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_MANY_PARAMETERS", 0)
    loaded = loaded_model(Stack, WIDTH)
    monkeypatch.setattr(subject, "_MOST_BYTES", 3_000)
    found = check_equivalence(loaded, budget_s=60.0, digests=layer_digests).proof
    assert (found.uncovered, found.states) == (0, 0)
    assert "the optimizer was not compared" in str(found)
    monkeypatch.setattr(subject, "_MOST_BYTES", 100)
    found = check_equivalence(loaded, budget_s=60.0, digests=layer_digests).proof
    assert (found.cuts, found.covers_recompute) == (0, False)
    assert "gradients take" in found.reason


@pytest.mark.slow
def test_cuts_beyond_the_time_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "_MOST_STAGES", 2)
    loaded = loaded_model(lambda: nn.Sequential(*(nn.Linear(WIDTH, n + 1) for n in range(WIDTH - 1, WIDTH))), WIDTH)
    assert check_equivalence(loaded, budget_s=60.0).proof.layers == 0  # a single layer
    loaded = loaded_model(lambda: nn.Sequential(block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)), WIDTH)
    found = check_equivalence(loaded, budget_s=1.0).proof
    assert found.cuts >= 1
    assert found.cuts + found.uncovered == 3
    assert (f"{found.uncovered} cut" in str(found)) is bool(found.uncovered)


@pytest.mark.slow
def test_debug_shows_the_traceback_of_a_check_process(monkeypatch, capfd) -> None:
    """Also of a process that a check process forks."""
    for arguments, is_shown in ((["gpipe-plan"], False), (["gpipe-plan", "--debug"], True)):
        monkeypatch.setattr("sys.argv", arguments)
        with pytest.raises(ChildError, match="division by zero"):
            run_in_child(lambda: run_in_child(lambda: 1 / 0, limit_s=60), limit_s=60)
        assert ("\nZeroDivisionError: division by zero\n" in capfd.readouterr().err) == is_shown


def test_a_killed_or_slow_check_process_is_reported() -> None:
    child = ChildProcess(lambda _connection: os.kill(os.getpid(), signal.SIGSEGV), limit_s=30)
    with pytest.raises(ChildError, match="ended by SIGSEGV"):
        child.result()
    child = ChildProcess(lambda _connection: time.sleep(60), limit_s=1)
    with pytest.raises(ChildError, match="did not finish within 1 s"):
        child.result()
    child = ChildProcess(lambda _connection: {}["missing"], limit_s=30)
    with pytest.raises(ChildError, match="KeyError: 'missing'"):
        child.result()
    child.end()


def test_the_reference_model_has_the_losses_of_a_plain_loop() -> None:
    loaded = loaded_model(lambda: nn.Sequential(block(), block()), WIDTH)
    losses = check.reference_losses(loaded, micro_batches=3, micro_batch_size=2, limit_s=60)
    torch.manual_seed(0)
    model = loaded.build()
    optimizer = loaded.build_optimizer(model.parameters())
    expected = []
    for step in range(2):
        torch.manual_seed(step)
        values = torch.randn(6, WIDTH)
        loss = torch.stack([loaded.loss_fn(model(part), None) / 3 for part in values.split(2)]).sum()
        loss.backward()
        expected.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_models_with_batch_deviation_are_checked_with_two_samples() -> None:
    """The standard deviation of one sample is NaN."""

    class Standardized(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            centered = value - value.mean(0)
            return centered / (centered.square().sum(0) / (len(value) - 1) + 0.1).sqrt()

    found = checked(lambda: nn.Sequential(linear(), Standardized(), linear()))
    assert found.proof.cuts == 2, found.proof.reason


def test_nan_losses_are_refused() -> None:

    class Overflows(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value.square().add(1).log().sub(1e6).log()

    with pytest.raises(ModelError, match="the loss is nan in step 0 of a plain loop"):
        checked(lambda: nn.Sequential(block(), block(), Overflows()))


class Grows(nn.Module):
    """Runs two blocks, and later all four."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.blocks, self.head, self.frozen = nn.ModuleList(block() for _ in range(4)), nn.Linear(WIDTH, 2), frozen
        self.calls = 0
        self.blocks.requires_grad_(not frozen)

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        if self.frozen and self.calls == 30:
            self.blocks.requires_grad_(True)
        for layer in self.blocks[: 2 if self.calls < 30 and not self.frozen else 4]:
            value = layer(value)
        return self.head(value)


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [False, True])
def test_models_that_change_their_path_later_are_refused(*, frozen: bool) -> None:
    with pytest.raises(ModelError, match="took another path than when it was profiled") as refused:
        checked(lambda: Grows(frozen=frozen))
    assert refused.value.hint.startswith("every step must run the same layers")


class Clamped(nn.Linear):
    """Clamps its weights, as critics of adversarial training do."""

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.2, 0.2)
        return super().forward(value)


@pytest.mark.slow
def test_weights_changed_in_place_by_forward_are_refused_with_a_hint() -> None:
    with pytest.raises(ModelError, match="modified by an inplace operation") as refused:
        checked(lambda: nn.Sequential(*(Clamped(WIDTH, WIDTH) for _ in range(3))))
    assert "a parameter in place: do it after the optimizer's step" in refused.value.hint


class Unmasked(nn.Module):
    """Writes into a buffer that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.width = block(), 2
        self.register_buffer("mask", torch.zeros(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        self.mask[: self.width] = 1
        self.width = min(WIDTH, self.width + 1)
        return value + self.layer(value) * self.mask


@pytest.mark.slow
@pytest.mark.nightly
def test_buffers_overwritten_before_backward_are_refused() -> None:
    with pytest.raises(ModelError, match="modified by an inplace operation"):
        checked(lambda: nn.Sequential(Unmasked(), linear(), Unmasked()))


class Mixes(nn.Module):
    """Draws a NumPy number at the start of its forward, and uses it between later blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = block(), block(), block()

    def forward(self, value: Tensor) -> Tensor:
        share = np.random.beta(0.5, 0.5)  # noqa: NPY002 - what users write
        value = self.second(self.first(value))
        return self.third(share * value + (1 - share) * value.flip(1))


@pytest.mark.slow
def test_draws_between_modules_are_equal_in_all_stages() -> None:
    found = checked(Mixes)
    assert (found.proof.cuts, found.warnings) == (2, ())


def test_parameters_before_a_detached_value_are_named() -> None:
    """A plain loop has no gradients of them; a boundary would send zeros."""

    class Detached(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            return super().forward(value.detach())

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Detached(WIDTH, WIDTH))
    loaded = loaded_model(model, WIDTH, build_optimizer=torch.optim.AdamW)
    with pytest.raises(ModelError, match=r'of "0.(bias|weight)", which gets no gradient in a plain loop \(freeze it'):
        check_equivalence(loaded, budget_s=60.0)
