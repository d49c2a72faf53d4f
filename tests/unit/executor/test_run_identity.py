"""Whose a checkpoint is: nothing of another run, or of an abandoned branch, is removed or taken for one's own."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from planner.core.errors import FileError, UsageError
from planner.executor import Pipeline, latest_checkpoint
from planner.executor.checkpoints import Checkpoints
from planner.executor.keep import folder_lock, saved
from planner.executor.keep.folder_lock import FolderLock
from planner.executor.keep.index import check_rank_files, read_index
from tests.support.cli import MODEL
from tests.support.training import ROOT
from tests.unit.executor.test_checkpoint import GROUPS, train
from tests.unit.executor.test_pipeline import balance_of


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A balance configuration."""
    return balance_of(tmp_path, MODEL + GROUPS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where checkpoints are saved."""
    return tmp_path / "saved"


def names(folder: Path) -> list[str]:
    """All that is in a folder."""
    return sorted(entry.name for entry in folder.iterdir())


def broken(checkpoint: Path, how: str) -> None:
    """Damages a checkpoint."""
    data = checkpoint / "rank-00000.safetensors"
    if how == "truncated":
        data.write_bytes(data.read_bytes()[:-100])
    if how == "missing":
        data.unlink()
    if how == "index":
        (checkpoint / "checkpoint.json").write_text("{")


def test_a_new_run_in_the_folder_of_another_is_refused(path: Path, folder: Path) -> None:
    """It would lose each of its own checkpoints to those with higher steps, or take them for its own."""
    train(path, 6, folder=str(folder), every=2)
    before = names(folder)
    with pytest.raises(UsageError, match=r"holds checkpoints of another run \(step-00000002 to step-00000006\)") as new:
        train(path, 3, folder=str(folder), every=1)
    assert "`--resume auto`" in new.value.hint
    assert names(folder) == before
    other = folder.with_name("other")
    train(path, 2, folder=str(other))
    with pytest.raises(UsageError, match=rf"\(step-00000002 to step-00000006\), but this run continues {other}"):
        train(path, 9, folder=str(folder), resume=f"{other}/step-00000002")
    assert names(folder) == before


def test_a_rollback_keeps_its_own_and_leaves_what_was_abandoned(path: Path, folder: Path) -> None:
    """Later checkpoints are neither removed nor resumed by `auto`."""
    train(path, 6, folder=str(folder), every=1, keep=4)
    left = train(path, 6, resume=f"{folder}/step-00000006")["parameters"]
    again = train(path, 4, folder=str(folder), every=1, keep=2, resume=f"{folder}/step-00000003")
    assert again["begun"] == 3
    assert names(folder) == ["abandoned-1", "step-00000003", "step-00000004"]
    assert names(folder / "abandoned-1") == ["step-00000004", "step-00000005", "step-00000006"]
    assert train(path, 5, folder=str(folder), keep=2, resume="auto")["begun"] == 4
    assert names(folder) == ["abandoned-1", "step-00000004", "step-00000005"]
    kept = train(path, 6, resume=f"{folder}/abandoned-1/step-00000006")["parameters"]
    assert all(torch.equal(kept[name], p) for name, p in left.items())


@pytest.mark.parametrize("how", ["truncated", "missing", "index"])
def test_a_broken_newest_checkpoint_is_passed_over(
    path: Path, folder: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """The run goes on from the one before, says so, and ends as it would have; what is broken is kept apart."""
    whole = train(path, 6)
    train(path, 4, folder=str(folder), every=2)
    broken(folder / "step-00000004", how)
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
    assert names(folder) == ["abandoned-1", "step-00000002", "step-00000004", "step-00000006"]
    assert names(folder / "abandoned-1") == ["step-00000004"]


@pytest.mark.parametrize("how", ["truncated", "missing", "index"])
def test_what_is_asked_for_by_name_is_not_replaced(path: Path, folder: Path, how: str) -> None:
    """The folder and the one before are named; with none left that can be read, nothing is begun anew."""
    train(path, 4, folder=str(folder), every=2)
    broken(folder / "step-00000004", how)
    with pytest.raises(FileError, match="step-00000004") as refused:
        train(path, 6, resume=f"{folder}/step-00000004")
    assert "step-00000002" in refused.value.hint
    broken(folder / "step-00000002", how)
    with pytest.raises(FileError, match=r"step-00000004: cannot be resumed \(nor can 1 older one\)"):
        train(path, 6, folder=str(folder), resume="auto")
    assert names(folder)[-2:] == ["step-00000002", "step-00000004"]


def test_a_loop_that_ends_early_leaves_its_end(path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saved by `close`, once, and told."""
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
    assert names(folder) == ["step-00000005"]
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
def test_two_jobs_in_one_folder_are_noticed(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the other lives: what a killed one leaves holds nobody up."""
    monkeypatch.setattr(folder_lock, "_WAIT_S", 0.3)
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)], cwd=ROOT, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"holds\n"
        with pytest.raises(UsageError, match=rf"another job writes checkpoints into .* \(process {other.pid} on"):
            train(path, 2, folder=str(folder))
        assert names(folder) == [".lock"]
        timer = threading.Timer(0.2, other.kill)
        timer.start()
        monkeypatch.setattr(folder_lock, "_WAIT_S", 30.0)
        FolderLock(folder).release()
        timer.join()
    train(path, 2, folder=str(folder))
    assert names(folder) == ["step-00000002"]


def test_what_is_called_a_step_is_whole(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a process dies while it removes an old one, or replaces one of the same step."""
    seen: list[str] = []

    def dies(doomed: Path, **_: object) -> None:
        seen.append(Path(doomed).name)

    with monkeypatch.context() as patched:
        patched.setattr(saved.shutil, "rmtree", dies)
        train(path, 4, folder=str(folder), every=1, keep=1)
    assert seen
    assert not any(name.startswith("step-") for name in seen)
    assert [name for name in names(folder) if name.startswith("step-")] == ["step-00000004"]
    shutil.copytree(folder / "step-00000004", folder / "step-00000005")
    (folder / "step-00000005/checkpoint.json").unlink()
    with pytest.raises(FileError, match=r"has no checkpoint\.json"):
        read_index(folder / "step-00000005")
    train(path, 5, folder=str(folder), resume=f"{folder}/step-00000004")
    assert names(folder) == ["abandoned-1", "step-00000004", "step-00000005"]
    assert latest_checkpoint(str(folder)) == folder / "step-00000005"
    check_rank_files(folder / "step-00000005", read_index(folder / "step-00000005"))
