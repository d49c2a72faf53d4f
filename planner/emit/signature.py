"""Files that a person may edit carry a digest of themselves, so that `emit` does not overwrite an edited one."""

import hashlib
from pathlib import Path

from planner.core.errors import FileError

_SIGNATURE = "\n# As emitted: "
"""Begins the last line; what follows is the digest of all above."""


def signed(body: str) -> str:
    """`body` with its digest as a comment at the end, as Python, shell, TOML and YAML write comments."""
    return f"{body}{_SIGNATURE}{_digest(body)}\n"


def is_edited(path: Path) -> bool:
    """Whether a file at this path is not, or no longer, as it was emitted."""
    text = _text(path)
    if text is None:
        return False
    body, _, signature = text.rpartition(_SIGNATURE)
    return signature.strip() != _digest(body)


def runs_balance(path: Path) -> bool:
    """Whether a file at this path was once emitted and reads `balance.yaml`, edited or not."""
    text = _text(path)
    return text is not None and _SIGNATURE in text and "balance.yaml" in text


def refuse_edited(path: Path, *, hint: str = "keep it, or pass `--force`") -> None:
    """Raises `FileError` if the file was edited since it was emitted."""
    if is_edited(path):
        raise FileError("was edited since it was emitted", path=str(path), hint=hint)


def refuse_other(path: Path, text: str) -> None:
    """Raises `FileError` if the file holds anything else that emitting `text` would lose: tables cannot be signed."""
    if _SIGNATURE in text:
        refuse_edited(path)
    elif _text(path) not in (None, text):
        raise FileError("is there, and says something else", path=str(path), hint="keep it, or pass `--force`")


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    except OSError:
        return None  # nothing that could be lost; writing will say what is wrong


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]
