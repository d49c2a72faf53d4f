"""How to draw on a given stream: how many columns, which characters, with or without colour."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TextIO

MIN_WIDTH: Final = 60
"""Layouts are made for at least as many columns; a narrower terminal breaks the lines itself."""

_PIPE_WIDTH: Final = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """The characters beyond letters and digits that pictures are drawn with; by default those of Unicode."""

    dot: str = "·"
    arrow: str = "→"
    plus_minus: str = "±"
    mark: str = "◀"
    """Marks one row of several: the bottleneck stage, the plan that was chosen."""
    bar: str = "█"
    rule: str = "─"
    origin: str = "├"
    tick: str = "┼"
    cap: str = "│"
    boxes: tuple[str, ...] = ("░▒", "▓█", "▓█", "─═")
    """Per kind of what devices compute the fills of a device's chunks, which take turns.

    A backward and the half of it that others wait for look alike: letters tell them apart.
    """
    shades: str = "·░▒▓█"
    """From light to dark, five of them."""
    levels: str = "▁▂▃▄▅▆▇█"
    """From low to high."""
    memory: str = "█▓▒▀▚░▄▌·"
    """One fill for each kind of `StageMemory.items()`, in that order."""


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
    """How text is drawn."""

    width: int
    """Columns; pictures fill them, at least `MIN_WIDTH`."""
    unicode: bool
    """Whether block and line characters may be used; else everything is ASCII."""
    color: bool
    """Whether ANSI codes may be used."""
    wrap: bool = True
    """Whether tables must keep within `width`: cells then break over lines and some columns go. Not so in a pipe."""

    @property
    def columns(self) -> int:
        """Columns that layouts count on."""
        return max(self.width, MIN_WIDTH)

    @property
    def glyphs(self) -> Glyphs:
        return UNICODE if self.unicode else ASCII

    def has_room_for(self, columns: int) -> bool:
        """Whether a table of so many columns may be drawn."""
        return not self.wrap or self.columns >= columns


def style_for(stream: TextIO, environ: Mapping[str, str] | None = None) -> Style:
    """The style that suits `stream`: a terminal's own width, in a pipe enough of it that nothing is cut.

    COLUMNS overrides both.

    Colour only on a terminal with neither `NO_COLOR` nor `TERM=dumb`; `FORCE_COLOR` overrides both.
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
    # `shutil.get_terminal_size` asks stdout whatever the stream; COLUMNS comes first there as here.
    asked = env.get("COLUMNS", "")
    if asked.isascii() and asked.isdecimal() and asked.strip("0"):
        return int(asked) if len(asked) < 5 else _MOST_COLUMNS
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


def _wants_color(env: Mapping[str, str], *, terminal: bool) -> bool:
    if env.get("FORCE_COLOR"):
        return True
    return terminal and not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def _encodes_blocks(stream: TextIO) -> bool:
    # All of them, not `█` alone: code page 437 has the blocks and lacks the ellipsis. A StringIO has no encoding.
    every = "".join("".join(getattr(UNICODE, name)) for name in Glyphs.__slots__)
    try:
        f"{every}…\u00d7".encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
