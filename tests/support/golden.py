"""Golden texts. `GOLDEN=write pytest …` writes them; read their diff."""

import os
from pathlib import Path

from planner import __version__


def assert_golden(path: Path, text: str) -> None:
    """Compare `text` with a golden file, except for the version."""
    shown = text.replace(f'"{__version__}"', '"VERSION"')
    if os.environ.get("GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown, encoding="utf-8")
    assert shown == path.read_text(encoding="utf-8")
