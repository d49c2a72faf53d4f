"""Tests of opening a planned model."""

from dataclasses import replace
from pathlib import Path

from planner.executor.job import load_planned_model
from planner.files import read_balance
from tests.unit.executor.test_pipeline import balance_of


def test_layers_that_were_not_cut_in_the_profile_are_not_cut_in_training(tmp_path: Path) -> None:
    balance = read_balance(str(balance_of(tmp_path)))
    first = balance.stages[0].layers[0]
    loaded = load_planned_model(replace(balance, model=replace(balance.model, uncut=(first,))), tmp_path)
    assert loaded.uncut == (first,)
    assert first not in loaded.chain(loaded.build()).names
