"""Pipelined training computes what the unpipelined model computes."""

from pathlib import Path

import pytest

from tests.support.training import ROOT, Case, run_cases

pytestmark = pytest.mark.slow

TRANSFORMER = ROOT / "sample_models/transformer_lm.py"
AMOEBANET = ROOT / "tests/support/models/amoebanet_eval.py"
GPT2 = ROOT / "tests/support/models/tiny_gpt2.py"
BRANCHING = ROOT / "tests/support/models/branching.py"
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
