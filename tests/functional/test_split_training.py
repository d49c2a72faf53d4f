"""Tests that training with split backward equals training of the unpipelined model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.functional.test_training import (
    AWKWARD,
    BRANCHING,
    EVERYDAY,
    FROZEN,
    LEFT_BEHIND,
    OVERFLOWING,
    SMALL,
    TRANSFORMER,
)
from tests.support.training import ROOT, Case, run_cases

pytestmark = pytest.mark.slow

HALVES = {"forward", "input backward", "weight backward"}


def results_of(cases: Sequence[Case], folder: Path) -> list[tuple[Case, dict[str, Any]]]:
    """Cases and their results; every process has run split backwards."""
    results = run_cases(cases, folder, ("split",))
    for result in results:
        assert all(set(kinds) >= HALVES for kinds in result["kinds"])
    return list(zip(cases, results, strict=True))


def test_two_stages_with_split_backward(tmp_path: Path) -> None:
    cases = [
        Case(
            model=TRANSFORMER,
            balance=(2, 2),
            settings=SMALL,
            recompute=recompute,
            schedule=schedule,
            later=later,
            micro_batches=8,
        )
        for recompute, schedule, later in (
            ("never", "gpipe", 99),
            ("except-last", "1f1b", 0),
            ("always", "gpipe", 2),
            ("layers", "1f1b", 3),
        )
    ]
    cases += [
        Case(model=EVERYDAY, balance=(5, 4), schedule="zb-h1", micro_batches=2),
        Case(model=LEFT_BEHIND, balance=(3, 5), recompute="always", schedule="1f1b", later=2, steps=2),
    ]
    for case, result in results_of(cases, tmp_path):
        assert result["split_loss"] < 1e-6, case
        assert result["split_gradient"] == 0.0, case
        assert result["split_buffer"] < 1e-6, case


@pytest.mark.nightly
def test_convolutions_with_split_backward(tmp_path: Path) -> None:
    model = ROOT / "tests/zoo/models/amoebanet_eval.py"
    case = Case(model=model, balance=(4, 5), recompute="layers", schedule="1f1b", later=3, micro_batches=8)
    ((_, result),) = results_of([case], tmp_path)
    assert result["split_loss"] < 1e-6
    assert result["split_gradient"] == 0.0


def test_three_stages_with_split_backward(tmp_path: Path) -> None:
    cases = [
        Case(
            model=model,
            balance=balance,
            settings=settings,
            recompute=recompute,
            schedule="1f1b",
            later=later,
            dtype=dtype,
            steps=2,
        )
        for model, balance, settings, recompute, later, dtype in (
            (AWKWARD, (1, 2, 5), (), "always", 1, ""),
            (BRANCHING, (3, 2, 2), (), "layers", 3, ""),
            (TRANSFORMER, (1, 2, 1), SMALL, "always", 1, "bf16-mixed"),
            (TRANSFORMER, (1, 2, 1), SMALL, "except-last", 2, "bf16"),
            (FROZEN, (3, 2, 2), (("frozen", "012"),), "never", 2, "bf16-mixed"),
            (FROZEN, (3, 2, 2), (("frozen", "345h"),), "always", 1, ""),
            (FROZEN, (3, 2, 2), (), "except-last", 1, "fp16-mixed"),
        )
    ]
    for case, result in results_of(cases, tmp_path):
        # What stages share is added up in another order than one model does it; and float16 is scaled.
        is_in_order = case.model not in {AWKWARD, BRANCHING} and case.dtype != "fp16-mixed"
        assert result["split_loss"] < (1e-3 if case.dtype == "fp16-mixed" else 1e-6), case
        assert result["split_relative"] <= (0.0 if is_in_order else 0.02 if case.dtype else 1e-5), case


def test_overflows_are_found_after_the_last_weight_gradient_pass(tmp_path: Path) -> None:
    case = Case(
        model=OVERFLOWING,
        balance=(1, 1, 1),
        schedule="1f1b",
        later=2,
        dtype="fp16-mixed",
        steps=4,
        seed=3,
        pieces=2,
        clip=0.01,
    )
    ((_, result),) = results_of([case], tmp_path)
    assert result["skipped"] == [[False, True, False, False]] * 3
    assert result["split_parameter"] < 1e-6
    assert result["split_norm"] < 1e-5


def test_smaller_mini_batches_run_a_part_of_the_action_order(tmp_path: Path) -> None:
    case = Case(
        model=EVERYDAY, balance=(5, 4), schedule="1f1b", later=1, batch=12, micro_batches=6, sizes=(12, 8), steps=2
    )
    ((_, result),) = results_of([case], tmp_path)
    assert result["split_all_relative"] == 0.0
    assert result["split_buffer"] < 1e-6


def test_split_backward_with_several_stages_per_rank(tmp_path: Path) -> None:
    common = {"chunks": 2, "steps": 2}
    cases = [
        Case(model=AWKWARD, balance=(1, 3, 2, 2), schedule="interleaved", recompute="always", later=3, **common),
        Case(
            model=TRANSFORMER,
            balance=(1, 1, 1, 1),
            settings=SMALL,
            schedule="zbv",
            recompute="except-last",
            **common,
        ),
        Case(model=TRANSFORMER, balance=(1, 1, 1, 1), settings=SMALL, schedule="interleaved-zb", **common),
        Case(model=AWKWARD, balance=(1, 3, 2, 2), schedule="v-half", recompute="always", **common),
        Case(model=TRANSFORMER, balance=(1, 1, 1, 1), settings=SMALL, schedule="v-min", **common),
        Case(model=TRANSFORMER, balance=(1, 1, 1, 1), settings=SMALL, schedule="dualpipev", **common),
        Case(
            model=EVERYDAY,
            balance=(2, 3, 2, 2),
            settings=(("dropout", 0.3),),
            batch=12,
            micro_batches=6,
            sizes=(12, 10, 4),
            evaluate=11,
            clip=0.3,
            schedule="zbv",
            **common,
        ),
    ]
    for case, result in results_of(cases, tmp_path):
        assert result["split_loss_relative"] < 1e-6, case
        assert result["split_relative"] < 1e-6, case
        assert result["split_buffer"] < 1e-6, case
        assert result["split_norm"] < 1e-5, case
        assert result.get("split_evaluated", 0.0) < 1e-5, case


def test_replicas_sum_gradients_after_the_last_weight_gradient_pass(tmp_path: Path) -> None:
    common = {"replicas": 2, "micro_batches": 2, "steps": 3}
    cases = [
        Case(model=TRANSFORMER, balance=(2, 2), settings=SMALL, schedule="1f1b", later=1, **common),
        Case(model=AWKWARD, balance=(1, 3, 2, 2), schedule="interleaved", chunks=2, later=99, **common),
        Case(model=AWKWARD, balance=(1, 3, 2, 2), schedule="zbv", chunks=2, **common),
        Case(model=FROZEN, balance=(3, 4), dtype="fp16-mixed", later=2, **common),
        Case(model=EVERYDAY, balance=(5, 4), batch=24, schedule="zb-h1", calls=2, clip=0.3, **common),
    ]
    for case, result in results_of(cases, tmp_path):
        assert result["replicas_differ"] == [], case
        assert result["split_norm"] < 1e-5, case
        assert result["split_loss_relative"] < (1e-3 if case.dtype else 1e-6), case
        assert result["split_relative"] <= (1e-5 if case.model == AWKWARD else 0.0), case
