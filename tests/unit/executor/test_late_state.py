"""Tests that the equivalence check finds state that changes the training only after its own steps."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.executor.equivalence import check
from planner.executor.equivalence.check import EquivalenceResult, check_equivalence
from tests.support.measure import loaded_model

WIDTH = 8
LATE = 1000
"""Number of forwards from which on a layer computes something else."""

STATE = {"calls": 0}


def checked(build: Callable[[], nn.Module]) -> EquivalenceResult:
    """Return the result of the check of a model."""
    return check_equivalence(loaded_model(build, WIDTH, loss_fn=lambda out, _target: out.square().mean()), budget_s=60)


class Late(nn.Module):
    """Counts its forwards with a function, and computes something else when there were many."""

    mean: Any = 0.0

    def __init__(self, tick: Callable[["Late"], int]) -> None:
        super().__init__()
        self.layer, self.tick = nn.Linear(WIDTH, WIDTH), tick
        self.stats: dict[str, Any] = {"calls": 0}
        self.numbers = itertools.count(1)
        self.backwards: list[int] = []
        self.calls = 0

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.layer(value)) * (1.0 if self.tick(self) < LATE else 0.2)


def in_a_dict(layer: Late) -> int:
    layer.stats["calls"] += 1
    return layer.stats["calls"]


def by_iterator(layer: Late) -> int:
    return next(layer.numbers)


def in_the_file(_layer: Late) -> int:
    """Count in a module-level dict, for all layers."""
    STATE["calls"] += 1
    return STATE["calls"]


def read_from_the_file(_layer: Late) -> int:
    """Read what other layers count."""
    return STATE["calls"]


def of_backwards(layer: Late) -> int:
    """Read what a hook counts."""
    return len(layer.backwards)


def stores_in_a_dict(layer: Late) -> int:
    """Replace the number by a tensor."""
    layer.stats["calls"] = layer.layer.weight.detach().mean()
    return 0


def stores_in_the_class(layer: Late) -> int:
    """Replace a number that all layers may read by a tensor."""
    Late.mean = layer.layer.weight.detach().mean()
    return 0


def counts_nothing(_layer: Late) -> int:
    return 0


def layers(*ticks: Callable[[Late], int]) -> Callable[[], nn.Module]:
    """Return a model of layers that count by these functions, with linear layers between them."""
    return lambda: nn.Sequential(*(layer for tick in ticks for layer in (Late(tick), nn.Linear(WIDTH, WIDTH))))


@pytest.mark.slow
@pytest.mark.parametrize("tick", [in_a_dict, pytest.param(by_iterator, marks=pytest.mark.nightly)])
def test_a_layer_that_would_count_twice_is_not_recomputed(tick: Callable[[Late], int]) -> None:
    """Two steps show no difference."""
    found = checked(layers(tick, tick))
    assert found.warnings == ()
    assert found.proof.cuts == 3
    assert "the number" in found.proof.differs_recomputed


@pytest.mark.slow
@pytest.mark.parametrize("last", [pytest.param(in_the_file, marks=pytest.mark.nightly), read_from_the_file])
def test_layers_that_count_in_a_module_level_dict_stay_in_one_stage(last: Callable[[Late], int]) -> None:
    """Each process counts its own layers."""
    found = checked(layers(in_the_file, last))
    assert (found.proof.cuts, found.loaded.uncut) == (1, ("0", "1"))
    assert 'the module-level number "STATE.calls" differs' in found.warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tick", "number"),
    [
        pytest.param(in_a_dict, 'number "1.stats.calls"', marks=pytest.mark.nightly),
        (stores_in_a_dict, 'number "1.stats.calls"'),
        (stores_in_the_class, 'module-level number "Late.mean"'),
    ],
)
def test_layers_that_share_an_object_stay_in_one_stage(tick: Callable[[Late], int], number: str) -> None:
    """The second layer may read the changed value in a later call."""

    def build() -> nn.Module:
        first, last = Late(tick), Late(counts_nothing)
        last.stats = first.stats
        return nn.Sequential(first, last, nn.Linear(WIDTH, WIDTH))

    found = checked(build)
    assert found.proof.cuts == 1
    assert f'after "0": the {number} differs' in found.warnings[0]


def test_a_number_that_a_backward_changes_is_refused() -> None:
    """Stages run forwards of several micro-batches before the first backward."""

    def build() -> nn.Module:
        model = layers(of_backwards, of_backwards)()
        first: Any = model.get_submodule("0")
        first.layer.weight.register_hook(lambda _gradient: first.backwards.append(1))
        return model

    with pytest.raises(ModelError, match=r'a backward changes the number "0.backwards.length"') as refused:
        checked(build)
    assert "nonlocal" in refused.value.hint
    assert "`odeint_adjoint`" in refused.value.hint


@pytest.mark.slow
def test_hooks_that_count_in_a_shared_list_are_refused() -> None:
    """Each process counts its own parameters."""

    def build() -> nn.Module:
        model, calls = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), []
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: calls.append(1) or gradient)
        return model

    with pytest.raises(ModelError, match=r"hooks.0.calls.length"):
        checked(build)


class Lazy(nn.Module):
    """Makes its parameter in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_parameter("gain", None)

    def forward(self, value: Tensor) -> Tensor:
        if self.gain is None:
            self.gain = nn.Parameter(torch.ones(WIDTH))
        return self.layer(value) * self.gain


def test_parameters_that_the_first_forward_makes_are_refused() -> None:
    """The optimizer of a plain loop does not have them."""
    with pytest.raises(ModelError, match=r'`forward` makes the parameter "0.gain"') as refused:
        checked(lambda: nn.Sequential(Lazy(), Lazy()))
    assert "run the model once in `build_model`" in refused.value.hint


class Masked(nn.Module):
    """Makes its mask in the first forward."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mask", None, persistent=persistent)

    def forward(self, value: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.ones(WIDTH, WIDTH).tril()
        return self.layer(value) @ self.mask


def test_persistent_buffers_that_the_first_forward_makes_are_refused() -> None:
    """A checkpoint has them, and a new model cannot load them."""
    with pytest.raises(ModelError, match=r'`forward` makes the buffer "0.mask"') as refused:
        checked(lambda: nn.Sequential(Masked(persistent=True), Masked(persistent=True)))
    assert "`persistent=False`" in refused.value.hint
    checked(lambda: nn.Sequential(Masked(persistent=False), Masked(persistent=False)))


class Freezes(Late):
    """Stops training after ten forwards."""

    def forward(self, value: Tensor) -> Tensor:
        self.layer.weight.requires_grad_(in_a_dict(self) < 10)
        return super().forward(value)


def test_layers_that_freeze_themselves_later_are_refused() -> None:
    """A recomputed stage would fail, or send no gradient."""
    with pytest.raises(ModelError, match="took another path than when it was profiled: forward"):
        checked(lambda: nn.Sequential(Freezes(by_iterator), nn.Linear(WIDTH, WIDTH)))


class Skips(Late):
    """Returns its input in every other forward."""

    def forward(self, value: Tensor) -> Tensor:
        return value if in_a_number(self) % 2 else super().forward(value)


def in_a_number(layer: Late) -> int:
    layer.calls += 1
    return layer.calls


def test_recomputed_stages_whose_outputs_have_no_graph_are_accepted() -> None:
    """The first layer is skipped in some forwards."""
    found = checked(lambda: nn.Sequential(Skips(of_backwards), nn.Linear(WIDTH, WIDTH)))
    assert (found.proof.cuts, found.proof.differs_recomputed) == (1, "")


class Captures(nn.Module):
    """Reads what a hook of its first layer put into a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.features: dict[str, Tensor] = {}
        self.body[0].register_forward_hook(self.keep)

    def keep(self, _module: nn.Module, _args: Any, output: Tensor) -> None:
        self.features["first"] = output

    def forward(self, value: Tensor) -> Tensor:
        return self.body(value) + self.features["first"]


@pytest.mark.slow
def test_tensors_that_a_hook_stores_are_no_counter() -> None:
    """Stages delete them after they have run, a plain loop does not."""
    assert checked(Captures).proof.cuts


class Spiking(nn.Module):
    """Keeps its potentials in a dict, as numbers until the first time step, as modules of spikingjelly do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.memories: dict[int, Any] = dict.fromkeys(range(2), 0.0)

    def forward(self, value: Tensor) -> Tensor:
        self.memories.update(dict.fromkeys(range(2), 0.0))
        for index, layer in [*enumerate(self.layers)] * 2:
            self.memories[index] = value = (self.memories[index] + layer(value)).tanh()
        return value


@pytest.mark.slow
def test_entries_of_a_dict_may_begin_as_numbers() -> None:
    found = checked(Spiking)
    assert (found.proof.cuts, found.proof.differs_recomputed) == (3, "")


CENTER: dict[str, Any] = {"mean": 0.0}


class CountsInTensor(nn.Linear):
    """Counts in a tensor of a dict."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.held = held

    def forward(self, value: Tensor) -> Tensor:
        self.held["calls"] = self.held["calls"] + 1
        return super().forward(value) * (1.0 if float(self.held["calls"]) < LATE else 0.2)


COUNT = {"calls": torch.zeros(())}


def counted(_layer: Late) -> int:
    COUNT["calls"] = COUNT["calls"] + 1
    return int(COUNT["calls"])


@pytest.mark.slow
def test_layers_that_share_a_dict_of_tensors_stay_in_one_stage() -> None:
    """The stage is not recomputed, because it would count twice."""

    def build() -> nn.Module:
        held = {"calls": torch.zeros(())}
        return nn.Sequential(
            CountsInTensor(held), nn.Linear(WIDTH, WIDTH), CountsInTensor(held), nn.Linear(WIDTH, WIDTH)
        )

    found = checked(build)
    assert found.proof.cuts == 1
    assert 'the tensor "0.held.calls" differs' in found.proof.differs_recomputed


@pytest.mark.slow
def test_a_module_level_tensor_that_layers_change_is_refused() -> None:
    """Each process has its own."""
    with pytest.raises(ModelError, match=r'cannot be cut: after "0": a tensor made in 0'):
        checked(layers(counted, counted))


class Centered(nn.Linear):
    """Changes a module-level tensor if it has several samples."""

    def forward(self, value: Tensor) -> Tensor:
        if len(value) > 1:
            CENTER["mean"] = 0.5 * CENTER["mean"] + value.detach().mean(0)
        return super().forward(value - CENTER["mean"])


@pytest.mark.slow
def test_state_that_only_several_samples_change_is_found() -> None:
    """Micro-batches of the check have two samples."""
    with pytest.raises(ModelError, match="cannot be cut"):
        checked(lambda: nn.Sequential(Centered(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Centered(WIDTH, WIDTH)))


@pytest.mark.slow
def test_losses_that_compare_samples_are_checked_with_two_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample has no gradient in such a loss, so every stage would seem right."""
    monkeypatch.setattr(check, "is_large_model", lambda _chain: True)

    def loss_fn(output: Tensor, _target: Any) -> Tensor:
        return nn.functional.cross_entropy(output @ output.t(), torch.arange(len(output)))

    torch.manual_seed(0)  # with some parameters, the stages have no rounding errors either
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    found = check_equivalence(loaded_model(model, WIDTH, loss_fn=loss_fn), budget_s=60)
    assert found.proof.worst > 0


class Initializes(Late):
    """Has no gradient in the first forwards."""

    def __init__(self, forwards: int) -> None:
        super().__init__(in_a_number)
        self.forwards = forwards

    def forward(self, value: Tensor) -> Tensor:
        output = super().forward(value)
        return output.detach() if self.calls <= self.forwards else output


def test_gradients_that_begin_in_the_second_forward_are_accepted() -> None:
    """The stages find their shapes in two forwards."""
    found = checked(lambda: nn.Sequential(Initializes(1), nn.Linear(WIDTH, WIDTH)))
    assert found.proof.cuts == 1


def test_gradients_that_begin_in_the_third_forward_are_refused() -> None:
    """The next stage would not send them."""
    with pytest.raises(ModelError, match=r"requires a gradient now, but did not before \(let `build_model`"):
        checked(lambda: nn.Sequential(Initializes(2), nn.Linear(WIDTH, WIDTH)))


class Noisy(nn.Linear):
    """Draws random numbers from an unseeded generator."""

    def forward(self, value: Tensor) -> Tensor:
        noise = np.random.default_rng().normal(size=tuple(value.shape))
        return super().forward(value + torch.from_numpy(noise).to(value))


@pytest.mark.slow
def test_models_that_train_differently_every_time_are_refused() -> None:
    """The message does not blame the stages."""
    with pytest.raises(ModelError, match="trains differently every time, also in a plain loop"):
        checked(lambda: nn.Sequential(Noisy(WIDTH, WIDTH), Noisy(WIDTH, WIDTH)))


class Numbered(nn.Linear):
    """Scales its output by the number of instances that exist already."""

    count = 0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        Numbered.count += 1
        self.scale = 1 / Numbered.count

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) * self.scale


@pytest.mark.slow
def test_a_build_that_counts_instances_is_named_as_the_cause() -> None:
    with pytest.raises(ModelError, match=r'returns another model when it is called again: "0\.scale" is '):
        checked(lambda: nn.Sequential(Numbered(), Numbered()))


def test_a_build_that_returns_modules_of_an_earlier_call_is_named_as_the_cause() -> None:
    registry: list[nn.Module] = []

    def build() -> nn.Module:
        registry.extend(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        return nn.Sequential(*registry[:2])

    with pytest.raises(ModelError, match="it contains modules that the first call made"):
        checked(build)


def test_random_draws_in_a_backward_are_refused() -> None:
    """Every rank would draw other numbers."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
        return model

    with pytest.raises(ModelError, match="a backward draws random numbers") as refused:
        checked(build)
    assert "use `torch.utils.checkpoint` for a function that backward runs again" in refused.value.hint


def test_seeded_draws_in_a_backward_are_accepted() -> None:
    """Reversible layers rerun their forward with its seed."""

    def seeded(gradient: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(7)
        return gradient + torch.randn_like(gradient)

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        for parameter in model.parameters():
            parameter.register_hook(seeded)
        return model

    assert checked(build).proof.cuts == 1


class NeedsThreeSamples(nn.Linear):
    """Fails on the micro-batches of the check."""

    def forward(self, value: Tensor) -> Tensor:
        if 0 < len(value) < 3 and not value.is_meta:
            raise RuntimeError("three samples, please")
        return super().forward(value)


def test_a_model_that_does_not_run_in_a_plain_loop_is_refused() -> None:
    """Only a limit on time or memory leaves stages unverified."""
    found = checked(lambda: nn.Sequential(NeedsThreeSamples(WIDTH, WIDTH), NeedsThreeSamples(WIDTH, WIDTH)))
    with pytest.raises(ModelError, match="cannot be compared with the model in a plain loop: RuntimeError: th") as no:
        found.raise_if_failed()
    assert "--proof-budget 0s" in no.value.hint
