"""Tests that pictures and figures of README and docs/schedules.md are current."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "docs" / "schedules.md"


@pytest.fixture(scope="module")
def drawn() -> tuple[dict[str, str], str]:
    """Return the pictures by file name, and the output of the script."""
    printed = pytest.MonkeyPatch()
    lines: list[str] = []
    script = runpy.run_path(str(ROOT / "scripts" / "pictures.py"))
    printed.setitem(script["pictures"].__globals__, "print", lines.append)
    try:
        return script["pictures"](), "\n".join(lines)
    finally:
        printed.undo()


def test_pictures_of_schedules_are_current(drawn: tuple[dict[str, str], str]) -> None:
    pictures, _ = drawn
    folder = ROOT / "docs" / "pictures"
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")} == pictures


def test_the_page_shows_every_picture_and_the_printed_table(drawn: tuple[dict[str, str], str]) -> None:
    pictures, table = drawn
    page = PAGE.read_text(encoding="utf-8")
    assert all(page.count(f"(pictures/{name})") == 1 for name in pictures)
    assert table in page


def test_pictures_and_badges_of_the_readme_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    pictures = runpy.run_path(str(ROOT / "scripts" / "readme_pictures.py"))["badges"]()
    folder, readme = ROOT / "docs" / "pictures" / "readme", (ROOT / "README.md").read_text(encoding="utf-8")
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.svg")} == pictures
    assert all(readme.count(f"(docs/pictures/readme/{path.name})") == 1 for path in folder.iterdir())
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
