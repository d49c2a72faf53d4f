"""Tests that pipelined training equals training of the unpipelined model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from planner.core.values.plan import Recompute
from tests.support.training import ROOT, Case, run_cases
from tests.zoo.real_models import REAL_MODELS

pytestmark = pytest.mark.slow

TRANSFORMER = ROOT / "sample_models/transformer_lm.py"
GPT2 = ROOT / "tests/zoo/models/tiny_gpt2.py"
LLAMA = ROOT / "tests/zoo/models/tiny_llama.py"
BRANCHING = ROOT / "tests/zoo/models/branching.py"
FROZEN = ROOT / "tests/zoo/models/frozen.py"
AWKWARD = ROOT / "tests/zoo/models/awkward.py"
EVERYDAY = ROOT / "tests/zoo/models/everyday.py"
OVERFLOWING = ROOT / "tests/zoo/models/overflowing.py"
LEFT_BEHIND = ROOT / "tests/zoo/models/left_behind.py"
REAL = ROOT / "tests/zoo/models/real.py"
SMALL = (("layers", 2), ("width", 32), ("feed_forward", 64), ("heads", 2), ("vocabulary", 64), ("tokens", 16))

Rows = Sequence[tuple[Any, ...]]
"""Values of cases."""
SOME = ("always", "nightly")
"""Names of two groups of cases."""


def test_loss_and_gradients_equal_the_unpipelined_model(tmp_path: Path) -> None:
    """Exactly equal to the same micro-batches in one process, for each recomputation and M = 1, 2, 4, 8."""
    cases = [
        Case(model=TRANSFORMER, balance=(2, 2), settings=SMALL, recompute=recompute, micro_batches=m)
        for recompute, m in (("except-last", 1), ("except-last", 2), ("never", 4), ("always", 8))
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert result["whole_loss"] < 1e-5, case
        assert result["whole_gradient"] < 1e-5, case
        assert result["split_loss"] < 1e-6, case
        assert result["split_gradient"] == 0.0, case


@pytest.mark.parametrize(
    "rows",
    [
        (((1, 2, 5), "never", "gpipe"), ((3, 2, 3), "except-last", "1f1b"), ((2, 4, 2), "always", "1f1b")),
        pytest.param(
            (((5, 1, 2), "always", "gpipe"), ((5, 1, 2), "never", "1f1b"), ((2, 4, 2), "except-last", "gpipe")),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=SOME,
)
def test_unusual_boundary_tensors_and_tied_weights_on_three_stages(tmp_path: Path, rows: Rows) -> None:
    cases = [
        Case(model=AWKWARD, balance=balance, recompute=recompute, schedule=schedule, micro_batches=4, steps=3)
        for balance, recompute, schedule in rows
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path, ("whole",)), strict=True):
        assert result["whole_loss"] < 1e-5, case
        assert result["whole_gradient"] < 1e-5, case
        assert result["whole_parameter"] < 1e-5, case


def test_losses_in_attributes_and_reentrant_checkpoints(tmp_path: Path) -> None:
    cases = [
        Case(model=LEFT_BEHIND, balance=balance, recompute=recompute, schedule=schedule, steps=2)
        for balance, recompute, schedule in (((4, 4), "never", "gpipe"), ((5, 3), "always", "1f1b"))
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path, ("split",)), strict=True):
        assert result["split_loss"] == 0.0, case
        assert result["split_gradient"] == 0.0, case


@pytest.mark.parametrize(
    "rows",
    [
        ((BRANCHING, (3, 2, 2), "always", "1f1b"),),
        pytest.param(
            ((BRANCHING, (1, 2, 4), "never", "gpipe"), (GPT2, (2, 1, 2), "except-last", "gpipe")),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=SOME,
)
def test_models_with_their_own_forward(tmp_path: Path, rows: Rows) -> None:
    """`test_real_models_in_training_mode` trains a model of transformers."""
    pytest.importorskip("transformers")
    cases = [
        Case(model=model, balance=balance, recompute=recompute, schedule=schedule, micro_batches=4, steps=2)
        for model, balance, recompute, schedule in rows
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path, ("whole",)), strict=True):
        assert result["whole_loss"] < 1e-5, case
        assert result["whole_gradient"] < 1e-5, case
        assert result["whole_parameter"] < 1e-4, case


def test_gradients_in_other_precisions(tmp_path: Path) -> None:
    """Exactly equal to the same micro-batches in that precision."""
    cases = [
        Case(
            model=TRANSFORMER,
            balance=(1, 2, 1),
            settings=SMALL,
            recompute=recompute,
            schedule=schedule,
            micro_batches=m,
            dtype=dtype,
        )
        for dtype, recompute, schedule, m in (
            ("bf16-mixed", "never", "gpipe", 4),
            ("bf16-mixed", "except-last", "1f1b", 4),
            ("bf16", "always", "gpipe", 2),
        )
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert result["split_loss"] < 1e-6, case
        assert result["split_gradient"] == 0.0, case
        assert result["whole_loss"] < 0.02, case
        assert result["whole_relative"] < 0.05, case


def test_float16_with_scaled_loss(tmp_path: Path) -> None:
    """The scale, a power of two, is gone from gradients and loss; several stages step alike.

    Where the gradients of one stage overflow, all skip the step, as `torch.amp.GradScaler` does with one model:
    accumulated from two pieces and clipped, too.
    """
    cases = [
        Case(model=FROZEN, balance=(3, 2, 2), recompute=recompute, schedule=schedule, dtype="fp16-mixed", steps=3)
        for recompute, schedule in (("never", "gpipe"), ("always", "1f1b"))
    ]
    overflowing = Case(
        model=OVERFLOWING,
        balance=(1, 1, 1),
        schedule="1f1b",
        dtype="fp16-mixed",
        steps=4,
        seed=3,
        pieces=2,
        clip=0.01,
    )
    *results, overflowed = run_cases([*cases, overflowing], tmp_path, ("split",))
    for case, result in zip(cases, results, strict=True):
        assert result["split_loss"] < 1e-3, case
        assert result["split_relative"] < 0.02, case
        assert result["split_parameter"] < 1e-2, case
    first, second, *others = overflowed["split_overflowed"]
    assert (first, others) == ([], [[], []])
    assert {name.partition(".")[0] for name in second} == {"2"}, "not in the last stage alone"
    assert overflowed["skipped"] == [[False, True, False, False]] * 3
    assert overflowed["split_parameter"] < 1e-6
    assert overflowed["split_norm"] < 1e-5


@pytest.mark.parametrize(
    "rows",
    [
        (
            ("012", "always", "1f1b", ""),
            ("345h", "except-last", "gpipe", "bf16-mixed"),
            ("135", "always", "1f1b", ""),
            ("34", "never", "1f1b", ""),
        ),
        pytest.param(
            (
                ("012", "except-last", "gpipe", "bf16-mixed"),
                ("135", "never", "1f1b", ""),
                ("01234", "always", "1f1b", ""),
            ),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=SOME,
)
def test_frozen_parameters(tmp_path: Path, rows: Rows) -> None:
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
        for frozen, recompute, schedule, dtype in rows
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path, ("split",)), strict=True):
        assert result["split_gradient"] == 0.0, case
        assert result["split_parameter"] == 0.0, case


@pytest.mark.parametrize(
    "rows",
    [
        (
            (AWKWARD, (1, 3, 2, 2), (), "except-last", 2),
            (AWKWARD, (1, 2, 1, 1, 1, 2), (), "always", 4),
            (LLAMA, (1, 1, 1, 2), (), "always", 4),
            (FROZEN, (2, 2, 2, 1), (("frozen", "012"),), "always", 4),
        ),
        pytest.param(
            (
                (TRANSFORMER, (1, 1, 1, 1), SMALL, "except-last", 2),
                (AWKWARD, (1, 2, 1, 1, 1, 2), (), "never", 4),
                (GPT2, (1, 1, 1, 2), (), "always", 4),
                (BRANCHING, (1, 2, 2, 2), (), "always", 4),
            ),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=SOME,
)
def test_interleaved_stages_with_shared_parameters(tmp_path: Path, rows: Rows) -> None:
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
        for model, balance, settings, recompute, m in rows
    ]
    mixed = Case(
        model=TRANSFORMER,
        balance=(1, 1, 1, 1),
        settings=SMALL,
        recomputes=("always", "never", "except-last", "always"),
        schedule="interleaved",
        chunks=2,
    )
    # Five micro-batches are no round of two.
    people = Case(
        model=EVERYDAY,
        balance=(2, 3, 2, 2),
        settings=(("dropout", 0.3),),
        schedule="interleaved",
        chunks=2,
        batch=12,
        micro_batches=6,
        sizes=(12, 10, 4),
        steps=3,
        evaluate=11,
    )
    cases = [*same, mixed, people]
    for case, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert result["split_loss_relative"] < 1e-6, case
        assert result["split_relative"] < 1e-6, case
        assert result["replicas_differ"] == [], case
        if case.model == EVERYDAY:
            assert result["split_buffer"] < 1e-6, case
            assert result["split_evaluated"] < 1e-5, case
        else:
            assert result["whole_gradient"] < 1e-5, case


def test_replicas_sum_gradients_of_the_whole_mini_batch(tmp_path: Path) -> None:
    """Parameters stay bit-for-bit equal."""
    common = {"replicas": 2, "micro_batches": 2, "steps": 2}
    cases = [
        Case(model=AWKWARD, balance=(1, 3, 2, 2), schedule="interleaved", recompute="always", chunks=2, **common),
        Case(model=FROZEN, balance=(3, 4), settings=(("frozen", "012"),), **common),
        Case(model=FROZEN, balance=(3, 4), dtype="fp16-mixed", **common),
        Case(model=TRANSFORMER, balance=(4,), settings=SMALL, replicas=4, micro_batches=2, steps=2),
    ]
    people = {"settings": (("dropout", 0.3),), "sizes": (24, 20, 13), "clip": 0.3, "evaluate": 7, "replicas": 2}
    cases += [
        Case(model=EVERYDAY, balance=(5, 4), batch=24, micro_batches=3, steps=3, calls=2, schedule="1f1b", **people),
        Case(
            model=EVERYDAY,
            balance=(2, 3, 2, 2),
            batch=24,
            micro_batches=3,
            steps=3,
            schedule="interleaved",
            chunks=2,
            **people,
        ),
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path, ("split",)), strict=True):
        assert result["replicas_differ"] == [], case
        assert result["split_buffer"] < 1e-6, case
        assert result["split_norm"] < 1e-5, case
        assert result.get("split_evaluated", 0.0) < 1e-5, case
        assert result["split_loss_relative"] < (1e-3 if case.dtype else 1e-6), case
        # Two numbers have one sum. Those of four replicas, or of a tied weight's stages, may be added in another order.
        is_in_order = case.replicas == 2 and case.model != AWKWARD
        assert result["split_relative"] <= (0.0 if is_in_order else 1e-5), case


@pytest.mark.parametrize(
    "balance", [(5, 4), pytest.param((1, 3, 3, 2), marks=pytest.mark.nightly)], ids=["two", "four"]
)
def test_complete_training_loops(tmp_path: Path, balance: tuple[int, ...]) -> None:
    """Dropout, batch normalisation, masked targets; five steps, each recomputation and schedule, to the bit.

    Then mini-batches that are smaller now and then (also than what 1F1B needs), in pieces, in several calls, clipped,
    with a learning rate that falls, with evaluation in between.
    """
    noisy = (("dropout", 0.3),)
    cases = [
        *(
            Case(model=EVERYDAY, balance=balance, settings=noisy, recompute=recompute, schedule=schedule, steps=5)
            for recompute, schedule in (("never", "gpipe"), ("except-last", "1f1b"), ("always", "gpipe"))
        ),
        *(
            Case(model=EVERYDAY, balance=balance, settings=noisy, recompute="always", schedule="1f1b", steps=4, **more)
            for more in (
                {"sizes": (8, 6, 4)},
                {"sizes": (8, 2, 6), "micro_batches": len(balance), "batch": 4 * len(balance), "evaluate": 5},
                {"pieces": 2, "sizes": (8, 6)},
                {"calls": 3},
                {"pieces": 2, "calls": 2, "sizes": (8, 6), "clip": 0.3, "decay": 0.5, "evaluate": 19},
            )
        ),
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path, ("split",)), strict=True):
        assert result["split_loss"] < 1e-6, case
        assert result["split_all_relative"] == 0.0, case
        assert result["split_parameter"] < 1e-5, case
        assert result["split_buffer"] < 1e-6, case
        assert result["split_norm"] < 1e-5, case
        assert result.get("split_evaluated", 0.0) < 1e-6, case


def test_one_micro_batch_equals_the_unpipelined_model(tmp_path: Path) -> None:
    frozen = (("norm", "eval"),)
    cases = [
        Case(model=EVERYDAY, balance=(4, 5), settings=frozen, steps=5, clip=0.3, decay=0.8, evaluate=7, sizes=(8, 5)),
        Case(model=EVERYDAY, balance=(4, 5), settings=frozen, steps=3, pieces=3, recompute="always", schedule="1f1b"),
        Case(model=AWKWARD, balance=(3, 5), steps=3, calls=2, clip=0.1, schedule="1f1b", sizes=(8, 3)),
        # Normalised by micro-batch, but counted as one: the first of all sees what it sees in one piece.
        Case(model=EVERYDAY, balance=(4, 5), recompute="always"),
    ]
    *results, normalised = run_cases(cases, tmp_path, ("whole",))
    for case, result in zip(cases, results, strict=False):
        assert result["whole_loss"] < 1e-6, case
        assert result["whole_all_relative"] < 1e-6, case
        assert result["whole_norm"] < 1e-6, case
        assert result["whole_parameter"] < 1e-5, case
        assert result.get("whole_evaluated", 0.0) < 1e-6, case
    assert normalised["whole_first_norm"] < 1e-6


@pytest.mark.parametrize(
    ("name", "balance", "settings"),
    [
        ("mlp", (5, 4), {"depth": 4, "width": 32}),
        ("transformer_lm", (2, 2), {**dict(SMALL), "dropout": 0.2}),
        pytest.param(
            "amoebanet_d",
            (4, 5),
            {"num_layers": 3, "num_filters": 8, "image_size": 33},
            marks=pytest.mark.nightly,
        ),
        pytest.param("resnet", (9, 9), {"image_size": 33}, marks=pytest.mark.nightly),
        ("unet", (3, 4), {"width": 4, "levels": 2, "image_size": 16}),
    ],
)
def test_training_of_sample_models(
    name: str, balance: tuple[int, ...], settings: dict[str, float], tmp_path: Path
) -> None:
    case = Case(
        model=ROOT / f"sample_models/{name}.py",
        balance=balance,
        settings=tuple(settings.items()),
        recompute="except-last",
        schedule="1f1b",
        micro_batches=2,
    )
    (result,) = run_cases([case], tmp_path, ("split",))
    assert result["split_loss"] < 1e-6
    assert result["split_all_relative"] < 1e-6
    assert result["split_buffer"] < 1e-6


@pytest.mark.parametrize(
    ("name", "balance", "recompute"),
    [
        ("GPT-2", (2, 3, 3), "always"),
        pytest.param("T5", (8, 5, 7), "never", marks=pytest.mark.nightly),
        pytest.param("ResNet-26 (timm)", (4, 4, 5), "except-last", marks=pytest.mark.nightly),
    ],
)
def test_real_models_in_training_mode(
    name: str, balance: tuple[int, ...], recompute: Recompute, tmp_path: Path
) -> None:
    pytest.importorskip("timm" if "timm" in name else "transformers")
    assert name in REAL_MODELS
    case = Case(
        model=REAL,
        balance=balance,
        settings=(("name", name),),
        recompute=recompute,
        schedule="1f1b",
        steps=2,
        sizes=(8, 5),
        clip=1.0,
        evaluate=3,
    )
    (result,) = run_cases([case], tmp_path, ("split",))
    assert result["split_loss"] < 1e-6
    assert result["split_all_relative"] < 1e-6
    assert result["split_parameter"] < 1e-5
    assert result["split_buffer"] < 1e-6
    assert result["split_norm"] < 1e-6
    assert result["split_evaluated"] < 1e-5
