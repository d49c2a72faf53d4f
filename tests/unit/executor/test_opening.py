"""What a process loads before it joins the others."""

from dataclasses import replace
from pathlib import Path

from planner.executor.job import load_planned
from planner.files import read_balance
from tests.unit.executor.test_pipeline import balance_of


def test_a_model_is_cut_as_it_was_profiled(tmp_path: Path) -> None:
    """What no stage may end with is left in one piece in training, too: else the layers are not those planned."""
    balance = read_balance(str(balance_of(tmp_path)))
    first = balance.stages[0].layers[0]
    loaded = load_planned(replace(balance, model=replace(balance.model, uncut=(first,))), tmp_path)
    assert loaded.uncut == (first,)
    assert first not in loaded.chain(loaded.build()).names
