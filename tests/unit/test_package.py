"""What pyproject.toml says of the package, held against the code and the repository."""

import re
import tomllib
from typing import get_args

from planner.core.extras import Extra, install_command, packages_of
from tests.support.docs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
LINK = re.compile(r"\]\(([^)]+)\)")


def named(requirements: list[str]) -> set[str]:
    """The packages of a list of requirements, other extras of ours left out."""
    names = {re.split(r"[<>=; ]", requirement)[0] for requirement in requirements}
    return {name for name in names if not name.startswith("gpipe-plan[")}


def test_the_extras_are_those_that_messages_name() -> None:
    """Each package that a command may lack is in the extra that its message says; `tpu` brings torch, `all` is all."""
    for extra in get_args(Extra):
        assert set(packages_of(extra)) <= named(EXTRAS[extra]), extra
        assert f"[{extra}]" in install_command(extra) or extra == "train"
    assert "gpipe-plan[train]" in EXTRAS["tpu"]
    assert EXTRAS["all"] == [f"gpipe-plan[{','.join(sorted(get_args(Extra)))}]"]


def test_without_an_extra_there_is_no_package_of_one() -> None:
    """Five packages, of which none brings torch."""
    assert named(PROJECT["project"]["dependencies"]) == {"numpy", "pydantic", "pyyaml", "rich", "typer"}


def test_links_of_the_readme_are_whole_in_the_package_index() -> None:
    """There is no checkout there: the name of a file, which exists, becomes its address in the repository."""
    rules = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    ours = {link.partition("#")[0] for link in LINK.findall(text) if "://" not in link} - {""}
    assert ours
    assert {link for link in ours if not (ROOT / link).exists()} == set()
    shown = text
    for rule in rules:
        shown = re.sub(rule["pattern"], rule["replacement"], shown)
    assert {link for link in LINK.findall(shown) if not link.startswith(("https://", "#"))} == set()
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", shown)
    assert len(pictures) > 2
    assert all("/raw/" in picture for picture in pictures)


def test_the_citation_is_of_this_version() -> None:
    """One version, written twice."""
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    version = re.search(r'__version__ = "(.+)"', (ROOT / "planner" / "__init__.py").read_text(encoding="utf-8"))
    assert cited
    assert version
    assert cited[1] == version[1]
