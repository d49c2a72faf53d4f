"""The examples in `docs/`, taken out of the pages so that tests can run them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks of one language in `docs/<page>`, in order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [found["text"] for found in _BLOCK.finditer(text) if found["language"] == language]


def commands(page: str) -> list[tuple[str, int, str]]:
    """Every command of the page's consoles: the line, the exit code it should have, and what the page shows of it."""
    found = []
    for block in blocks(page, "console"):
        for piece in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, output = piece.partition("\n")
            code = re.search(r"# exit code (\d+)$", line)
            found.append((line, int(code[1]) if code else 0, output))
    return found
