"""Style of the output for a stream: width, characters and colors."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TextIO

MIN_WIDTH: Final = 60
"""Smallest width of layouts; narrower terminals break the lines themselves."""

_PIPE_WIDTH: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """Characters of pictures other than letters and digits; the defaults are Unicode."""

    dot: str = "·"
    arrow: str = "→"
    plus_minus: str = "±"
    mark: str = "◀"
    """Mark of one row: the bottleneck stage, or the chosen plan."""
    bar: str = "█"
    rule: str = "─"
    origin: str = "├"
    tick: str = "┼"
    cap: str = "│"
    boxes: tuple[str, ...] = ("░▒", "▓█", "▓█", "─═")
    """Fills of boxes for each kind of action; chunks of a device use them in turn.  A backward and an input-gradient
    pass have the same fill, and different letters."""
    shades: str = "·░▒▓█"
    """Five shades, from light to dark."""
    levels: str = "▁▂▃▄▅▆▇█"
    """Eight levels, from low to high."""
    memory: str = "█▓▒▀▚░▄▌·"
    """Fill of each component of `StageMemory.items()`, in that order."""


UNICODE: Final = Glyphs()
ASCII: Final = Glyphs(
    dot="|",
    arrow="->",
    plus_minus="+/-",
    mark="<",
    bar="=",
    rule="-",
    origin="+",
    tick="+",
    cap="|",
    boxes=("-=", "#%", "#%", ".:"),
    shades=".:=%#",
    levels="_.-:=+*#",
    memory="#=%bc:~*.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """Style of text."""

    width: int
    """Width in columns of text; pictures are as wide, and at least `MIN_WIDTH`."""
    unicode: bool
    """True if block and line characters may be used; otherwise all output is ASCII."""
    color: bool
    """True if ANSI codes may be used."""
    wrap: bool = True
    """True if tables must fit into `width`, by breaking cells and dropping columns; false in a pipe."""

    @property
    def columns(self) -> int:
        """Width that layouts use."""
        return max(self.width, MIN_WIDTH)

    @property
    def glyphs(self) -> Glyphs:
        return UNICODE if self.unicode else ASCII

    def has_room_for(self, columns: int) -> bool:
        """Return True if a table of this width fits."""
        return not self.wrap or self.columns >= columns


def style_for(stream: TextIO, environ: Mapping[str, str] | None = None) -> Style:
    """Return the style for `stream`: a terminal's own width, or in a pipe enough that nothing is cut.

    COLUMNS overrides both. Colors are used only on a terminal without `NO_COLOR` and `TERM=dumb`; `FORCE_COLOR`
    overrides this.
    """
    env = os.environ if environ is None else environ
    terminal = stream.isatty()
    fits = terminal or env.get("COLUMNS", "").strip("0").isdecimal()
    return Style(
        width=_columns(stream, env) if fits else _PIPE_WIDTH,
        unicode=_encodes_blocks(stream),
        color=_wants_color(env, terminal=terminal),
        wrap=fits,
    )


_MOST_COLUMNS = 9999


def _columns(stream: TextIO, env: Mapping[str, str]) -> int:
    # `shutil.get_terminal_size` asks stdout whatever the stream is; it also reads COLUMNS first.
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


def _encodes_blocks(stream: TextIO) -> bool:
    # All characters are tested, because code page 437 has the blocks but no ellipsis. A StringIO has no encoding.
    every = "".join("".join(getattr(UNICODE, name)) for name in Glyphs.__slots__)
    try:
        f"{every}…\u00d7".encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
