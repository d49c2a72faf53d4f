"""Pipelined training computes what the unpipelined model computes."""

from pathlib import Path

import pytest

from tests.support.training import ROOT, Case, run_cases

pytestmark = pytest.mark.slow

TRANSFORMER = ROOT / "sample_models/transformer_lm.py"
AMOEBANET = ROOT / "tests/support/models/amoebanet_eval.py"
GPT2 = ROOT / "tests/support/models/tiny_gpt2.py"
BRANCHING = ROOT / "tests/support/models/branching.py"
FROZEN = ROOT / "tests/support/models/frozen.py"
AWKWARD = ROOT / "tests/support/models/awkward.py"
SMALL = (("layers", 2), ("width", 32), ("feed_forward", 64), ("heads", 2), ("vocabulary", 64), ("tokens", 16))


def test_loss_and_gradients_equal_the_unpipelined_model(tmp_path: Path) -> None:
    """Both models of the GPipe paper, each recomputation, M = 1, 2, 4, 8; exact against the same micro-batches."""
    cases = [
        Case(model=model, balance=balance, settings=settings, recompute=recompute, micro_batches=m)
        for model, balance, settings in ((TRANSFORMER, (2, 2), SMALL), (AMOEBANET, (5, 7), ()))
        for recompute in ("never", "except-last", "always")
        for m in (1, 2, 4, 8)
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert result["whole_loss"] < 1e-5, case
        assert result["whole_gradient"] < 1e-5, case
        assert result["split_loss"] < 1e-6, case
        assert result["split_gradient"] == 0.0, case


def test_awkward_boundaries_tied_weights_and_three_stages(tmp_path: Path) -> None:
    """In-place first layers, views, integers, constants, untouched and unread tensors, tied weights; both schedules."""
    cases = [
        Case(model=AWKWARD, balance=balance, recompute=recompute, schedule=schedule, micro_batches=4, steps=3)
        for balance in ((1, 2, 5), (3, 2, 3), (5, 1, 2), (2, 4, 2))
        for recompute in ("never", "except-last", "always")
        for schedule in ("gpipe", "1f1b")
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert result["whole_loss"] < 1e-5, case
        assert result["whole_gradient"] < 1e-5, case
        assert result["whole_parameter"] < 1e-5, case


def test_models_that_are_no_sequential(tmp_path: Path) -> None:
    """Their own forward on every stage: keyword arguments, skips, tied and shared parameters, both schedules."""
    pytest.importorskip("transformers")
    cases = [
        Case(model=model, balance=balance, recompute=recompute, schedule=schedule, micro_batches=4, steps=2)
        for model, balance in ((BRANCHING, (1, 2, 4)), (BRANCHING, (3, 2, 2)), (GPT2, (2, 1, 2)))
        for recompute, schedule in (("never", "gpipe"), ("except-last", "gpipe"), ("always", "1f1b"))
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert result["whole_loss"] < 1e-5, case
        assert result["whole_gradient"] < 1e-5, case
        assert result["whole_parameter"] < 1e-4, case


@pytest.mark.parametrize("balance", [(2, 2), (1, 2, 1)], ids=["two", "three"])
def test_other_precisions(tmp_path: Path, balance: tuple[int, ...]) -> None:
    """Gradients are those of the unpipelined model in that precision: to the bit against the same micro-batches."""
    cases = [
        Case(
            model=TRANSFORMER,
            balance=balance,
            settings=SMALL,
            recompute=recompute,
            schedule=schedule,
            micro_batches=m,
            dtype=dtype,
        )
        for dtype in ("bf16-mixed", "bf16")
        for recompute in ("never", "except-last", "always")
        for schedule in ("gpipe", "1f1b")
        for m in (1, 2, 4)
        if schedule == "gpipe" or m >= len(balance)
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert result["split_loss"] < 1e-6, case
        assert result["split_gradient"] == 0.0, case
        assert result["whole_loss"] < 0.02, case
        assert result["whole_relative"] < 0.05, case


def test_float16_with_scaled_loss(tmp_path: Path) -> None:
    """The scale, a power of two, is gone from gradients and loss; several stages step alike."""
    cases = [
        Case(model=FROZEN, balance=(3, 2, 2), recompute=recompute, schedule=schedule, dtype="fp16-mixed", steps=3)
        for recompute, schedule in (("never", "gpipe"), ("except-last", "1f1b"), ("always", "gpipe"))
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert result["split_loss"] < 1e-3, case
        assert result["split_relative"] < 0.02, case
        assert result["split_parameter"] < 1e-2, case


def test_frozen_parameters(tmp_path: Path) -> None:
    """At either end, in the middle, whole stages: what is trained gets the gradients of the unpipelined model."""
    cases = [
        Case(
            model=FROZEN,
            balance=(3, 2, 2),
            settings=(("frozen", frozen),),
            recompute=recompute,
            schedule=schedule,
            dtype=dtype,
            steps=2,
        )
        for frozen in ("012", "34", "345h", "135", "01234")
        for recompute, schedule, dtype in (
            ("never", "1f1b", ""),
            ("except-last", "gpipe", ""),
            ("always", "gpipe", "bf16-mixed"),
            ("always", "1f1b", ""),
        )
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert result["split_gradient"] == 0.0, case
        assert result["split_parameter"] == 0.0, case
