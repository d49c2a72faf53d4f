"""Metadata of the package in pyproject.toml, compared with the code and the repository."""

import re
import tomllib
from typing import get_args

from planner.core.extras import Extra, install_command, packages_of
from tests.support.docs import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
LINK = re.compile(r"\]\(([^)]+)\)")


def package_names(requirements: list[str]) -> set[str]:
    """Return the packages of a list of requirements, without our own extras."""
    names = {re.split(r"[<>=; ]", requirement)[0] for requirement in requirements}
    return {name for name in names if not name.startswith("gpipe-plan[")}


def test_extras_contain_the_packages_that_messages_name() -> None:
    for extra in get_args(Extra):
        assert set(packages_of(extra)) <= package_names(EXTRAS[extra]), extra
        assert f"[{extra}]" in install_command(extra) or extra == "train"
    assert "gpipe-plan[train]" in EXTRAS["tpu"]
    assert EXTRAS["all"] == [f"gpipe-plan[{','.join(sorted(get_args(Extra)))}]"]


def test_required_packages_do_not_include_torch() -> None:
    assert package_names(PROJECT["project"]["dependencies"]) == {"numpy", "pydantic", "pyyaml", "rich", "typer"}


def test_readme_links_are_absolute_in_the_package_index() -> None:
    """The package index has no checkout, so a relative link becomes an address in the repository."""
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


def test_citation_has_the_version_of_the_package() -> None:
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    version = re.search(r'__version__ = "(.+)"', (ROOT / "planner" / "__init__.py").read_text(encoding="utf-8"))
    assert cited
    assert version
    assert cited[1] == version[1]
