"""Pipelined training computes what the unpipelined model computes."""

from pathlib import Path

import pytest

from tests.support.training import ROOT, Case, run_cases

pytestmark = pytest.mark.slow

TRANSFORMER = ROOT / "sample_models/transformer_lm.py"
AMOEBANET = ROOT / "tests/support/models/amoebanet_eval.py"
GPT2 = ROOT / "tests/support/models/tiny_gpt2.py"
LLAMA = ROOT / "tests/support/models/tiny_llama.py"
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


def test_interleaved(tmp_path: Path) -> None:
    """Several stages on a rank, which may share a parameter, recomputed as each one is planned."""
    pytest.importorskip("transformers")
    same = [
        Case(
            model=model,
            balance=balance,
            settings=settings,
            recompute=recompute,
            schedule="interleaved",
            chunks=len(balance) // 2,
            micro_batches=m,
            steps=2,
        )
        for model, balance, settings in (
            (TRANSFORMER, (1, 1, 1, 1), SMALL),
            (AWKWARD, (1, 3, 2, 2), ()),
            (AWKWARD, (1, 2, 1, 1, 1, 2), ()),
            (GPT2, (1, 1, 1, 2), ()),
            (LLAMA, (1, 1, 1, 2), ()),
            (BRANCHING, (1, 2, 2, 2), ()),
            (FROZEN, (2, 2, 2, 1), (("frozen", "012"),)),
        )
        for recompute, m in (("never", 4), ("except-last", 2), ("always", 4))
    ]
    mixed = Case(
        model=AMOEBANET,
        balance=(3, 3, 3, 3),
        recomputes=("always", "never", "except-last", "always"),
        schedule="interleaved",
        chunks=2,
    )
    cases = [*same, mixed]
    for case, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert result["split_loss_relative"] < 1e-6, case
        assert result["split_relative"] < 1e-6, case
        assert result["whole_gradient"] < 1e-5, case
        assert result["replicas_differ"] == [], case


def test_replicas(tmp_path: Path) -> None:
    """Gradients of the whole mini-batch, tied weights and overflows included; parameters stay equal to the bit."""
    pytest.importorskip("transformers")
    common = {"replicas": 2, "micro_batches": 2, "steps": 5}
    cases = [
        *(
            Case(model=TRANSFORMER, balance=(2, 2), settings=SMALL, recompute=recompute, schedule=schedule, **common)
            for recompute, schedule in (("never", "gpipe"), ("except-last", "1f1b"))
        ),
        Case(model=TRANSFORMER, balance=(1, 1, 1, 1), settings=SMALL, schedule="interleaved", chunks=2, **common),
        Case(model=AWKWARD, balance=(3, 5), recompute="always", **common),
        Case(model=AWKWARD, balance=(1, 3, 2, 2), schedule="interleaved", chunks=2, **common),
        Case(model=GPT2, balance=(2, 3), schedule="1f1b", **common),
        Case(model=FROZEN, balance=(3, 4), settings=(("frozen", "012"),), **common),
        Case(model=FROZEN, balance=(3, 4), dtype="fp16-mixed", **common),
        Case(model=TRANSFORMER, balance=(4,), settings=SMALL, replicas=4, micro_batches=2, steps=5),
        Case(model=TRANSFORMER, balance=(2, 2), settings=SMALL, devices=(1, 0), schedule="1f1b", **common),
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert result["replicas_differ"] == [], case
        precise = not case.dtype
        assert result["split_loss_relative"] < (1e-6 if precise else 1e-3), case
        assert result["split_relative"] < (1e-5 if precise else 0.02), case
