"""Draw the pictures of the README: badges, and the report in a browser.

    python scripts/readme_pictures.py [FOLDER]       default: docs/pictures/readme

Badges show what pyproject.toml says, without any service. The report needs chromium; without it, `report.png` is not
changed.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from readme_example import COMMANDS, PAGES, said

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures" / "readme"

_LETTER = 6.2
"""Width of a letter in a badge, at 11 px."""


def badges() -> dict[str, str]:
    """Return badges of the versions and the license in pyproject.toml, as SVG by file name."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = settings["project"]
    torch = next(n for n in project["optional-dependencies"]["train"] if n.startswith("torch>"))
    facts = {
        "python": _versions(project["requires-python"]),
        "torch": _versions(torch),
        "licence": project["license"],
        "types": "mypy, strict" if settings["tool"]["mypy"]["strict"] else "unchecked",
    }
    return {f"{what}.svg": _badge(what, fact) for what, fact in facts.items()}


def _versions(requirement: str) -> str:
    """`3.11 to 3.14` of `>=3.11,<3.15`."""
    low, end = re.findall(r"\d+\.(\d+)", requirement)
    major = requirement.split(".", maxsplit=1)[0].rpartition("=")[2]
    return f"{major}.{low} to {major}.{int(end) - 1}"


def _badge(what: str, fact: str) -> str:
    left, right = (round(_LETTER * len(text) + 12) for text in (what, fact))
    texts = "".join(
        f'<text x="{x}" y="14" textLength="{_LETTER * len(text):.0f}">{text}</text>'
        for x, text in ((left / 2, what), (left + right / 2, fact))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{what}: {fact}"><title>{what}: {fact}</title>'
        f'<clipPath id="r"><rect width="{left + right}" height="20" rx="4"/></clipPath><g clip-path="url(#r)">'
        f'<rect width="{left}" height="20" fill="#4a5361"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="#1f5f9e"/></g>'
        f'<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">{texts}</g>'
        "</svg>\n"
    )


def screenshot(page: Path, picture: Path) -> bool:
    """Whether there is a browser; then the top of the page is in `picture`."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        return False
    words = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    words += [f"--user-data-dir={page.parent / 'browser'}", "--window-size=1280,948", "--virtual-time-budget=9000"]
    subprocess.run(
        [*words, f"--screenshot={picture.resolve()}", page.as_uri()], check=True, capture_output=True, timeout=120
    )
    return True


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as work:
        for file_name, text in badges().items():
            (target / file_name).write_text(text, encoding="utf-8")
        for line in (*COMMANDS, PAGES[0]):
            said(line, Path(work))
        if not screenshot(Path(work, "report.html"), target / "report.png"):
            print("no chromium: report.png stays as it is")
