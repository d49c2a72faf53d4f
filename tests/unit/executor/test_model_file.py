"""Tests of changes that a script makes to the variables of its model file."""

import importlib
from pathlib import Path

import pytest

from planner.core.errors import UsageError
from planner.executor.model_file import ModelFile
from planner.model.load import load_model

TEXT = """
import functools
import time
from torch import nn

STARTED_NS = time.perf_counter_ns()
FACTOR = 1.0
COUNT, DEPTH = 0, -1
READY = False

def weigh(output, by):
    return by * output

weigh = functools.partial(weigh, by=2.0)

def prepare():
    global READY
    READY = True
    Scaled.made += 1

class Scaled(nn.Linear):
    scale = 1.0
    made = 0

def build_model():
    return Scaled(4, 4)

def example_batch(n):
    ...
"""


def loaded(path: Path) -> ModelFile:
    """Load the model of a file, as a training run does."""
    file = ModelFile(path)
    file.load(lambda: load_model(str(path)))
    return file


def test_a_script_may_import_the_file_after_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file_that_is_imported_late.py"
    path.write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    file = loaded(path)
    module = importlib.import_module(path.stem)
    file.check_functions()
    module.loss_fn = len
    with pytest.raises(UsageError, match="replaced `loss_fn`") as refused:
        file.check_functions()
    assert "variable" in str(refused.value.hint)
    loaded(path)


@pytest.mark.parametrize("name", ["FACTOR", "Scaled.scale"])
def test_a_script_must_not_change_variables_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = tmp_path / f"file_that_changes_{name.lower().replace('.', '_')}.py"
    path.write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(path.stem)
    loaded(path)
    owner = module.Scaled if "." in name else module
    setattr(owner, name.rpartition(".")[2], 2.0)
    with pytest.raises(UsageError, match=f"changed `{name}`"):
        loaded(path)


def test_values_that_the_file_itself_changes_are_no_change_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file_that_prepares.py"
    path.write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(path.stem)
    module.prepare()
    module.STARTED_NS = 0
    loaded(path)
    module.prepare = len
    with pytest.raises(UsageError, match="changed `prepare`"):
        loaded(path)


def test_classes_of_a_late_import_can_be_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker processes of a loader import the class by the name of its module."""
    path = tmp_path / "file_with_classes.py"
    path.write_text(TEXT)
    monkeypatch.syspath_prepend(tmp_path)
    loaded(path)
    assert importlib.import_module(path.stem).Scaled.__module__ == path.stem
