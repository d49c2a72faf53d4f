"""Files that a person may edit carry a digest of themselves, so that `emit` does not overwrite an edited one."""

import hashlib
from pathlib import Path

__all__ = ["is_edited", "signed"]

_SIGNATURE = "\n# As emitted: "
"""Begins the last line; what follows is the digest of all above."""


def signed(body: str) -> str:
    """`body` with its digest as a comment at the end, as Python, shell and TOML write comments."""
    return f"{body}{_SIGNATURE}{_digest(body)}\n"


def is_edited(path: Path) -> bool:
    """Whether a file at this path is not, or no longer, as it was emitted."""
    try:
        if not path.is_file():
            return False
        body, _, signature = path.read_text(encoding="utf-8").rpartition(_SIGNATURE)
    except UnicodeDecodeError:
        return True
    except OSError:
        return False  # nothing that could be lost; writing will say what is wrong
    return signature.strip() != _digest(body)


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:16]
