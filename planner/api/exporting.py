"""`export`: write the weights of a checkpoint as one state dict of the unpartitioned model."""

import os
from dataclasses import dataclass
from pathlib import Path

from planner import files
from planner.api.texts import File
from planner.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportResult:
    """Result of `export`."""

    path: Path
    """Written file."""
    checkpoint: Path
    """Checkpoint whose weights were written."""
    tensors: int
    """Number of tensors in the file."""


def export(checkpoint: File = "checkpoints", output: File = "model.pt") -> ExportResult:
    """Write the weights in a checkpoint as one state dict of the unpartitioned model.

    Args:
        checkpoint: A checkpoint of train.py, or a folder of checkpoints, of which the latest is used.
        output: Path of the file to write, in safetensors format if it ends in `.safetensors`, else by `torch.save`.

    Returns:
        The file, the checkpoint, and the number of tensors.

    Raises:
        FileError: There is no checkpoint, it is damaged, or the file cannot be written.
        UsageError: The file would be inside the checkpoint.
        MissingPackageError: torch is not installed.
    """
    path, source = Path(output), os.fspath(checkpoint)
    files.check_writable(str(path))

    from planner.executor.keep.saved import latest_checkpoint, no_checkpoint_error  # noqa: PLC0415 - torch
    from planner.executor.keep.weights import export_weights  # noqa: PLC0415 - torch

    latest = latest_checkpoint(source)
    if latest is None:
        raise no_checkpoint_error(source)
    if path.resolve().is_relative_to(latest.resolve()):
        raise UsageError(f"`--output {path}` is inside the checkpoint", hint="name another file")
    return ExportResult(path=path, checkpoint=latest, tensors=export_weights(str(latest), str(path)))
