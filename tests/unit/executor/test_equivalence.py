"""The equivalence check: right stages are verified, wrong cuts are found and removed."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.executor.equivalence import differences
from planner.executor.equivalence.check import Checked, check_equivalence
from planner.model.cuts import Cuts
from planner.model.nests import tensors_in
from planner.model.stand_ins import StandIns
from tests.support.measure import loaded_model

WIDTH = 8


def checked(build: nn.Module | Callable[[], nn.Module], ends: Sequence[int] | None = None) -> Checked:
    """What is found of a model."""

    def loss_fn(output: Any, _target: Any) -> Tensor:
        return torch.stack([tensor.square().mean() for tensor in tensors_in(output)]).sum()

    loaded = loaded_model(build, WIDTH, loss_fn=loss_fn)
    return check_equivalence(loaded, budget_s=60.0, ends=ends)


def block() -> nn.Module:
    """A layer with parameters."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Scaled(nn.Module):
    """Its outputs are scaled by parameters of its own, wherever in the model they are made, and wider for it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(3)) for _ in range(4))

    def forward(self, value: Tensor) -> list[Tensor]:
        outputs = []
        for layer, head, scale in zip(self.blocks, self.heads, self.scales, strict=True):
            value = layer(value)
            outputs.append(F.relu(head(value)[..., None] * scale))
        return outputs


class _Notes:
    """What modules leave to one another, behind everybody's back."""

    width = 0


class Writes(nn.Module):
    """Leaves a number behind."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__()
        self.layer, self.notes = block(), notes

    def forward(self, value: Tensor) -> Tensor:
        self.notes.width = value.shape[1]
        return self.layer(value)


class Reads(Writes):
    """Goes by that number."""

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value) * 8 / self.notes.width


class Counts(nn.Module):
    """Counts how often it has run, out of everybody's reach, and goes by that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, times = block(), iter(range(1, 1000))
        self.again = lambda: next(times)

    def forward(self, value: Tensor) -> Tensor:
        return self.layer(value) * self.again()


def test_a_right_model_is_proven_whole() -> None:
    """Every gradient, every cut, recomputed too; and the largest difference is a rounding error."""
    found = checked(lambda: nn.Sequential(block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), block()))
    assert (found.proof.layers, found.proof.cuts, found.proof.recomputed, found.warnings) == (6, 5, True, ())
    assert (found.proof.gradients, found.proof.buffers, found.proof.reason) == (6, 3, "")
    assert found.proof.worst < 1e-6
    assert str(found.proof).startswith(
        "verified against the unpartitioned model: loss, 6 gradients, 3 buffers, 5 of 5 cuts (also"
    )


def test_parameters_that_outputs_in_front_of_a_cut_read_are_there_behind_it() -> None:
    """A scale for every level of a detector."""
    found = checked(Scaled)
    assert (found.warnings, found.proof.recomputed) == ((), True)


def test_zeros_in_place_of_such_a_parameter_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stood there once: gradients of the stages behind were wrong, and nothing said so."""

    def holds(self: Cuts, first: int, end: int) -> frozenset[str]:
        inside = (o.holds for o in self.recording.operators if first <= o.time < end)
        return frozenset(n for names in inside for n in names) | self.crossing(first, used_before=end).holds

    monkeypatch.setattr(Cuts, "holds", holds)
    found = checked(Scaled)
    assert found.warnings
    assert all(", which another stage has" in warning for warning in found.warnings)
    monkeypatch.setattr(StandIns, "parameter", lambda _self, _name, tensor: torch.zeros(tensor.shape))
    found = checked(Scaled)
    assert found.warnings
    assert any(" differs by " in warning for warning in found.warnings)


def test_cuts_between_a_module_that_leaves_something_behind_and_its_reader_are_taken_out() -> None:
    """Of a Sequential, which is cut like any other module then; those in front and behind stay."""

    def build() -> nn.Module:
        notes = _Notes()
        return nn.Sequential(block(), Writes(notes), block(), Reads(notes), block())

    found = checked(build)
    assert found.proof.cuts == len(found.loaded.chain(build()).layers) - 1
    assert 0 < found.proof.cuts < 4
    assert all("cannot be cut behind" in warning for warning in found.warnings)
    assert not found.proof.differs_recomputed


def test_a_model_without_a_right_cut_is_refused() -> None:
    """With the reason, and what to do."""

    def build() -> nn.Module:
        notes = _Notes()
        return nn.Sequential(Writes(notes), Reads(notes))

    with pytest.raises(ModelError, match="cannot be cut") as caught:
        checked(build)
    assert "forward" in caught.value.hint


def test_what_comes_out_otherwise_when_it_is_run_again_must_not_be_recomputed() -> None:
    """The cuts are right all the same."""
    found = checked(lambda: nn.Sequential(block(), Counts(), block()))
    assert (found.warnings, found.proof.cuts, found.proof.recomputed) == ((), 4, False)
    assert "differs by" in found.proof.differs_recomputed


class Chaotic(nn.Module):
    """Makes much of a rounding error; where there is no graph, another kernel makes one (attention, for example)."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        """Waves."""
        return torch.sin(2e5 * (x if torch.is_grad_enabled() else x * (1 + self.error)) + self.shift)


@pytest.mark.parametrize(("error", "recomputed"), [(2.5e-7, True), (1e-2, False)])
def test_another_kernel_where_there_is_no_graph_is_no_other_computation(error: float, *, recomputed: bool) -> None:
    """As long as it differs by no more than rounding errors do."""
    found = checked(lambda: nn.Sequential(nn.Linear(8, 4), Chaotic(error), nn.Linear(4, 4)))
    assert found.proof.recomputed is recomputed
    assert found.proof.cuts == 2


def test_a_model_that_does_not_run_is_left_to_those_who_tell_it_better() -> None:
    """What it raises comes again when it is measured."""
    found = checked(lambda: nn.Sequential(nn.Linear(3, 3), block()))
    assert found.proof.cuts == 0
    assert "cannot be multiplied" in found.proof.reason


def test_rounding_errors_that_the_model_itself_makes_much_of_are_none_of_the_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held against what the model makes of parameters that are changed by as much."""
    monkeypatch.setattr(differences, "LIMIT", 0.0)
    assert checked(Scaled).proof.cuts > 0


def test_the_users_model_is_left_as_it_was() -> None:
    """Parameters, buffers and gradients of a finished model, and the random state."""
    model = nn.Sequential(block(), nn.BatchNorm1d(WIDTH), block())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    checked(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_stages_of_several_layers_can_be_asked_for() -> None:
    """As a plan has them."""
    found = checked(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))), ends=(2, 5))
    assert (found.proof.cuts, found.proof.layers) == (2, 6)
