"""Style of a stream."""

import io
import os
import pty

import pytest

from planner.show.terminal.style import style_for


class Terminal(io.TextIOWrapper):
    """Terminal without a file descriptor."""

    def __init__(self):
        super().__init__(io.BytesIO())

    def isatty(self):
        return True


def test_pipe_is_120_columns_wide_without_wrapping_or_color():
    for columns in ("", "0", "many"):
        style = style_for(io.StringIO(), {"COLUMNS": columns, "TERM": "xterm"})
        assert (style.width, style.wrap, style.color) == (120, False, False)


def test_columns_variable_applies_to_pipes():
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
def test_color_on_a_terminal_follows_environment(env, color):
    assert style_for(Terminal(), env).color is color


def test_force_color_colors_a_pipe():
    style = style_for(io.StringIO(), {"FORCE_COLOR": "1"})
    assert style.color
    assert not style.wrap


def test_width_without_a_terminal_size_is_columns_or_80():
    assert style_for(Terminal(), {"COLUMNS": "101"}).width == 101
    assert style_for(Terminal(), {"COLUMNS": "many"}).width == 80
    assert style_for(Terminal(), {}).width == 80


def test_width_is_that_of_the_given_terminal():
    ours, theirs = pty.openpty()
    with os.fdopen(ours), os.fdopen(theirs, "w") as terminal:
        import termios

        termios.tcsetwinsize(theirs, (30, 97))
        style = style_for(terminal, {})
    assert (style.width, style.wrap, style.color) == (97, True, True)


def test_process_environment_is_the_default(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert style_for(io.StringIO()).color
