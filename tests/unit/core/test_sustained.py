"""Compute rates of published runs by chip and kind of model, with error ranges."""

from dataclasses import replace

import pytest

import planner
from planner.core.judge.certainty import STEP_ERRORS, certainty_of
from planner.core.values.devices import ACCELERATORS
from planner.core.values.sustained import SUSTAINED, sustained_rate

DENSE = {"from_formula": "transformer", "layers": 4, "hidden": 64, "heads": 4, "sequence": 64, "vocabulary": 100}
EXPERTS = {**DENSE, "from_formula": "mixtral", "feed_forward": 64, "experts": 4, "experts_per_token": 2}


def test_rates_belong_to_known_accelerators() -> None:
    found = [sustained_rate(of.name, experts=experts) for of in ACCELERATORS for experts in (False, True)]
    assert set(SUSTAINED) <= {each for each in found if each is not None}
    assert sustained_rate("v100") is None
    assert sustained_rate("tpu:v4", experts=True) is None


def test_model_kind_without_runs_uses_another_rate_without_range() -> None:
    dense = sustained_rate("a100-80gb")
    assert dense is not None
    assert sustained_rate("a100-40gb", experts=True) == replace(dense, errors="")


@pytest.mark.parametrize(
    ("shape", "device", "more", "kind"),
    [
        (DENSE, "a100-80gb", {}, "A100"),
        (DENSE, "h100", {}, "H100"),
        (EXPERTS, "h100", {}, "few runs"),
        (EXPERTS, "a100-80gb", {}, None),
        (DENSE, "h100", {"rate": "380TFLOP/s"}, "rate"),
        (DENSE, "h100", {"dtype": "fp32"}, "peak"),
        (DENSE, "v100", {}, "peak"),
    ],
)
def test_predictions_have_the_error_range_of_their_rate(shape: dict, device: str, more: dict, kind: str | None) -> None:
    profile = planner.profile(**shape, device=f"estimate:{device}", batch_sizes="1", **more)
    plan = planner.solve(profile, devices=2, batch=4, schedule="gpipe")
    errors = None if kind is None else (STEP_ERRORS[kind].least, STEP_ERRORS[kind].most)
    assert certainty_of(plan, profile).step_ratio == errors


@pytest.mark.slow
def test_accuracy_mentions_token_exchange_of_divided_experts() -> None:
    alone, divided = (
        planner.profile(**EXPERTS, device="estimate:h100", batch_sizes="1", expert_parallel=groups) for groups in (1, 2)
    )
    plan = planner.solve(divided, devices=4, batch=4, replicas=2, schedule="gpipe")
    assert certainty_of(plan, divided).source.endswith("without more time to exchange tokens of experts")
    plan = planner.solve(alone, devices=4, batch=4, replicas=2, schedule="gpipe")
    assert "exchange" not in certainty_of(plan, alone).source
