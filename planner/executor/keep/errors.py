"""Errors during the reading of a checkpoint or a weights file: one message that names the file."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.core.errors import FileError, PlannerError


@contextmanager
def reading_errors(path: str | Path, subject: str) -> Iterator[None]:
    """Convert any error in the block to a `FileError` with the message "`subject` cannot be read: …".

    Raises:
        FileError: The block raised an error that is not a `PlannerError`.
    """
    try:
        yield
    except PlannerError:
        raise
    except Exception as error:
        message = f"{subject} cannot be read: {first_line_of_error(error)}".lstrip()
        raise FileError(message, path=str(path), hint="use another checkpoint or file") from error


def first_line_of_error(error: BaseException) -> str:
    """Return the first line of an error's message, without torch's advice to load with `weights_only=False`."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error})"
    if str(error).startswith("mmap can only be used with files saved with"):
        return "it is not a zip file of `torch.save`"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].startswith("Weights only load failed"):
        return next(
            (line.partition("WeightsUnpickler error: ")[2] for line in lines if "WeightsUnpickler error" in line),
            "it holds more than data",
        )
    return lines[0] if lines else type(error).__name__


def size_of_regular_file(path: Path, *, most_bytes: int | None = None) -> int:
    """Return the size of a regular file in bytes. Refuse pipes and devices, because reading them might never end.

    Raises:
        ValueError: The file is not regular, or has more than `most_bytes` bytes.
        OSError: The file does not exist.
    """
    if not path.is_file():
        path.stat()
        raise ValueError("it is not a regular file")
    size = path.stat().st_size
    if most_bytes is not None and size > most_bytes:
        raise ValueError(f"it has {size} bytes, more than the allowed {most_bytes}")
    return size
