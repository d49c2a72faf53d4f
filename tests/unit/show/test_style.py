"""Which style a stream gets."""

import io
import os
import pty

import pytest

from planner.show.terminal.style import style_for


class Terminal(io.TextIOWrapper):
    """A terminal that has no file descriptor to ask."""

    def __init__(self):
        super().__init__(io.BytesIO())

    def isatty(self):
        return True


def test_pipe():
    """A pipe is wide, its tables are never cut, and it has no colour."""
    for columns in ("", "0", "many"):
        style = style_for(io.StringIO(), {"COLUMNS": columns, "TERM": "xterm"})
        assert (style.width, style.wrap, style.color) == (120, False, False)


def test_columns_count_in_a_pipe():
    """Whoever sets COLUMNS wants so many, wherever the text goes."""
    style = style_for(io.StringIO(), {"COLUMNS": "90"})
    assert (style.width, style.wrap, style.color) == (90, True, False)


@pytest.mark.parametrize(
    ("env", "color"),
    [
        ({}, True),
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "dumb"}, False),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, True),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
    ],
)
def test_colour_on_a_terminal(env, color):
    """A terminal has colour unless NO_COLOR or TERM=dumb forbids it; FORCE_COLOR overrides."""
    assert style_for(Terminal(), env).color is color


def test_forced_colour_in_a_pipe():
    """FORCE_COLOR colours a pipe, and leaves it uncut."""
    style = style_for(io.StringIO(), {"FORCE_COLOR": "1"})
    assert style.color
    assert not style.wrap


def test_width_without_a_terminal_size():
    """COLUMNS counts on a terminal; without it and without a size there are 80 columns."""
    assert style_for(Terminal(), {"COLUMNS": "101"}).width == 101
    assert style_for(Terminal(), {"COLUMNS": "many"}).width == 80
    assert style_for(Terminal(), {}).width == 80


def test_width_of_a_real_terminal():
    """A terminal is asked for its own size, not stdout's."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours), os.fdopen(theirs, "w") as terminal:
        import termios

        termios.tcsetwinsize(theirs, (30, 97))
        style = style_for(terminal, {})
    assert (style.width, style.wrap, style.color) == (97, True, True)


def test_the_process_environment_is_the_default(monkeypatch):
    """Without `environ` the process's own variables count."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert style_for(io.StringIO()).color
