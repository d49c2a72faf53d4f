"""Examples of the pages in `docs/`, for tests that run them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of one language in a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [found["text"] for found in _BLOCK.finditer(text) if found["language"] == language]


def lines(page: str) -> list[tuple[str, str]]:
    """Return every command in consoles and shell blocks of a page, with the shown output."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found: list[tuple[str, str]] = []
    for block in _BLOCK.finditer(text):
        if block["language"] == "console":
            pieces = re.split(r"^\$ ", block["text"], flags=re.MULTILINE)[1:]
            found.extend((line, output) for line, _, output in (piece.partition("\n") for piece in pieces))
        elif block["language"] == "sh":
            found.extend((line, "") for line in block["text"].splitlines() if line)
    return found


def quick(line: str) -> str:
    """Return the command with short measurements and trainings, on the CPU."""
    line = line.replace(" --device cuda", "")
    line = re.sub(r"\bprofile (model\.py|\.\./sample_models/\S*)", r"profile \1 --proof-budget 0s", line)
    line = re.sub(r"\bprofile (\S*\.py)", r"profile \1 --repeat 2 --time-budget 0s", line)
    line = re.sub(r"^gpipe-plan verify(?!.* --steps)", "gpipe-plan verify --steps 4", line)
    return re.sub(r"--steps (?:10|20)\b|(?<= train\.py)$", lambda m: f"{'' if m[0] else ' '}--steps 4", line)


def commands(page: str) -> list[tuple[str, int, str]]:
    """Return every console command of the page, with its expected exit code and shown output."""
    found = []
    for block in blocks(page, "console"):
        for piece in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, output = piece.partition("\n")
            code = re.search(r"# exit code (\d+)$", line)
            found.append((line, int(code[1]) if code else 0, output))
    return found
