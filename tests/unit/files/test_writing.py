"""Files are written all at once or not at all, and what stood there before survives every failure."""

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
    """A file that exists already, alone in its folder."""
    path = tmp_path / "plan.yaml"
    path.write_text("old", encoding="utf-8")
    return path


def is_alone_and_old(path: Path) -> bool:
    """Whether the file is as it was, with no temporary file beside it."""
    return path.read_text(encoding="utf-8") == "old" and [x.name for x in path.parent.iterdir()] == [path.name]


def failing(error: BaseException) -> Callable[..., Any]:
    """A function that raises `error`."""

    def fail(*_args: object, **_kwargs: object) -> None:
        raise error

    return fail


def test_what_stood_there_is_replaced(target: Path) -> None:
    """The whole text, nothing left of a longer one."""
    target.write_text("x" * 100_000, encoding="utf-8")
    write_text(str(target), "new\n")
    assert target.read_text(encoding="utf-8") == "new\n"
    assert [x.name for x in target.parent.iterdir()] == ["plan.yaml"]


def test_text_is_utf_8(target: Path) -> None:
    """Whatever the locale says."""
    write_text(str(target), "\u00e9 \u5c42 \U0001f600")
    assert target.read_bytes() == "\u00e9 \u5c42 \U0001f600".encode()


def test_folders_are_made(tmp_path: Path) -> None:
    """`-o out/plans/plan.yaml` need not wait for mkdir."""
    path = tmp_path / "out" / "plans" / "plan.yaml"
    write(str(path), full_profile())
    assert read_profile(str(path)) == full_profile()


def test_a_relative_path_is_written_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`plan.yaml` alone, as the commands have it by default."""
    monkeypatch.chdir(tmp_path)
    write("plan.yaml", full_profile())
    assert (tmp_path / "plan.yaml").read_text(encoding="utf-8") == dump(full_profile())


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_permissions_of_the_users_umask(mask: int, tmp_path: Path) -> None:
    """As if it had been opened for writing; and the umask is what it was."""
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
def test_a_failing_write_leaves_the_old_file(
    step: str, error: OSError, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no temporary file; the error names the file and the reason."""
    monkeypatch.setattr(os, step, failing(error))
    with pytest.raises(FileError, match=r"plan\.yaml: cannot be written: (No space left on device|Permission denied)"):
        write_text(str(target), "new")
    monkeypatch.undo()
    assert is_alone_and_old(target)


def test_a_disk_that_fills_up_leaves_the_old_file(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is half written when it happens."""
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


def test_an_interrupt_leaves_the_old_file(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the wrong moment: it goes on its way, and leaves no temporary file either."""
    monkeypatch.setattr(os, "replace", failing(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        write_text(str(target), "new")
    monkeypatch.undo()
    assert is_alone_and_old(target)


def test_text_that_cannot_be_encoded_leaves_the_old_file(target: Path) -> None:
    """A path with bytes that are no UTF-8 (`os.fsdecode` makes lone surrogates of them) may end up in a value."""
    with pytest.raises(FileError, match=r"plan\.yaml"):
        write_text(str(target), "model: \udcff")
    assert is_alone_and_old(target)


def test_a_value_that_cannot_be_written_leaves_the_old_file(target: Path) -> None:
    """The text is made before the file is touched."""
    with pytest.raises(Exception, match=r".+"):
        write(str(target), object())
    assert is_alone_and_old(target)


def test_a_folder_is_not_overwritten(tmp_path: Path) -> None:
    """`-o out` where `out` is a folder."""
    (tmp_path / "out").mkdir()
    with pytest.raises(FileError, match="out: is a directory"):
        write_text(str(tmp_path / "out"), "x")
    assert list((tmp_path / "out").iterdir()) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_file_is_not_a_folder(target: Path) -> None:
    """`-o plan.yaml/x.yaml` where `plan.yaml` is a file."""
    with pytest.raises(FileError, match=r"plan.yaml/x.yaml: cannot be written"):
        write_text(str(target / "x.yaml"), "x")
    assert is_alone_and_old(target)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    """A read-only folder, for real."""
    folder = tmp_path / "locked"
    folder.mkdir(mode=0o500)
    with pytest.raises(FileError, match="cannot be written: Permission denied"):
        write_text(str(folder / "plan.yaml"), "x")


def test_a_folder_where_nothing_can_be_made_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A read-only file system: /proc for real, and as the temporary file would meet it."""
    with pytest.raises(FileError, match=r"/proc/none/plan.yaml: cannot be written: "):
        write_text("/proc/none/plan.yaml", "x")
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", failing(OSError(30, "Read-only file system")))
    with pytest.raises(FileError, match="cannot be written: Read-only file system") as raised:
        write_text(str(tmp_path / "plan.yaml"), "x")
    assert raised.value.path == str(tmp_path / "plan.yaml")
    assert raised.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_file_stays_a_link(tmp_path: Path) -> None:
    """`plan.yaml` may point into another folder: that file is written, the link is not replaced."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "plan.yaml").write_text("old", encoding="utf-8")
    link = tmp_path / "plan.yaml"
    link.symlink_to(tmp_path / "real" / "plan.yaml")
    write_text(str(link), "new")
    assert link.is_symlink()
    assert (tmp_path / "real" / "plan.yaml").read_text(encoding="utf-8") == "new"


def test_what_is_no_regular_file_is_written_into(tmp_path: Path) -> None:
    """`-o /dev/stdout`, `-o >(process)`: a device or pipe takes the text. Root would replace /dev/null itself."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    try:
        write_text(str(pipe), "new")
        assert stat.S_ISFIFO(pipe.lstat().st_mode)
        assert os.read(reader, 10) == b"new"
    finally:
        os.close(reader)


def test_the_temporary_file_lies_beside_the_target(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it might be another file system, over which nothing is replaced at once."""
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
