"""A checkpoint that is open for reading."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from planner.executor.keep.index import file_name, read_index
from planner.executor.keep.rank_file import RankFile


class StoredCheckpoint(Mapping[str, Tensor]):
    """The tensors of the model in a checkpoint by name, each read when it is asked for.

    Args:
        folder: The checkpoint. Each of its files is opened once, when something in it is needed.

    Raises:
        FileError: It is none, or its index is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.index = read_index(folder)
        self.opened: dict[int, RankFile] = {}
        """By rank."""
        self._holders: dict[str, RankFile] = {}
        """By name in the open files: the file that was opened first. Ranks with a tied tensor store it each."""

    def file(self, rank: int) -> RankFile:
        """Return a rank's file.

        Raises:
            FileError: It is missing, damaged, or of another checkpoint.
        """
        if rank not in self.opened:
            opened = RankFile(Path(self.folder, file_name(rank)), self.index.files[rank])
            self.opened[rank] = opened
            for name in opened.names:
                self._holders.setdefault(name, opened)
        return self.opened[rank]

    def holder(self, name: str) -> tuple[RankFile, str]:
        """Return a file that has a tensor of the model, an open one if possible, and the tensor's name in it.

        Raises:
            FileError: The file cannot be opened.
        """
        first = self.index.first_name(name)
        stored = stored_name(first)
        return self._holders.get(stored) or self.file(int(self.index.tensors[first])), stored

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor of the model, whose memory is the file's.

        Raises:
            FileError: It cannot be read.
        """
        file, stored = self.holder(name)
        return file.tensor(stored)

    def __iter__(self) -> Iterator[str]:
        """Iterate over all names, in the model's order."""
        return iter(self.index.tensors)

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self.index.tensors)


def stored_name(name: str) -> str:
    """Return the name in a rank's file of a tensor of the model."""
    return f"model.{name}"
