"""Training with backwards in halves computes what the unpipelined model computes."""

from pathlib import Path

import pytest

from tests.functional.test_training import AMOEBANET, AWKWARD, BRANCHING, FROZEN, GPT2, LEFT_BEHIND, SMALL, TRANSFORMER
from tests.support.training import Case, run_cases

pytestmark = pytest.mark.slow


def test_gradients_of_two_stages(tmp_path: Path) -> None:
    """Transformer and a network of convolutions, each recomputation, with weights put off a little and to the end."""
    cases = [
        Case(
            model=model,
            balance=balance,
            settings=settings,
            recompute=recompute,
            schedule=schedule,
            later=later,
            micro_batches=8,
        )
        for model, balance, settings in ((TRANSFORMER, (2, 2), SMALL), (AMOEBANET, (5, 7), ()))
        for recompute, schedule, later in (
            ("never", "1f1b", 1),
            ("never", "gpipe", 99),
            ("except-last", "1f1b", 3),
            ("always", "gpipe", 2),
            ("layers", "1f1b", 0),
        )
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path), strict=True):
        assert result["whole_loss"] < 1e-5, case
        assert result["whole_gradient"] < 1e-5, case
        assert result["split_loss"] < 1e-6, case
        assert result["split_gradient"] == 0.0, case
