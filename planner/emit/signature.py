"""Signatures of emitted files: digests that show if a user has edited a file."""

import hashlib
from pathlib import Path

from planner.core.errors import FileError

_SIGNATURE = "\n# As emitted: "
"""Start of an emitted file's last line, which continues with the digest of all earlier lines."""


def with_signature(body: str) -> str:
    """Return `body` and a comment with its digest. The comment is valid in Python, shell, TOML and YAML."""
    return f"{body}{_SIGNATURE}{_digest(body)}\n"


def is_edited(path: Path) -> bool:
    """Return True if the file exists, and a user has edited it or `emit` did not write it."""
    text = _text(path)
    if text is None:
        return False
    body, _, signature = text.rpartition(_SIGNATURE)
    return signature.strip() != _digest(body)


def is_edited_script(path: Path) -> bool:
    """Return True if `emit` wrote the file, its text names `balance.yaml`, and a user has edited it."""
    text = _text(path)
    return text is not None and _SIGNATURE in text and "balance.yaml" in text and is_edited(path)


def refuse_overwrite(path: Path, text: str) -> None:
    """Raise FileError if writing `text` would overwrite a file that a user has edited."""
    hint = "to replace it, pass `--force`; to keep it, emit into another folder with `-o`"
    if _SIGNATURE in text:
        if is_edited(path):
            raise FileError("was edited since it was emitted", path=str(path), hint=hint)
    # Without a signature, any difference may be an edit.
    elif _text(path) not in (None, text):
        raise FileError("exists with other content", path=str(path), hint=hint)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    except OSError:
        return None  # the file is not readable; writing it will report the error


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]
