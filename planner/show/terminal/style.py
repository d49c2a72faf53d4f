"""Width and colors of the output on a stream."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TextIO

MIN_WIDTH: Final = 60
"""Smallest width of layouts in columns; narrower terminals break long lines themselves."""

_PIPE_WIDTH: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Width and colors of the text that is written to a stream."""

    width: int
    """Width of the stream in columns."""
    color: bool
    """True if ANSI codes may be used."""
    wrap: bool = True
    """True if tables must fit into `width`."""

    @property
    def columns(self) -> int:
        """Width of layouts in columns, at least `MIN_WIDTH`."""
        return max(self.width, MIN_WIDTH)

    def has_room_for(self, columns: int) -> bool:
        """Return True if a table of `columns` characters fits."""
        return not self.wrap or self.columns >= columns


def style_for(stream: TextIO, environ: Mapping[str, str] | None = None) -> Style:
    """Return the style for a stream.

    The variable COLUMNS replaces the width of the terminal. Without COLUMNS, tables in a pipe have their full width.
    `NO_COLOR` and `TERM=dumb` switch colors off, `FORCE_COLOR` switches colors on.
    """
    env = os.environ if environ is None else environ
    terminal = stream.isatty()
    fits = terminal or env.get("COLUMNS", "").strip("0").isdecimal()
    return Style(
        width=_columns(stream, env) if fits else _PIPE_WIDTH,
        color=_wants_color(env, terminal=terminal),
        wrap=fits,
    )


_MOST_COLUMNS = 9999


def _columns(stream: TextIO, env: Mapping[str, str]) -> int:
    # `shutil.get_terminal_size` queries stdout, even if the stream is another one. Like it, COLUMNS comes first.
    requested = env.get("COLUMNS", "")
    if requested.isascii() and requested.isdecimal() and requested.strip("0"):
        return int(requested) if len(requested) < 5 else _MOST_COLUMNS
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def _wants_color(env: Mapping[str, str], *, terminal: bool) -> bool:
    if env.get("FORCE_COLOR"):
        return True
    return terminal and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
