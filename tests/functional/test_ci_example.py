"""Tests of the example of `docs/ci.md`: its commands run, and the repository has what it uses."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.cli import environment, known_executor
from tests.support.docs import ROOT, blocks, commands, quick

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

_VARYING = (
    (re.compile(r"\b\d[\d.,]* (us|ms|s)\b"), "TIME"),
    (re.compile(r"[-+]?\d[\d.,]*( ?%| samples/s)"), "SHARE"),
    (re.compile(r"[0-9a-f]{12}…"), "DIGEST"),
    (re.compile(r"^GP402.*\n\n", re.MULTILINE), ""),
    (re.compile(r" \((\d+ errors)(, \d+ notes?)?\)"), r" (\1)"),
    (re.compile(r" +"), " "),
)


def steady(text: str) -> str:
    """Return `text` without times and values computed from them, which differ between measurements."""
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    return text


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, str, int, int, str]]:
    """Return for each command of the page: line, shown output, expected code, real code, real stdout."""
    folder = tmp_path_factory.mktemp("ci")
    (model,) = blocks("docs/ci.md", "python")
    (folder / "model.py").write_text(model)
    bin_ = folder / "bin"
    bin_.mkdir()
    (bin_ / "gpipe-plan").write_text('#!/bin/sh\nexec python -m planner "$@"\n')
    (bin_ / "gpipe-plan").chmod(0o755)
    import sys

    env = environment(
        PATH=f"{bin_}:{Path(sys.executable).parent}:{environment()['PATH']}",
        GIT_AUTHOR_NAME="a",
        GIT_AUTHOR_EMAIL="a@example.org",
        GIT_COMMITTER_NAME="a",
        GIT_COMMITTER_EMAIL="a@example.org",
        GIT_CONFIG_GLOBAL="/dev/null",
        XDG_CACHE_HOME=known_executor(folder / "cache"),
    )
    subprocess.run(["git", "init", "-q", "-b", "main"], cwd=folder, check=True)
    rows = []
    for line, code, shown in commands("docs/ci.md"):
        # Some builds of bash say how wide they take the terminal to be, without one.
        done = subprocess.run(
            ["bash", "-c", "unset COLUMNS; " + quick(line).replace(" --proof-budget 0s", "")],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        rows.append((line, shown, code, done.returncode, done.stdout))
    return rows


def test_commands_have_the_exit_codes_of_the_page(printed: list[tuple[str, str, int, int, str]]) -> None:
    assert [(line, code) for line, _, code, *_ in printed] == [(line, real) for line, _, _, real, _ in printed]


def test_outputs_equal_those_on_the_page(printed: list[tuple[str, str, int, int, str]]) -> None:
    """Compare findings, bytes and suggested limits, which do not depend on the speed of the machine."""
    for line, shown, _, _, out in printed:
        for part in steady(shown).split("\n…\n"):
            assert part.strip() in steady(out), line


def test_the_failing_check_names_stage_bytes_and_a_limit_that_fits() -> None:
    shown = next(output for _, code, output in commands("docs/ci.md") if code == 1)
    assert re.search(
        r'GP101 error: stage 1 \("2" to "4"\) needs [\d.]+ MiB, [\d.]+ MiB over its limit of 38.1 MiB', shown
    )
    assert "the smallest `--mem` is " in shown
    assert "`--devices 3` fits" in shown


def test_hook_ids_and_action_inputs_of_the_page_exist() -> None:
    workflow, hooks = (yaml.safe_load(text) for text in blocks("docs/ci.md", "yaml"))
    ours = next(step for step in workflow["jobs"]["plan"]["steps"] if "gpipe-plan" in step["uses"])
    assert set(ours["with"]) <= set(yaml.safe_load((ROOT / "action.yml").read_text())["inputs"])
    ids = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    assert {hook["id"] for hook in hooks["repos"][0]["hooks"]} <= ids
