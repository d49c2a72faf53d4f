"""Checkpoints and weights that somebody else wrote: nothing in them runs, and what is damaged is one message."""

import copyreg
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata

from planner.core.errors import FileError, UsageError
from planner.executor import Pipeline
from planner.executor.checkpoints import Checkpoints
from planner.executor.keep import inert
from planner.executor.keep.inert import InertError, read_inert
from planner.executor.keep.rank_state import as_data, packed
from planner.executor.keep.stored import index_digest, read_folder
from planner.executor.keep.weights import export_weights, first_names, load_weights
from tests.support.cli import MODEL, call
from tests.unit.executor.test_checkpoint import GROUPS, train
from tests.unit.executor.test_pipeline import balance_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Evil:
    """Whoever unpickles it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What a pickle of it says is to be called."""
        return os.mkdir, (self._mark,)


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def save_folder(folder: Path, **more: Any) -> str:
    """A checkpoint of `linear`, and more beside it."""
    dcp.save({"model": dict(linear().state_dict()), **more}, checkpoint_id=str(folder), no_dist=True)
    return str(folder)


def load(path: str) -> dict[str, Any]:
    fresh = nn.Linear(3, 2)
    load_weights(path, dict(fresh.state_dict(keep_vars=True)), first_names(fresh))
    return fresh.state_dict()


def test_the_attack_works_on_torchs_own_loader(tmp_path: Path) -> None:
    """What the tests below refuse would run: without this they would show nothing."""
    folder, mark = Path(save_folder(tmp_path / "folder")), tmp_path / "mark"
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    with pytest.raises(Exception):  # noqa: B017, PT011 - a folder made is no index
        filesystem.FileSystemReader(folder).read_metadata().state_dict_metadata  # noqa: B018
    assert mark.is_dir()


def evil_index(folder: Path, mark: Path, where: str) -> None:
    """Puts an attack into an index that is otherwise whole."""
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    if where == "instead":
        index = Evil(mark)
    elif where == "key":
        index.state_dict_metadata[Evil(mark)] = None
    elif where == "planner data":
        index.planner_data["model.weight"] = Evil(mark)
    elif where == "beside":
        index.storage_meta.modules = [Evil(mark)]
    else:
        index.state_dict_metadata["model.weight"].size = Evil(mark)
    path.write_bytes(pickle.dumps(index, protocol=int(where[-1]) if where[-1].isdigit() else None))


def test_members_of_enumerations_as_earlier_pythons_wrote_them(tmp_path: Path) -> None:
    """Up to Python 3.11.3 a member is a call of `getattr`, which is not made here either."""
    folder = Path(save_folder(tmp_path / "folder"))
    index = pickle.loads((folder / ".metadata").read_bytes())
    with (folder / ".metadata").open("wb") as file:
        pickler = pickle.Pickler(file)
        kind = type(index.state_dict_metadata["model.weight"].properties.__getstate__()[3])
        pickler.dispatch_table = {**copyreg.dispatch_table, kind: lambda member: (getattr, (kind, member.name))}
        pickler.dump(index)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert torch.equal(load(str(folder))["weight"], linear().weight)


@pytest.mark.parametrize("where", ["instead", "key", "planner data", "beside", "size in protocol 2", "size 4"])
def test_an_index_that_attacks_is_not_run(where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wherever it stands: one message that names what was not run, exit code 2."""
    folder, mark = Path(save_folder(tmp_path / "folder")), tmp_path / "mark"
    evil_index(folder, mark, where)
    with pytest.raises(FileError, match=r"names `(posix|nt)\.mkdir`, which is no part of an index and is not run"):
        load(str(folder))
    ran = call(capsys, "export", str(folder), "-o", str(tmp_path / "model.pt"))
    assert ran.code == 2
    assert "is not run" in ran.error
    assert not mark.exists()
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("where", ["tied", "tied of version 1", "ranks", "ranks inside", "optimizer"])
def test_other_values_that_attack_are_not_run(where: str, tmp_path: Path) -> None:
    """What is no tensor is data, or is refused; also what version 1 kept as a pickle."""
    path, folder, mark = balance_of(tmp_path, MODEL + GROUPS), tmp_path / "saved", tmp_path / "mark"
    train(path, 1, folder=str(folder))
    step = folder / "step-00000001"
    stored = dcp.FileSystemReader(step).read_metadata()
    key = {"t": "tied", "r": "ranks.0", "o": "optimizer.state.0.weight.step"}[where[0]]
    evil = pickle.dumps(Evil(mark)) if where.endswith("1") else Evil(mark)
    if where == "ranks inside":
        buffer = io.BytesIO()
        torch.save({"groups": [], "others": Evil(mark)}, buffer)
        evil = buffer.getvalue()
    buffer = io.BytesIO()
    torch.save(evil, buffer)
    _replace(step, stored, key, buffer.getvalue())
    if where[0] == "t":
        with pytest.raises(FileError, match="cannot be read"):
            export_weights(str(step), str(tmp_path / "model.pt"))
    else:
        with pytest.raises(FileError, match="cannot be read"):
            train(path, 2, resume=str(step))
    assert not mark.exists()


def _replace(step: Path, index: Metadata, key: str, content: bytes) -> None:
    """Makes `content` what a checkpoint holds under a key, in a file of its own."""
    index.state_dict_metadata[key] = dcp.metadata.BytesStorageMetadata()
    for place in [place for place in index.storage_data if place.fqn == key]:
        del index.storage_data[place]
    (step / "evil.distcp").write_bytes(content)
    index.storage_data[dcp.metadata.MetadataIndex(key)] = filesystem._StorageInfo("evil.distcp", 0, len(content))
    (step / ".metadata").write_bytes(pickle.dumps(index))
    sizes = {path.name: path.stat().st_size for path in step.iterdir() if path.name != "checkpoint.json"}
    described(step, index_sha256=index_digest(step), files=sizes)


def described(step: Path, /, **fields: Any) -> None:
    """Makes a checkpoint say something else of itself."""
    description = json.loads((step / "checkpoint.json").read_text())
    (step / "checkpoint.json").write_text(json.dumps(description | fields))


@pytest.mark.parametrize("kind", ["zip", "legacy", "plain pickle"])
def test_a_weights_file_that_attacks_is_not_run(kind: str, tmp_path: Path) -> None:
    """All formats that `torch.load` takes."""
    path, mark = tmp_path / "weights.pt", tmp_path / "mark"
    state = {"weight": torch.ones(2, 3), "bias": Evil(mark)}
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps(Evil(mark)))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(FileError, match="cannot be read as weights"):
        load(str(path))
    assert not mark.exists()


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "missing", "flipped", "index truncated", "index flipped", "a folder", "a pipe"]
)
def test_a_damaged_checkpoint_is_one_message(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, which is no answer, and not 1, which would be "does not fit"; nothing is exported or trained."""
    path, folder = balance_of(tmp_path, MODEL + GROUPS), tmp_path / "saved"
    train(path, 1, folder=str(folder))
    step = folder / "step-00000001"
    target = step / ".metadata" if damage.startswith("index") else next(step.glob("*.distcp"))
    content = bytearray(target.read_bytes())
    if damage == "missing":
        target.unlink()
    elif damage == "a folder":
        target.unlink()
        target.mkdir()
    elif damage == "a pipe":
        target.unlink()
        os.mkfifo(target)
    elif damage.endswith("flipped"):
        weight = read_folder(str(step)).tensor("model.0.weight").numpy().tobytes()
        place = content.find(b"model.0.weight" if "index" in damage else weight)
        assert place > 0
        content[place] ^= 1
        target.write_bytes(content)
    else:
        target.write_bytes(content[: 0 if damage == "empty" else len(content) * 2 // 3])
    ran = call(capsys, "export", str(step), "-o", str(tmp_path / "model.pt"))
    assert ran.code == 2
    assert str(step) in ran.error
    assert "bug" not in ran.err
    with pytest.raises(FileError, match=str(step)):
        train(path, 2, resume=str(step))


def edited(folder: Path, edit: Callable[[Metadata], None]) -> str:
    path = folder / ".metadata"
    index = pickle.loads(path.read_bytes())
    edit(index)
    path.write_bytes(pickle.dumps(index))
    return str(folder)


def _places(index: Metadata) -> list[Any]:
    return list(index.storage_data.values())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda i: setattr(_places(i)[0], "relative_path", "../other"), "points out of the folder"),
        (lambda i: setattr(_places(i)[0], "relative_path", "/etc/passwd"), "points out of the folder"),
        (lambda i: setattr(_places(i)[0], "length", 10**15), "ends before what it should hold"),
        (lambda i: setattr(_places(i)[0], "offset", -1), "a place in a file that is no number"),
        (lambda i: setattr(i.state_dict_metadata["model.weight"], "size", torch.Size([10**9, 10**9])), "is not whole"),
        (lambda i: setattr(i.state_dict_metadata["model.weight"], "chunks", []), "is not whole"),
        (
            lambda i: i.state_dict_metadata["model.weight"].chunks.extend(i.state_dict_metadata["model.weight"].chunks),
            "is not whole",
        ),
        (lambda i: i.storage_data.clear(), "does not say where"),
        (lambda i: setattr(i, "state_dict_metadata", None), "a table is missing"),
    ],
)
def test_an_index_is_checked_before_anything_is_read(
    edit: Callable[[Metadata], None], message: str, tmp_path: Path
) -> None:
    """Sizes against the bytes there are, so that none can ask for more memory than the files have."""
    folder = edited(Path(save_folder(tmp_path / "folder")), edit)
    with pytest.raises(FileError, match=message):
        read_folder(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04",
        b".",
        b"\x80\x04(.",
        b"\x80\x04]\x94r\xff\xff\xff\xff0N",
        b"\x80\x04\x8e" + b"\xff" * 8,
        b"\x80\x04}" + b")" + b"\x85" * 200_000 + b"Ns",
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04h\x05.",
        b"\x80\x04Nb.",
        b"\x80\x04NNR.",
        b"\x82\x01.",
    ],
)
def test_pickles_that_are_no_index(content: bytes) -> None:
    """Memo bombs, nests that make Python's hash overflow its stack, extension codes: nothing but a refusal."""
    with pytest.raises(InertError):
        read_inert(content, admits=lambda _: False)


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    """Scalars, empty tensors, half precision, several chunks, one value that is no tensor."""
    more = {"extra": {"scalar": torch.tensor(2.5), "none": torch.empty(0, 3), "half": torch.ones(4).half(), "n": 3}}
    stored = read_folder(save_folder(tmp_path / "folder", **more))
    assert torch.equal(stored.tensor("extra.scalar"), torch.tensor(2.5))
    assert stored.tensor("extra.none").shape == (0, 3)
    assert stored.tensor("extra.half").dtype == torch.float16
    assert stored.value("extra.n") == 3
    assert torch.equal(stored.tensor("model.weight"), linear().weight)
    assert stored.index.paths["extra.n"] == ("extra", "n")


def test_checkpoints_of_version_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their weights are read and exported, tied ones too; a run is not resumed from the pickles in them."""
    names = pickle.dumps({"weight": "weight", "bias": "bias", "again": "weight"})
    folder = save_folder(tmp_path / "step-00000003", tied=names, ranks={"0": pickle.dumps({})})
    (tmp_path / "step-00000003/checkpoint.json").write_text('{"schema": "gpipe-plan/checkpoint/v1", "step": 3}')
    assert torch.equal(load(folder)["weight"], linear().weight)
    assert export_weights(folder, str(tmp_path / "model.pt")) == 3
    assert torch.equal(torch.load(tmp_path / "model.pt")["again"], linear().weight)
    path = balance_of(tmp_path, MODEL + GROUPS)
    with pytest.raises(
        FileError, match="has schema 'gpipe-plan/checkpoint/v1', not gpipe-plan/checkpoint/v2"
    ) as raised:
        train(path, 2, resume=folder)
    assert "--weights" in raised.value.hint


def test_a_description_that_is_none(tmp_path: Path) -> None:
    """Deep nests, other types, another checkpoint's index."""
    path, folder = balance_of(tmp_path, MODEL + GROUPS), tmp_path / "saved"
    train(path, 2, folder=str(folder), every=1)
    step = folder / "step-00000001"
    for text in ("[" * 200_000, "[]", '{"schema": 1}', '{"schema": "gpipe-plan/checkpoint/v2", "step": "x"}', "\xff"):
        (step / "checkpoint.json").write_text(text, encoding="latin-1")
        with pytest.raises(FileError, match="step-00000001"):
            train(path, 3, resume=str(step))
    shutil.copy(folder / "step-00000002/checkpoint.json", step / "checkpoint.json")
    with pytest.raises(FileError, match="is not the one that"):
        train(path, 3, resume=str(step))


@pytest.mark.parametrize("damage", ["a pipe", "spaces"])
def test_a_description_that_never_ends_is_refused(damage: str, tmp_path: Path) -> None:
    """A pipe is not waited for, and a large file is not read."""
    path, folder = balance_of(tmp_path, MODEL + GROUPS), tmp_path / "saved"
    train(path, 1, folder=str(folder))
    description = folder / "step-00000001/checkpoint.json"
    if damage == "a pipe":
        description.unlink()
        os.mkfifo(description)
    else:
        description.write_text(description.read_text() + " " * 2**22)
    with pytest.raises(FileError, match="is no checkpoint of a run"):
        train(path, 2, resume=str(folder / "step-00000001"))


def test_the_size_of_an_index_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes and in operations: each byte of a pickle may stand for a list."""
    folder = save_folder(tmp_path / "folder")
    monkeypatch.setattr(inert, "_MOST_OPERATIONS", 100)
    with pytest.raises(FileError, match="it has more than 100 operations"):
        read_folder(folder)
    with (tmp_path / "folder/.metadata").open("wb") as file:
        file.truncate(2**28 + 1)
    with pytest.raises(FileError, match="it has more than 268435456 bytes"):
        read_folder(folder)


@pytest.mark.parametrize("files", ["tensors", "index and tensors"])
def test_files_of_two_checkpoints_are_not_mixed(files: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of another step has the same size and is whole in itself; neither `export` nor a resume takes it."""
    path, folder = balance_of(tmp_path, MODEL + GROUPS), tmp_path / "saved"
    train(path, 2, folder=str(folder), every=1)
    stale, step = folder / "step-00000001", folder / "step-00000002"
    for name in sorted(entry.name for entry in step.glob("*.distcp")):
        assert (stale / name).stat().st_size == (step / name).stat().st_size
        shutil.copy(stale / name, step / name)
    if files == "index and tensors":
        shutil.copy(stale / ".metadata", step / ".metadata")
    ran = call(capsys, "export", str(step), "-o", str(tmp_path / "model.pt"))
    assert ran.code == 2
    assert ("of another checkpoint" if files == "tensors" else "is not the one that") in ran.error
    assert not (tmp_path / "model.pt").exists()
    with pytest.raises(FileError, match="step-00000002"):
        train(path, 3, resume=str(step))


def test_torch_reads_a_checkpoint_with_digests(tmp_path: Path) -> None:
    """Its own loader ignores the digests in the index."""
    path, folder = balance_of(tmp_path, MODEL + GROUPS), tmp_path / "saved"
    train(path, 1, folder=str(folder))
    step = folder / "step-00000001"
    weight = read_folder(str(step)).tensor("model.0.weight")
    loaded = {"model": {"0.weight": torch.zeros_like(weight)}}
    dcp.load(loaded, checkpoint_id=str(step), no_dist=True)
    assert torch.equal(loaded["model"]["0.weight"], weight)


def test_only_data_is_saved() -> None:
    """Known before the run begins; NumPy's numbers become Python's."""
    assert as_data({"best": np.float64(0.5), "at": [np.int64(3)]}, "") == {"best": 0.5, "at": [3]}
    assert torch.load(io.BytesIO(packed({"best": np.float32(0.5)})), weights_only=True) == {"best": 0.5}
    with pytest.raises(UsageError, match=r"the state of \"mine\"\['a'\]\[0\] is a pathlib\.\w*\.?PosixPath"):
        as_data({"a": [Path("x")]}, 'the state of "mine"')


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"branches": [["run", "x"]]}, '"branches" in its'),
        ({"branches": {"run": 1}}, '"branches" in its'),
        ({"files": {"../../etc/passwd": 1}}, '"files" in its'),
        ({"files": None}, '"files" in its'),
        ({"computation": {"loss": "x"}}, '"computation" in its'),
        ({"balance": "all"}, '"balance" in its'),
        ({"step": 7}, "another number of steps than it says"),
    ],
)
def test_a_description_that_says_something_else(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Every field that a run goes by is looked at; the checkpoint before is taken, and nothing is removed."""
    path, folder = balance_of(tmp_path, MODEL + GROUPS), tmp_path / "saved"
    train(path, 2, folder=str(folder), every=1)
    described(folder / "step-00000002", **fields)
    with pytest.raises(FileError, match=message):
        train(path, 3, resume=str(folder / "step-00000002"))
    assert train(path, 3, folder=str(folder), resume="auto")["begun"] == 1
    assert sorted(entry.name for entry in folder.iterdir()) == [
        "abandoned-1",
        "step-00000001",
        "step-00000003",
    ]


def _rewritten(step: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edits the state of the first rank as somebody would who knows the format."""
    stored = read_folder(str(step))
    state = torch.load(io.BytesIO(stored.value("ranks.0")), weights_only=True)
    edit(state)
    buffer = io.BytesIO()
    torch.save(packed(state), buffer)
    _replace(step, dcp.FileSystemReader(step).read_metadata(), "ranks.0", buffer.getvalue())


def _reads_past_its_end(state: dict[str, Any]) -> None:
    state["random"]["numpy"][2] = 10**9


def _is_of_another_kind(state: dict[str, Any]) -> None:
    state["random"]["python"][1] = ["x"]


def _lacks_numbers(state: dict[str, Any]) -> None:
    del state["random"]["torch"]


def _loader_is_nowhere(state: dict[str, Any]) -> None:
    state["pipeline"]["loader"] = {"epoch": -1, "batch": "x"}


@pytest.mark.parametrize("edit", [_reads_past_its_end, _is_of_another_kind, _lacks_numbers, _loader_is_nowhere])
def test_random_states_that_are_none(edit: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    """One message; NumPy itself would take the first, and read what lies behind its state."""
    path, folder = balance_of(tmp_path, MODEL + GROUPS), tmp_path / "saved"
    train(path, 1, folder=str(folder))
    _rewritten(folder / "step-00000001", edit)
    with pytest.raises(FileError, match=r"the state of the (random numbers|pipeline) in it cannot be restored"):
        train(path, 2, resume=str(folder / "step-00000001"))


class _Counting(list[Any]):
    """A loader with a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        """Something that is no data."""
        return {"where": Path("x")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def test_a_loader_whose_state_is_no_data_is_refused_at_once(tmp_path: Path) -> None:
    """After the first step, not where the first checkpoint is due."""
    pipeline = Pipeline(balance_of(tmp_path, MODEL + GROUPS))
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    saved = Checkpoints(pipeline, optimizer, folder=str(tmp_path / "saved"), every=100, steps=9)
    batches = pipeline.batches(9, _Counting([(torch.ones(8, 8), torch.ones(8, 4))]))
    with pipeline.step(*next(batches)):
        optimizer.step()
    with pytest.raises(UsageError, match=r"the state of the run\['loader'\]\['loader'\]\['where'\] is a pathlib"):
        saved.step_done()
    pipeline.close()
