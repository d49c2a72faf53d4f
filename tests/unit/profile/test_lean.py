"""Models built without parameters, and changes of a model since it was profiled."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.values.profile import Profile
from planner.model.chain import chain_of
from planner.model.lean import allocate_parameters, build_lean
from planner.model.load import LoadedModel
from planner.profile import profiler
from planner.profile.structure import find_chain, model_changes
from planner.profile.units import trace_layers
from tests.support.measure import loaded_model, profile_of_model
from tests.zoo.real_models import REAL_MODELS


def mlp(width: int = 16, *, tied: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, width))
    if tied:
        model[3].weight = model[2].weight
    return model


def load_real(name: str) -> LoadedModel:
    """Load one of the real models."""
    known = REAL_MODELS[name]
    return loaded_model(known.build, known.inputs)


def test_a_lean_model_has_shapes_and_buffers_and_no_weights() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8, bias=False))
        model[2].weight = model[0].weight
        model[1].weight.requires_grad_(False)
        return model

    lean, whole = build_lean(build), build()
    assert all(parameter.is_meta for parameter in lean.parameters())
    for (name, a), (other, b) in zip(lean.named_parameters(), whole.named_parameters(), strict=True):
        assert (name, a.shape, a.dtype, a.requires_grad) == (other, b.shape, b.dtype, b.requires_grad)
    assert lean[2].weight is lean[0].weight
    assert torch.equal(lean[1].running_var, torch.ones(8))
    assert not any(parameter.is_meta for parameter in build().parameters())  # only while it lasts


def test_one_parameter_under_two_names_stays_one() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = nn.Parameter(torch.randn(4, 4))
            self.a, self.b = weight, weight

    model = build_lean(Twice)
    assert model.a is model.b
    assert model.a.is_meta


def test_only_allocated_layers_have_values() -> None:
    model = build_lean(lambda: mlp(tied=True))
    allocate_parameters([model[2]], model, torch.device("cpu"))
    assert model[3].weight is model[2].weight
    assert model[2].weight.isfinite().all()
    assert model[2].weight.std() > 0
    assert model[0].weight.is_meta
    assert model[3].bias.is_meta


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPT-2", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("T5", "Swin"))])
def test_lean_and_whole_models_have_the_same_profile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except for times."""

    def whole(loaded: LoadedModel, device: torch.device) -> Any:
        return loaded.chain(loaded.build().to(device)), False

    loaded = load_real(name)
    assert find_chain(loaded, torch.device("cpu"))[1]
    lean = profile_of_model(loaded, sizes=(2,))
    monkeypatch.setattr(profiler, "find_chain", whole)
    other = profile_of_model(loaded, sizes=(2,))
    assert lean.model.digest == other.model.digest
    for a, b in zip(lean.layers, other.layers, strict=True):
        assert (a.name, a.parameter_bytes, a.buffer_bytes, a.tied) == (
            b.name,
            b.parameter_bytes,
            b.buffer_bytes,
            b.tied,
        )
        assert a.detail == b.detail
        assert a.optimizer_bytes == b.optimizer_bytes


def test_a_model_whose_path_depends_on_values_is_built_whole() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, value: Tensor) -> Tensor:
            for block in self.blocks:
                value = block(value)
            return value if float(value.detach().abs().sum()) >= 0 else -value

    chain, lean = find_chain(loaded_model(Gate), torch.device("cpu"))
    assert not lean
    assert len(chain.layers) == 3


# ---- is it still the profiled model?


def profile_mlp(width: int) -> Profile:
    return profile_of_model(loaded_model(lambda: mlp(width)), sizes=(2,))


def test_other_weights_are_no_change() -> None:
    assert model_changes(loaded_model(mlp), profile_mlp(16)) == ()


def test_a_wider_layer_is_reported_with_both_sizes() -> None:
    changes = {change.layer: change.message for change in model_changes(loaded_model(lambda: mlp(32)), profile_mlp(16))}
    assert set(changes) == {"0", "1", "2", "3"}
    assert changes["0"] == "has 1.12 KiB of parameters, 576 B when profiled"
    assert changes["1"] == "computes something else than when it was profiled"


def test_new_and_missing_layers_are_reported() -> None:
    def longer() -> nn.Sequential:
        return nn.Sequential(*mlp(), nn.Tanh())

    assert [
        (c.layer, c.message) for c in model_changes(loaded_model(longer), profile_mlp(16)) if c.message == "is new"
    ] == [("4", "is new")]
    before = profile_of_model(loaded_model(longer), sizes=(2,))
    changes = [(c.layer, c.message) for c in model_changes(loaded_model(mlp), before)]
    assert ("4", "was profiled, but is missing now") in changes


def test_a_changed_dropout_rate_is_reported() -> None:
    """No layer has other operators."""

    def dropping(share: float) -> nn.Sequential:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(share), nn.Linear(8, 8))

    before = profile_of_model(loaded_model(lambda: dropping(0.1)), sizes=(2,))
    changes = model_changes(loaded_model(lambda: dropping(0.2)), before)
    assert changes
    assert {change.layer for change in changes} <= {"", "1"}


def test_other_operators_in_the_same_layers_are_reported() -> None:
    """They are not compared with a profile of another device or of another version of torch, whose operators differ."""

    def scaled(factor: float) -> nn.Sequential:
        class Scale(nn.Module):
            def forward(self, value: Tensor) -> Tensor:
                return value * factor

        return nn.Sequential(nn.Linear(8, 8), Scale(), nn.Linear(8, 8))

    loaded, before = loaded_model(lambda: scaled(3.0)), profile_of_model(loaded_model(lambda: scaled(2.0)), sizes=(2,))
    assert [(c.layer, c.message) for c in model_changes(loaded, before)] == [
        ("1", "computes something else than when it was profiled")
    ]
    environment = replace(before.environment, torch="2.8.0")
    assert model_changes(loaded, replace(before, environment=environment)) == ()
    assert model_changes(loaded, replace(before, device=replace(before.device, kind="cuda"))) == ()


def test_layers_that_draw_indices_are_not_compared() -> None:
    """Their operators have other numbers in each trace."""

    class Shuffled(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value * float(torch.rand(()))

    model = loaded_model(lambda: nn.Sequential(nn.Linear(8, 8), Shuffled(), nn.Linear(8, 8)))
    assert model_changes(model, profile_of_model(model, sizes=(2,))) == ()


def test_traces_on_ghosts_and_on_values_have_the_same_units() -> None:
    loaded = loaded_model(mlp)
    values, ghosts = (
        trace_layers(chain_of(loaded.build()), loaded, 2, torch.device("cpu"), ghosts=on) for on in (False, True)
    )
    assert [unit.digest for unit in values[0]] == [unit.digest for unit in ghosts[0]]
    for key, given in values[1].items():
        assert [v.shape for v in given.values] == [v.shape for v in ghosts[1][key].values]


@pytest.mark.slow
def test_a_layer_lists_all_of_its_modules_in_order() -> None:
    """Other engines must place every module."""
    profile = profile_of_model(load_real("GPT-2"), sizes=(2,))
    listed = [path for layer in profile.layers for path in (layer.modules or (layer.name,))]
    assert listed == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.drop",
        *(f"transformer.h.{n}" for n in range(4)),
        "transformer.ln_f",
        "lm_head",
    ]
