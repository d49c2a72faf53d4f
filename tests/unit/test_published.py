"""Published runs on real accelerators: errors of their predictions must not change.

Figures are in percent with one decimal, so that a change of the cost model that moves them is seen. All rows are in
`docs/measurements/published.md`.
"""

from collections import Counter
from itertools import islice

import pytest

from benchmarks import published_chips as chips
from benchmarks import published_formulas as formulas
from benchmarks import published_rates as rates
from benchmarks import published_runs as runs
from benchmarks.published_runs import Row
from planner.core.values.sustained import SUSTAINED


def fitted(schedule: str) -> list[Row]:
    """Return rows of the 1.5B model under a schedule, with computing times from 1F1B with the smallest M."""
    rows = list(islice(runs.zero_bubble_rows(), 9))
    return [row for row in runs.scaled(rows, rows[0]) if row.name[2] == schedule]


MET = {
    "A100, nothing fitted": (runs.a100_rows, 8, (-1.5, -0.7)),
    "A100, forecasts": (runs.forecast_rows, 4, (-4.9, 0.6)),
    "GH200, one number fitted": (lambda: islice(runs.gh200_rows(), 1, None), 3, (1.1, 1.4)),
    "1F1B, fitted": (lambda: fitted("1f1b"), 3, (-0.4, 0.0)),
    "split backward, fitted": (lambda: fitted("zb1p"), 3, (-2.3, -1.7)),
    "interleaved, fitted": (lambda: fitted("interleaved"), 3, (-6.5, -5.7)),
    "recomputation": (runs.recomputation_rows, 3, (-8.1, 0.4)),
    "recomputation, forecast": (lambda: islice(formulas.recomputation_forecast_rows(), 1), 1, (1.1, 1.1)),
    "even stages": (runs.even_stage_rows, 8, (-3.3, 25.4)),
    "24 settings, memory": (formulas.vocabulary_memory_rows, 24, (1.1, 4.9)),
    "V-Half, memory": (lambda: islice(formulas.vocabulary_memory_rows("v-half"), 8), 8, (1.6, 5.1)),
    "split backward, memory": (lambda: islice(formulas.zero_bubble_memory_rows(), 6), 6, (-4.0, 1.1)),
    "24 settings, time": (formulas.vocabulary_step_rows, 24, (-1.9, 3.1)),
    "three chips, state": (chips.golden_state_rows, 6, (-5.8, -0.4)),
    "8 chunks, in flight": (lambda: islice(chips.golden_activation_rows(), 3), 3, (1.8, 1.9)),
    "three chips, peaks": (chips.golden_peak_rows, 12, (-1.8, 4.7)),
    "A100 and H100": (lambda: (row for row in chips.other_chip_rows() if "GB200" not in row.name), 4, (-9.1, 10.0)),
    "H100 and GB200": (lambda: (row for row in chips.other_chip_rows() if "GB200" in row.name), 4, (-10.6, 11.9)),
    "rates": (rates.rate_rows, 40, (-42.7, 42.9)),
    "given rates": (rates.given_rate_rows, 39, (-21.0, 30.9)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MET)
def test_errors_of_published_predictions_do_not_change(name: str) -> None:
    """The smallest and largest error of each table are compared."""
    rows, count, met = MET[name]
    errors = sorted(100 * row.error for row in rows())
    assert len(errors) == count
    assert (errors[0], errors[-1]) == pytest.approx(met, abs=0.051)


@pytest.mark.slow
def test_default_rates_are_the_medians_of_published_runs() -> None:
    """A kind of run has its own error range only with at least three sources."""
    medians = {(each.chip, each.experts): each for each in SUSTAINED}
    assert {kind: round(rate) for kind, rate in rates.medians().items()} == {
        kind: each.flops_per_s / 1e12 for kind, each in medians.items()
    }
    sources = Counter(kind for kind, _ in {((run.chip, run.experts), run.source) for run in rates.reached()})
    assert {kind for kind, each in medians.items() if each.errors == kind[0]} == {
        kind for kind, count in sources.items() if count >= 3
    }


def test_cuts_are_at_least_as_good_as_published_ones() -> None:
    cuts = list(runs.cut_rows())
    assert {each.solved.solver.status for each in cuts} == {"optimal"}
    gains = [100 * each.gain for each in cuts]
    assert gains == pytest.approx([2.3, 0.7, 13.9, 0.0], abs=0.051)
