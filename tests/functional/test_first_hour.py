"""Tests of help and hints for new users."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from planner import files
from planner.core.values.profile import Profile
from tests.support.chains import random_profile
from tests.support.cli import call
from tests.support.profiles import profile_of

Capsys = pytest.CaptureFixture[str]

COMMANDS = ("profile", "profile-links", "solve", "emit", "check", "verify", "explain", "show", "compare", "sweep")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a profile."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    files.write("profile.yaml", random_profile(1, 4))
    return tmp_path


@pytest.mark.parametrize("command", ["", *COMMANDS, "export", "schema"])
def test_help_fits_80_columns(here: Path, capsys: Capsys, command: str) -> None:
    """No argument is shown in two pairs of brackets."""
    done = call(capsys, *command.split(), "--help")
    assert done.code == 0
    assert [line for line in done.out.splitlines() if len(line) > 80] == []
    assert "[[" not in done.out


def test_help_shows_every_summary_in_full(here: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = call(capsys, "--help").out
    assert "..." not in narrow.partition("Commands:")[2]
    monkeypatch.setenv("COLUMNS", "130")
    wide = call(capsys, "--help").out
    assert 80 < max(map(len, wide.splitlines())) <= 130
    assert len(wide.splitlines()) < len(narrow.splitlines())


SECTIONS = {
    "check": ("Other devices or cuts", "Changes"),
    "emit": ("Engine", "Cluster"),
    "profile": ("Formula instead of a model", "Model", "Device and sizes", "Time and repeats"),
    "show": ("Other inputs", "Pictures"),
    "solve": ("Devices", "Links and overhead", "Batch and schedule", "Cuts", "Training run", "Search"),
    "sweep": ("Devices", "Links and overhead", "Batch and schedule", "Training run", "Search"),
}


@pytest.mark.parametrize("command", SECTIONS)
def test_options_are_grouped_in_sections(here: Path, capsys: Capsys, command: str) -> None:
    lines = call(capsys, command, "--help").out.splitlines()
    titles = [line for line in lines if line[:1].isupper() and line.endswith(":")]
    wanted = ("Arguments", *SECTIONS[command], "Options")
    assert sorted(titles) == sorted(f"{title}:" for title in wanted)
    assert titles[0] == "Arguments:"
    last = lines[lines.index("Options:") :]
    options = [line.split()[0].strip(",") for line in last if line.startswith("  -")]
    assert options[-3:] == ["-q", "--debug", "-h"]
    every = [line.strip() for line in lines if line.startswith("  -")]
    assert len(set(every)) == len(every) > 2 * len(titles)


def test_show_without_a_plan_suggests_solve(here: Path, capsys: Capsys) -> None:
    done = call(capsys, "show")
    assert done.code == 2
    assert "hint: make it with `gpipe-plan solve`, or name another" in done.err


def test_mistyped_options_get_a_suggestion(here: Path, capsys: Capsys) -> None:
    done = call(capsys, "solve", "--device", "4")
    assert done.code == 2
    assert "error: no such option: --device\n" in done.err
    assert "hint: did you mean `--devices`" in done.err
    assert "? see `gpipe-plan solve --help`" in done.err


def test_a_missing_value_points_to_the_help_of_its_command(here: Path, capsys: Capsys) -> None:
    assert "hint: see `gpipe-plan solve --help`" in call(capsys, "solve", "--devices").err


@pytest.mark.parametrize(("memory_bytes", "next_"), [(24 * 10**9, " --devices 2\n"), (0, " --devices 2 --mem 8GB\n")])
def test_the_suggested_command_has_the_memory_of_the_device(here, capsys, monkeypatch, memory_bytes, next_):
    known = random_profile(1, 4)
    known = replace(known, model=replace(known.model, source="model.py:model"))
    profile = replace(known, device=replace(known.device, kind="cuda", how="estimated", memory_bytes=memory_bytes))

    def estimated(*_: object, **__: object) -> Profile:
        return profile

    Path("model.py").write_text(
        "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 2))\n"
        "def example_batch(size): return torch.randn(size, 2), None\n"
    )
    monkeypatch.setattr(import_module("planner.profile.profiler"), "profile_model", estimated)
    done = call(capsys, "profile", "model.py", "--device", "estimate:a10", "--proof-budget", "0s", "-o", "new.yaml")
    assert done.code == 0, done.err
    assert f"next: gpipe-plan solve new.yaml{next_}" in done.err


def test_counts_of_one_are_singular(here: Path, capsys: Capsys) -> None:
    files.write("profile.yaml", random_profile(1, 1))
    shown = call(capsys, "show", "profile.yaml").out
    assert "\n1 layer\n" in shown
    refused = call(capsys, "solve", "--devices", "2", "--mem", "1GB", "--balance", "1,1")
    assert "1 layers" not in refused.err


def test_columns_sets_the_width_of_piped_output(here: Path, capsys: Capsys) -> None:
    shown = call(capsys, "show", "profile.yaml").out
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize(
    ("mem", "policy", "is_told"), [("25kB", "auto", True), ("25kB", "always", False), ("1MB", "auto", False)]
)
def test_a_hint_suggests_recomputation_of_some_layers(here, capsys, mem, policy, *, is_told):
    files.write("profile.yaml", profile_of([100.0] * 6, [200.0] * 6, saved_bytes=4_000))
    done = call(
        capsys, "solve", "--devices", "2", "--mem", mem, "--batch", "4", "--schedule", "gpipe", "--recompute", policy
    )
    assert done.code == 0, done.err
    assert ("`--recompute layers` recomputes only some layers" in done.err) == is_told
