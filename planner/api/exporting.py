"""`export`: the weights of a checkpoint as one state dict of the whole model."""

import os
from dataclasses import dataclass
from pathlib import Path

from planner import files
from planner.api.texts import File
from planner.core.errors import FileError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """State dict that was written."""

    path: Path
    checkpoint: Path
    """The checkpoint that it is of."""
    tensors: int


def export(checkpoint: File = "checkpoints", output: File = "model.pt") -> Exported:
    """Write the weights in a checkpoint as one state dict of the whole model, for use without a pipeline.

    Args:
        checkpoint: A checkpoint of train.py, or a folder of them, of which the latest is taken.
        output: Where to write; a file that ends with `.safetensors` is written as such, others by `torch.save`.

    Returns:
        The file, the checkpoint, and the number of tensors.

    Raises:
        FileError: There is no checkpoint, it is damaged, or the file cannot be written.
        UsageError: The file would lie in the checkpoint that is read.
        MissingPackageError: There is no torch.
    """
    path, source = Path(output), os.fspath(checkpoint)
    files.check_writable(str(path))

    from planner.executor import export_weights, latest_checkpoint  # noqa: PLC0415 - torch

    latest = latest_checkpoint(source)
    if latest is None:
        hint = "train.py writes them with `--checkpoint DIR`"
        raise FileError("there is no checkpoint in it", path=source, hint=hint)
    if path.resolve().is_relative_to(latest.resolve()):
        raise UsageError(f"`--output {path}` lies in the checkpoint that is read", hint="name another file")
    return Exported(path=path, checkpoint=latest, tensors=export_weights(str(latest), str(path)))
