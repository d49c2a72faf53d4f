"""Compatibility of the versions that `make` installs."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PINS = ROOT / "constraints.txt"


def test_torchvision_pin_matches_torch() -> None:
    """Each torchvision release is built for one torch release: 0.(n + 15) for 2.n."""
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", PINS.read_text(encoding="utf-8"), re.MULTILINE))
    torch, vision = (tuple(map(int, pins[name].split(".")[:2])) for name in ("torch", "torchvision"))
    assert vision == (0, torch[1] + 15)


def test_build_requirements_are_pinned() -> None:
    """Builds are isolated from `--constraint`, so each place that builds the package sets its own constraint."""
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    needed = {re.split(r"[<>=]", name)[0] for name in requires} | {
        "trove-classifiers",
        "packaging",
        "pathspec",
        "pluggy",
    }
    assert needed <= set(re.findall(r"^([\w-]+)==", PINS.read_text(encoding="utf-8"), re.MULTILINE))
    for name in ("action.yml", "Makefile", "scripts/light", ".github/workflows/ci.yml"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert re.search(r"\bPIP_CONSTRAINT\b", text), name
        assert "PIP_BUILD_CONSTRAINT" in text, name


def test_dependabot_updates_pinned_actions() -> None:
    renewed = yaml.safe_load((ROOT / ".github/dependabot.yml").read_text(encoding="utf-8"))
    assert "github-actions" in [update["package-ecosystem"] for update in renewed["updates"]]


def test_workflow_tests_lowest_pinned_and_highest_torch() -> None:
    declared = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    tried = re.search(r"torch: \[(.*)\]", (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    pinned = re.search(r"^torch==2\.(\d+)", PINS.read_text(encoding="utf-8"), re.MULTILINE)
    assert declared
    assert tried
    assert pinned
    lowest, end, pin = (int(number) for number in (*declared.groups(), pinned[1]))
    assert [int(minor) for minor in re.findall(r"2\.(\d+)\.\d+", tried[1])] == [lowest, pin, end - 1]
