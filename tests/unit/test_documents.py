"""Consistency of the documents: links, navigation of the site, and figures from measurements."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from planner import __version__
from tests.support.docs import ROOT

DOCS = ROOT / "docs"
PAGES = (*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "sample_models").glob("*.md"))


def prose(page: Path) -> str:
    """Return the page without code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors of the page's headings, as GitHub and the site write them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in plain}


def is_broken(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    return not target.exists() or (bool(anchor) and anchor not in anchors(target))


def test_links_between_documents_are_valid() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)\s]+)\)", prose(page))]
    ours = [(page, link) for page, link in links if "://" not in link]
    assert len(ours) > 100
    assert [(page.name, link) for page, link in ours if is_broken(page, link)] == []


def pages_of(nav: Any) -> Iterator[str]:
    """Yield the pages of an mkdocs navigation."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from pages_of(part)


def test_site_navigation_lists_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    assert sorted(pages_of(nav)) == sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))


def addresses() -> dict[str, set[str]]:
    """Return `owner/name` of this repository, as the files write it, with the files."""
    files = [*PAGES, ROOT / "pyproject.toml", ROOT / "CITATION.cff", *ROOT.glob(".github/**/*.yml")]
    found: dict[str, set[str]] = {}
    for path in files:
        for name in re.findall(r"(?:github\.com/|uses: )([\w-]+/gpipe-plan)\b", path.read_text(encoding="utf-8")):
            found.setdefault(name, set()).add(path.name)
    return found


def test_repository_address_is_the_same_in_all_files() -> None:
    """The reference is `Homepage` in pyproject.toml."""
    homepage = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Homepage"]
    assert set(addresses()) == {homepage.removeprefix("https://github.com/")}


def test_released_version_has_no_placeholder_address() -> None:
    is_released = f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert not (is_released and "OWNER/gpipe-plan" in addresses())


def test_site_loads_search_from_its_own_folder() -> None:
    """The theme loads a script from another server unless `extra.polyfills` lists one with its name."""
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert "offline" in site["plugins"]
    assert [script for script in site["extra"]["polyfills"] if "iframe-worker" in script]
    files = [*site["extra"]["polyfills"], site["theme"]["logo"]]
    assert [name for name in files if not (ROOT / site["theme"]["custom_dir"] / name).is_file()] == []


def tables(page: str) -> list[dict[str, list[str]]]:
    """Return the columns of every table in a page, by header."""
    found = re.findall(r"(?:^\|.*\n)+", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    cells = [[[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()] for table in found]
    return [{name: [row[n] for row in rows] for n, name in enumerate(header)} for header, _, *rows in cells]


def test_comparison_with_other_planners_matches_measurements() -> None:
    of = next(table for table in tables("measurements/solve.md") if "VGG-16" in table.get("chain", ()))
    said = next(table for table in tables("../README.md") if "planner" in table)
    planners = [row for row in zip(*said.values(), strict=True) if row[0] != "**gpipe-plan**"]
    assert len(planners) == 4
    for planner, steps, fitting in planners:
        pairs = list(zip(of["caps"], of[planner], strict=True))
        free = [float(step) for caps, step in pairs if caps == "none"]
        tight = [step for caps, step in pairs if caps == "tight"]
        assert steps == f"{min(free):.2f} to {max(free):.2f}"
        assert fitting == f"{len(tight) - tight.count('OOM')} of {len(tight)}"


def test_executor_figures_match_measurements() -> None:
    """The figures are ratios to torch's own schedules."""
    columns = [table["ours / bare"] for table in tables("measurements/executor.md")]
    ratios = [float(ratio) for column in columns for ratio in column if ratio]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{min(ratios):.3f} to {max(ratios):.3f}, median {median(ratios):.3f}" in readme
