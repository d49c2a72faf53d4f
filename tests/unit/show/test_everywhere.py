"""Properties of all texts."""

import codecs
import subprocess
import sys

import pytest
from rich.cells import cell_len

from planner.cli.console import spell_in_ascii
from planner.show.terminal.plan import plan_text
from planner.show.terminal.profile import profile_text
from planner.show.terminal.run import plan_and_run_text, run_text
from tests.unit.show.samples import EVERYTHING, LONG_NAME, bare, events_of, plan, profile, renamed, report, style

ALL = pytest.mark.parametrize("show", EVERYTHING.values(), ids=EVERYTHING)
ESCAPE = "\x1b"


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("width", [60, 76, 84, 96, 120])
def test_no_line_exceeds_the_terminal(show, width):
    lines = show(style(width)).splitlines()
    assert max(map(cell_len, lines)) <= width


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("width", [1, 20])
def test_terminals_below_60_columns_get_the_layout_for_60(show, width):
    assert show(style(width)) == show(style(60))


@ALL
@pytest.mark.parametrize("color", [True, False])
def test_no_trailing_blanks(show, color):
    text = bare(show(style(color=color)))
    assert all(line == line.rstrip() for line in text.split("\n"))
    assert not text.endswith("\n")


@ALL
def test_signs_have_ascii_spellings(show):
    """Streams that cannot encode symbols get escapes only for letters in names."""
    codecs.register_error("spelled", spell_in_ascii)
    assert "\\u" not in show(style()).encode("ascii", "spelled").decode()


@ALL
def test_text_without_color_has_no_escape_codes(show):
    assert ESCAPE not in show(style(color=False))


@ALL
def test_color_changes_no_character(show):
    colored = show(style(color=True))
    assert ESCAPE in colored
    assert bare(colored) == show(style(color=False))


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("FORCE_COLOR", "1"), ("TERM", "dumb"), ("COLUMNS", "20")])
def test_environment_does_not_change_a_given_style(show, variable, monkeypatch):
    before = show(style(100, color=True))
    monkeypatch.setenv(*variable)
    assert show(style(100, color=True)) == before


def test_markup_in_names_is_printed_literally():
    wide = style(120, wrap=False)
    assert "[bold]stem[/bold]" in plan_text(plan(), (), wide)
    assert "[bold]stem[/bold]" in profile_text(profile(), wide)
    assert "models/[dim]net.py" in profile_text(profile(), wide)
    assert "[bold]stem[/bold]" in run_text(report(plan()), None, wide)
    assert "NVIDIA [H100]" in run_text(report(plan()), plan(), wide)


def test_control_characters_in_names_are_escaped():
    text = plan_text(renamed(plan(), "evil\x1b[2J\nname\u202e"), (), style(120, color=True, wrap=False))
    assert r"evil\x1b[2J\nname\u202e" in text


def test_text_in_a_pipe_is_not_cut():
    text = plan_text(plan((1, 4, 1)), events_of(plan((1, 4, 1))), style(120, wrap=False))
    (line,) = [line for line in text.splitlines() if LONG_NAME in line]
    assert line.split()[:2] == ["2", LONG_NAME]
    assert line.endswith(" %")


def test_narrow_terminal_wraps_long_names():
    text = plan_text(plan((1, 4, 1)), (), style(60)).split("memory per stage")[0]
    column = "".join(
        line[7:30].split("never")[0].strip() for line in text.splitlines() if line.startswith(("2 ", "  "))
    )
    assert LONG_NAME in column


def test_show_imports_no_torch_yaml_pydantic_or_typer():
    code = (
        "import pkgutil, sys, planner.show.terminal\n"
        "names = [m.name for m in pkgutil.walk_packages(planner.show.terminal.__path__, 'planner.show.terminal.')]\n"
        "list(map(__import__, names))\n"
        "print(sorted({'torch', 'yaml', 'pydantic', 'typer'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_same_values_give_the_same_text():
    assert plan_and_run_text(plan(), report(plan()), style()) == plan_and_run_text(plan(), report(plan()), style())
