"""Atomic writing: files are written completely or not at all, and failures keep the previous file."""

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner.core.errors import FileError
from planner.files import dump, read_profile, write, write_text
from tests.support.file_values import full_profile


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return an existing file, alone in its folder."""
    path = tmp_path / "plan.yaml"
    path.write_text("old", encoding="utf-8")
    return path


def is_alone_and_old(path: Path) -> bool:
    """Return True if the file is unchanged and there is no temporary file."""
    return path.read_text(encoding="utf-8") == "old" and [x.name for x in path.parent.iterdir()] == [path.name]


def failing(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises `error`."""

    def fail(*_args: object, **_kwargs: object) -> None:
        raise error

    return fail


def test_existing_file_is_replaced(target: Path) -> None:
    target.write_text("x" * 100_000, encoding="utf-8")
    write_text(str(target), "new\n")
    assert target.read_text(encoding="utf-8") == "new\n"
    assert [x.name for x in target.parent.iterdir()] == ["plan.yaml"]


def test_text_is_written_as_utf8(target: Path) -> None:
    write_text(str(target), "\u00e9 \u5c42 \U0001f600")
    assert target.read_bytes() == "\u00e9 \u5c42 \U0001f600".encode()


def test_missing_folders_are_created(tmp_path: Path) -> None:
    path = tmp_path / "out" / "plans" / "plan.yaml"
    write(str(path), full_profile())
    assert read_profile(str(path)) == full_profile()


def test_relative_path_is_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write("plan.yaml", full_profile())
    assert (tmp_path / "plan.yaml").read_text(encoding="utf-8") == dump(full_profile())


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_new_file_has_the_permissions_of_the_umask(mask: int, tmp_path: Path) -> None:
    """The umask is not changed."""
    before = os.umask(mask)
    try:
        write_text(str(tmp_path / "plan.yaml"), "x")
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "plan.yaml").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("step", ["replace", "chmod"])
@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")], ids=["full", "denied"]
)
def test_failing_write_keeps_the_previous_file(step, error, target, monkeypatch):
    monkeypatch.setattr(os, step, failing(error))
    with pytest.raises(FileError, match=r"plan\.yaml: cannot be written: (No space left on device|Permission denied)"):
        write_text(str(target), "new")
    monkeypatch.undo()
    assert is_alone_and_old(target)


def test_full_disk_keeps_the_previous_file(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = tempfile.NamedTemporaryFile

    def full(*args: Any, **kwargs: Any) -> Any:
        file = make(*args, **kwargs)
        write_some = file.write

        def write_half(text: str) -> int:
            write_some(text[: len(text) // 2])
            raise OSError(28, "No space left on device")

        file.write = write_half
        return file

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    with pytest.raises(FileError, match="No space left on device"):
        write_text(str(target), "new" * 1000)
    assert is_alone_and_old(target)


def test_interrupt_keeps_the_previous_file(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write_text(str(target), "new")
    monkeypatch.undo()
    assert is_alone_and_old(target)


def test_folder_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(FileError, match="out: is a directory"):
        write_text(str(tmp_path / "out"), "x")
    assert list((tmp_path / "out").iterdir()) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("work", "message"),
    [
        # Paths that are not UTF-8 contain lone surrogates (`os.fsdecode`).
        (lambda target: write_text(str(target), "model: \udcff"), r"plan\.yaml"),
        (lambda target: write(str(target), object()), "."),
        (lambda target: write_text(str(target / "x.yaml"), "x"), "plan.yaml/x.yaml: cannot be written"),
    ],
    ids=["not UTF-8", "no value of a file", "file as folder"],
)
def test_refused_write_keeps_the_previous_file(work: Callable[[Path], None], message: str, target: Path) -> None:
    with pytest.raises(Exception, match=message) as refused:
        work(target)
    assert isinstance(refused.value, FileError) or message == "."
    assert is_alone_and_old(target)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_write_permission_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(FileError, match="cannot be written: Permission denied"):
        write_text(str(folder / "plan.yaml"), "x")


def test_read_only_file_system_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"/proc/none/plan.yaml: cannot be written: "):
        write_text("/proc/none/plan.yaml", "x")
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", failing(OSError(30, "Read-only file system")))
    with pytest.raises(FileError, match="cannot be written: Read-only file system") as raised:
        write_text(str(tmp_path / "plan.yaml"), "x")
    assert raised.value.path == str(tmp_path / "plan.yaml")
    assert raised.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_symlink_is_kept_and_its_target_written(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "plan.yaml").write_text("old", encoding="utf-8")
    link = tmp_path / "plan.yaml"
    link.symlink_to(tmp_path / "real" / "plan.yaml")
    write_text(str(link), "new")
    assert link.is_symlink()
    assert (tmp_path / "real" / "plan.yaml").read_text(encoding="utf-8") == "new"


def test_devices_and_pipes_are_written_into(tmp_path: Path) -> None:
    """Root would otherwise replace /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        write_text(str(pipe), "new")
        assert stat.S_ISFIFO(pipe.lstat().st_mode)
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)


def test_temporary_file_is_in_the_folder_of_the_target(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files on another file system cannot be replaced atomically."""
    seen: list[tuple[str, str]] = []
    replace = os.replace

    def spy(source: str, to: str | Path) -> None:
        seen.append((str(Path(source).parent), str(to)))
        assert Path(source).read_text(encoding="utf-8") == "new"
        assert target.read_text(encoding="utf-8") == "old"
        replace(source, to)

    monkeypatch.setattr(os, "replace", spy)
    write_text(str(target), "new")
    assert seen == [(str(target.parent), str(target))]
