"""Tests that checkpoints of other runs and of abandoned branches are neither removed nor resumed."""

import shutil
import threading
from pathlib import Path

import pytest
import torch

from planner.core.errors import FileError, UsageError
from planner.executor import Pipeline
from planner.executor.checkpoints import Checkpoints
from planner.executor.keep import folder_lock, saved
from planner.executor.keep.folder_lock import FolderLock
from planner.executor.keep.index import check_rank_files, read_index
from planner.executor.keep.saved import latest_checkpoint
from tests.support.cli import MODEL
from tests.support.processes import wait_for
from tests.support.ranks import ForkedProcess
from tests.unit.executor.test_checkpoint import GROUPS, train
from tests.unit.executor.test_pipeline import balance_of

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return balance_of(tmp_path, MODEL + GROUPS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "saved"


def names_in(folder: Path) -> list[str]:
    """Return the sorted names in a folder."""
    return sorted(entry.name for entry in folder.iterdir())


def damage(checkpoint: Path, how: str) -> None:
    """Damage a checkpoint."""
    data = checkpoint / "rank-00000.safetensors"
    if how == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
    if how == "missing":
        data.unlink()
    if how == "index":
        (checkpoint / "checkpoint.json").write_text("{")


def test_a_new_run_in_the_folder_of_another_is_refused(path: Path, folder: Path) -> None:
    train(path, 6, folder=str(folder), every=2)
    before = names_in(folder)
    with pytest.raises(UsageError, match=r"holds checkpoints of another run \(step-00000002 to step-00000006\)") as new:
        train(path, 3, folder=str(folder), every=1)
    assert "`--resume auto`" in new.value.hint
    assert names_in(folder) == before
    other = folder.with_name("other")
    train(path, 2, folder=str(other))
    with pytest.raises(UsageError, match=rf"\(step-00000002 to step-00000006\), but this run continues {other}"):
        train(path, 9, folder=str(folder), resume=f"{other}/step-00000002")
    assert names_in(folder) == before


def test_a_rollback_moves_later_checkpoints_aside(path: Path, folder: Path) -> None:
    """They are neither removed nor resumed by `auto`."""
    train(path, 6, folder=str(folder), every=1, keep=4)
    left = train(path, 6, resume=f"{folder}/step-00000006")["parameters"]
    again = train(path, 4, folder=str(folder), every=1, keep=2, resume=f"{folder}/step-00000003")
    assert again["begun"] == 3
    assert names_in(folder) == ["abandoned-1", "step-00000003", "step-00000004"]
    assert names_in(folder / "abandoned-1") == ["step-00000004", "step-00000005", "step-00000006"]
    assert train(path, 5, folder=str(folder), keep=2, resume="auto")["begun"] == 4
    assert names_in(folder) == ["abandoned-1", "step-00000004", "step-00000005"]
    kept = train(path, 6, resume=f"{folder}/abandoned-1/step-00000006")["parameters"]
    assert all(torch.equal(kept[name], p) for name, p in left.items())


@pytest.mark.parametrize("how", ["truncated", "missing", "index"])
def test_resume_auto_skips_a_damaged_newest_checkpoint(path, folder, capsys, how):
    """The run continues from the previous checkpoint, warns, and ends like an undisturbed run."""
    whole = train(path, 6)
    train(path, 4, folder=str(folder), every=2)
    damage(folder / "step-00000004", how)
    capsys.readouterr()
    again = train(path, 6, folder=str(folder), every=2, resume="auto")
    printed = capsys.readouterr()
    assert again["begun"] == 2
    assert f"warning: {folder}/step-00000004" in printed.err
    assert "trying the previous checkpoint" in printed.err
    assert f"resumed {folder}/step-00000002 after 2 steps" in printed.out
    assert "Traceback" not in printed.err
    assert again["losses"] == whole["losses"][2:]
    assert all(torch.equal(again["parameters"][name], p) for name, p in whole["parameters"].items())
    assert names_in(folder) == ["abandoned-1", "step-00000002", "step-00000004", "step-00000006"]
    assert names_in(folder / "abandoned-1") == ["step-00000004"]


@pytest.mark.parametrize("how", ["truncated", "missing", "index"])
def test_a_damaged_checkpoint_requested_by_name_is_refused(path: Path, folder: Path, how: str) -> None:
    """The previous checkpoint is named. If none is readable, no new run begins."""
    train(path, 4, folder=str(folder), every=2)
    damage(folder / "step-00000004", how)
    with pytest.raises(FileError, match="step-00000004") as refused:
        train(path, 6, resume=f"{folder}/step-00000004")
    assert "step-00000002" in refused.value.hint
    damage(folder / "step-00000002", how)
    with pytest.raises(FileError, match=r"step-00000004: cannot be resumed \(nor can 1 older one\)"):
        train(path, 6, folder=str(folder), resume="auto")
    assert names_in(folder)[-2:] == ["step-00000002", "step-00000004"]


def test_a_loop_that_ends_early_is_saved_once(path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = Pipeline(path)
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    checkpoints = Checkpoints(pipeline, optimizer, folder=str(folder), every=100, steps=50)
    for step, (inputs, targets) in enumerate(pipeline.batches(50)):
        with pipeline.step(inputs, targets):
            optimizer.step()
            optimizer.zero_grad()
        checkpoints.step_done()
        if step == 4:
            break
    checkpoints.close()
    checkpoints.close()
    pipeline.close()
    assert capsys.readouterr().out.count("the loop ended after 5 of 50 steps") == 1
    assert names_in(folder) == ["step-00000005"]
    assert train(path, 6, folder=str(folder), resume="auto", schedule=None)["begun"] == 5


HOLDS = """
import sys, time
from pathlib import Path
from planner.executor.keep.folder_lock import FolderLock

lock = FolderLock(Path(sys.argv[1]))
print("holds", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_two_jobs_in_one_folder_are_refused(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed job no longer holds the folder."""
    monkeypatch.setattr(folder_lock, "_WAIT_S", 0.3)
    folder.mkdir()
    script, out = path.with_name("holds.py"), path.with_name("holds.out")
    script.write_text(HOLDS)
    other = ForkedProcess([str(script), str(folder)], folder, out=out, err=path.with_name("holds.err"))
    wait_for(lambda: out.read_text() == "holds\n")
    with pytest.raises(UsageError, match=rf"another job writes checkpoints into .* \(process {other.pid} on"):
        train(path, 2, folder=str(folder))
    assert names_in(folder) == [".lock"]
    timer = threading.Timer(0.2, other.kill)
    timer.start()
    monkeypatch.setattr(folder_lock, "_WAIT_S", 30.0)
    FolderLock(folder).release()
    timer.join()
    other.wait()
    train(path, 2, folder=str(folder))
    assert names_in(folder) == ["step-00000002"]


def test_folders_named_step_are_complete_checkpoints(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a process dies while it removes or replaces one."""
    seen: list[str] = []

    def dies(doomed: Path, **_: object) -> None:
        seen.append(Path(doomed).name)

    with monkeypatch.context() as patched:
        patched.setattr(saved.shutil, "rmtree", dies)
        train(path, 4, folder=str(folder), every=1, keep=1)
    assert seen
    assert not any(name.startswith("step-") for name in seen)
    assert [name for name in names_in(folder) if name.startswith("step-")] == ["step-00000004"]
    shutil.copytree(folder / "step-00000004", folder / "step-00000005")
    (folder / "step-00000005/checkpoint.json").unlink()
    with pytest.raises(FileError, match=r"has no checkpoint\.json"):
        read_index(folder / "step-00000005")
    train(path, 5, folder=str(folder), resume=f"{folder}/step-00000004")
    assert names_in(folder) == ["abandoned-1", "step-00000004", "step-00000005"]
    assert latest_checkpoint(str(folder)) == folder / "step-00000005"
    check_rank_files(folder / "step-00000005", read_index(folder / "step-00000005"))
