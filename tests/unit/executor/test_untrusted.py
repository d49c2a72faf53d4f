"""Tests of damaged and malicious checkpoints and weights: no code runs, and one message is printed."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from planner.core.errors import FileError, UsageError
from planner.executor import Pipeline
from planner.executor.checkpoints import Checkpoints
from planner.executor.keep.index import read_index, write_index
from planner.executor.keep.json_state import to_json
from planner.executor.keep.rank_file import write_rank_file
from planner.executor.keep.stored import StoredCheckpoint
from planner.executor.keep.weights import canonical_names, load_weights
from tests.support.cli import MODEL, call
from tests.unit.executor.test_checkpoint import GROUPS, train
from tests.unit.executor.test_pipeline import balance_of

pytestmark = pytest.mark.usefixtures("one_process")


class Evil:
    """Makes a folder when unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (self._mark,)


def load(path: str) -> None:
    fresh = nn.Linear(3, 2)
    load_weights(path, dict(fresh.state_dict(keep_vars=True)), canonical_names(fresh))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return balance_of(tmp_path, MODEL + GROUPS)


@pytest.fixture
def step(path: Path, tmp_path: Path) -> Path:
    """Return the second of two checkpoints."""
    train(path, 2, folder=str(tmp_path / "saved"), every=1)
    return tmp_path / "saved/step-00000002"


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain pickle"])
def test_malicious_weights_files_run_no_code(kind: str, tmp_path: Path) -> None:
    path, mark = tmp_path / "weights.pt", tmp_path / "mark"
    state = {"weight": torch.ones(2, 3), "bias": Evil(mark)}
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps(Evil(mark)))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(FileError, match="cannot be read as weights"):
        load(str(path))
    assert not mark.exists()
    path.write_text("no weights")
    with pytest.raises(FileError, match=r"it is not a zip file of `torch\.save`"):
        load(str(path))


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "missing", "tensor", "state", "index", "a name", "a folder", "a pipe"]
)
def test_damaged_checkpoints_give_one_message_and_exit_code_2(damage, path, step, tmp_path, capsys):
    target = step / ("checkpoint.json" if damage in ("index", "a name") else "rank-00000.safetensors")
    content = bytearray(target.read_bytes())
    if damage in ("missing", "a folder", "a pipe"):
        target.unlink()
    if damage == "a folder":
        target.mkdir()
    elif damage == "a pipe":
        os.mkfifo(target)
    elif damage == "a name":
        content[content.index(b'"0.weight"') + 3] ^= 1
        target.write_bytes(content)
    elif damage in ("tensor", "state"):
        weight = StoredCheckpoint(step)["0.weight"].numpy().tobytes()
        place = content.index(weight if damage == "tensor" else b"MT19937")
        content[place] ^= 1
        target.write_bytes(content)
    elif damage != "missing":
        target.write_bytes(content[: 0 if damage == "empty" else len(content) * 2 // 3])
    ran = call(capsys, "export", str(step), "-o", str(tmp_path / "model.pt"))
    assert ran.code == 2
    assert str(step) in ran.error
    assert "bug" not in ran.err
    with pytest.raises(FileError, match=str(step)):
        train(path, 3, resume=str(step))


def test_an_index_is_checked_before_anything_is_read(path: Path, step: Path) -> None:
    """Types, unknown keys, wrong offsets, deep nesting, another encoding. The previous checkpoint is used."""
    index = json.loads((step / "checkpoint.json").read_text())
    wrong: tuple[dict[str, Any], ...] = (
        {"files": None},
        {"files": [{"size_bytes": 1}]},
        {"balance": "all"},
        {"more": 1},
        {"schema": "gpipe-plan/checkpoint/v2"},
        {"tensors": index["tensors"] | {"0.weight": 1}},
        {"tensors": index["tensors"] | {"0.weight": -1}},
        {"tensors": index["tensors"] | {"0.weight": "../0.weight"}},
        {"tensors": index["tensors"] | {"a": "b", "b": "0.weight"}},
        {"step": 7},
    )
    texts = ["[" * 200_000, "[]", "\xff", *(json.dumps(index | fields) for fields in wrong)]
    for text in texts:
        (step / "checkpoint.json").write_text(text, encoding="latin-1")
        with pytest.raises(FileError, match="step-00000002"):
            train(path, 3, resume=str(step))
    folder = step.parent
    assert train(path, 3, folder=str(folder), resume="auto")["begun"] == 1
    assert sorted(entry.name for entry in folder.iterdir()) == ["abandoned-1", "step-00000001", "step-00000003"]


@pytest.mark.parametrize("damage", ["a pipe", "spaces"])
def test_an_index_that_never_ends_is_refused(damage: str, path: Path, step: Path) -> None:
    """A pipe is not waited for, and a large file is not read."""
    index = step / "checkpoint.json"
    if damage == "a pipe":
        index.unlink()
        os.mkfifo(index)
    else:
        os.truncate(index, 2**26 + 1)
    with pytest.raises(FileError, match=r"checkpoint\.json cannot be read: it (is not a regular|has 67108865 bytes)"):
        train(path, 3, resume=str(step))


def test_files_of_two_checkpoints_are_not_mixed(path, step, tmp_path, capsys):
    """A file of another step has the same size. Neither `export` nor a resume uses it."""
    stale = step.with_name("step-00000001") / "rank-00000.safetensors"
    sizes = [len(file.read_bytes()) for file in (stale, step / stale.name)]
    os.truncate(stale, max(sizes))
    shutil.copy(stale, step)
    index = read_index(step)
    write_index(step, replace(index, files=(replace(index.files[0], size_bytes=max(sizes)),)))
    ran = call(capsys, "export", str(step), "-o", str(tmp_path / "model.pt"))
    assert ran.code == 2
    assert "its state does not match `checkpoint.json`" in ran.error
    assert not (tmp_path / "model.pt").exists()
    with pytest.raises(FileError, match="step-00000002"):
        train(path, 3, resume=str(step))


def _reads_past_its_end(state: dict[str, Any]) -> None:
    state["random"]["numpy"][2] = 10**9


def _is_of_another_kind(state: dict[str, Any]) -> None:
    state["random"]["python"][1] = ["x"]


def _lacks_numbers(state: dict[str, Any]) -> None:
    del state["random"]["torch"]


def _loader_is_nowhere(state: dict[str, Any]) -> None:
    state["pipeline"]["loader"] = {"epoch": -1, "batch": "x"}


def _has_no_groups(state: dict[str, Any]) -> None:
    state["groups"] = [1, 1]


def _has_an_unknown_type(state: dict[str, Any]) -> None:
    state["others"] = {"$evil": []}


@pytest.mark.parametrize(
    "edit",
    [
        _reads_past_its_end,
        _is_of_another_kind,
        _lacks_numbers,
        _loader_is_nowhere,
        _has_no_groups,
        _has_an_unknown_type,
    ],
)
def test_invalid_states_are_refused(edit: Callable[[dict[str, Any]], None], path: Path, step: Path) -> None:
    opened = StoredCheckpoint(step).file(0)
    tensors = {name: opened.tensor(name).clone() for name in opened.names}
    state = opened._state
    edit(state)
    with (step / "rank-00000.safetensors").open("wb") as file:
        entry = write_rank_file(file, state, tensors)
    write_index(step, replace(read_index(step), files=(entry,)))
    with pytest.raises(FileError, match=r"the state of (the \w+ ?\w*|others) (in it )?cannot be re(stored|ad)"):
        train(path, 3, resume=str(step))


def test_only_data_is_saved() -> None:
    """NumPy's numbers become Python's; the message names place and type."""
    tensors: dict[str, torch.Tensor] = {}
    state = {"best": np.float64(0.5), "at": [np.int64(3)], "mean": torch.ones(2)}
    assert to_json(state, "s", tensors) == {"best": 0.5, "at": [3], "mean": {"$tensor": "s['mean']"}}
    assert list(tensors) == ["s['mean']"]
    for value, name in (
        (Path("x"), r"a pathlib\.\w*\.?PosixPath"),
        ({1}, "a builtins.set"),
        (1j, "a builtins.complex"),
    ):
        with pytest.raises(UsageError, match=rf"cannot hold others\['mine'\]\['a'\]\[0\], which is {name}"):
            to_json({"a": [value]}, "others['mine']", {})
    with pytest.raises(UsageError, match=r"which is a torch\.Tensor of torch\.complex128"):
        to_json(torch.ones(2, dtype=torch.complex128), "x", {})


class _Stateful(list[Any]):
    """An object whose state is no data."""

    def state_dict(self) -> dict[str, Any]:
        return {"where": Path("x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def test_a_state_that_cannot_be_saved_is_refused_when_a_run_begins(path: Path, tmp_path: Path) -> None:
    """State that exists only after a step is refused after the first step, not at the first checkpoint."""
    folder = str(tmp_path / "saved")
    pipeline = Pipeline(path)
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    with pytest.raises(UsageError, match=r"cannot hold others\['mine'\]\['where'\], which is a pathlib"):
        Checkpoints(pipeline, optimizer, folder=folder, mine=_Stateful())
    pipeline.close()
    for what, message in (
        ("loader", r"pipeline\['loader'\]\['loader'\]\['where'\]"),
        ("optimizer", r"optimizer\['0\."),
    ):
        pipeline = Pipeline(path)
        optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
        saved = Checkpoints(pipeline, optimizer, folder=folder, every=100, steps=9)
        loader = _Stateful([(torch.ones(8, 8), torch.ones(8, 4))]) if what == "loader" else None
        with pipeline.step(*next(pipeline.batches(9, loader))):
            optimizer.step()
        if what == "optimizer":
            next(iter(optimizer.state.values()))["mode"] = {"x"}
        with pytest.raises(UsageError, match=rf"cannot hold {message}"):
            saved.step_done()
        pipeline.close()
