"""Texts that were looked at once and must stay so. `GOLDEN=write pytest …` writes them anew, to be looked at."""

import os
from pathlib import Path

from planner import __version__


def assert_golden(path: Path, text: str) -> None:
    """Compares `text` with what is in `path`, the version left open."""
    shown = text.replace(f'"{__version__}"', '"VERSION"')
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")
