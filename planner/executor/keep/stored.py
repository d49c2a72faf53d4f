"""Read the model's tensors from a checkpoint, by name."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from planner.executor.keep.index import rank_file_name, read_index
from planner.executor.keep.rank_file import RankFile


class StoredCheckpoint(Mapping[str, Tensor]):
    """Tensors of a checkpoint, by name in the model's state dict. Files and tensors are read on access.

    Raises:
        FileError: The folder is no checkpoint, or its index is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.index = read_index(folder)
        self.opened: dict[int, RankFile] = {}
        """Open files by rank."""
        self._holders: dict[str, RankFile] = {}
        """First opened file of each tensor; several ranks may store the same tied tensor."""

    def file(self, rank: int) -> RankFile:
        """Return the file of a rank, which is opened if necessary.

        Raises:
            FileError: The file is missing, damaged, or of another checkpoint.
        """
        if rank not in self.opened:
            opened = RankFile(Path(self.folder, rank_file_name(rank)), self.index.files[rank])
            self.opened[rank] = opened
            for name in opened.names:
                self._holders.setdefault(name, opened)
        return self.opened[rank]

    def file_of_tensor(self, name: str) -> tuple[RankFile, str]:
        """Return a file (if possible an open one) that has a tensor of the model, and the tensor's name in this file.

        Raises:
            FileError: The file cannot be opened.
        """
        first = self.index.stored_name(name)
        stored = name_in_rank_file(first)
        return self._holders.get(stored) or self.file(int(self.index.tensors[first])), stored

    def __getitem__(self, name: str) -> Tensor:
        """Return a tensor of the model, whose memory is mapped from the file.

        Raises:
            FileError: The tensor cannot be read.
        """
        file, stored = self.file_of_tensor(name)
        return file.tensor(stored)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in the model's state dict, in the model's order."""
        return iter(self.index.tensors)

    def __len__(self) -> int:
        """Return the number of names in the model's state dict."""
        return len(self.index.tensors)


def name_in_rank_file(name: str) -> str:
    """Return the name of a model's tensor in a rank's file."""
    return f"model.{name}"
