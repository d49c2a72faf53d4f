"""From rich's renderables to plain lines. The one place that knows how rich lays out and colours.

Text that comes from files (layer names, devices, messages) passes `plain` first: rich must not read `[bold]` in a
name as markup, a terminal must not obey escape codes in it, and an ASCII stream must be able to take it.
"""

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.color import ColorSystem
from rich.console import Console, Group, RenderableType
from rich.segment import Segment
from rich.text import Text

from planner.core.values.printable import printable
from planner.show.terminal.style import Style

BLANK = Text("")

_ENDLESS = 1_000_000
_ASCII_SPELLING = str.maketrans({"…": "...", "\u00d7": "x", "·": "|", "→": "->", "≤": "<=", "≥": ">=", "\u2013": "-"})


def plain(text: str, style: Style) -> str:
    """`text` made harmless: control characters spelled out, and all else beyond ASCII where it cannot be shown."""
    shown = printable(text)
    if style.unicode:
        return shown
    return shown.translate(_ASCII_SPELLING).encode("ascii", "backslashreplace").decode("ascii")


def heading(text: str) -> Text:
    """The title of a section."""
    return Text(text, style="bold")


def flow(items: Iterable[Text | str], style: Style, *, gap: str = "  ", indent: str = "") -> Text:
    """Items one after the other, on as few lines as their width allows; no item is broken unless it must be."""
    lines: list[Text] = []
    for item in items:
        piece = Text(item) if isinstance(item, str) else item
        if lines and lines[-1].cell_len + len(gap) + piece.cell_len <= style.columns:
            lines[-1].append(gap).append_text(piece)
        else:
            lines.append(Text(indent if lines else "").append_text(piece))
    return Text("\n").join(lines)


def render(style: Style, *parts: RenderableType) -> str:
    """`parts` below each other as lines without trailing blanks, the last without a line feed."""
    # Only the layout is the console's: given width and height it asks no terminal, and colours are put on below,
    # so that NO_COLOR, FORCE_COLOR and TERM, which `style` has weighed, cannot change them again.
    console = Console(
        file=StringIO(),
        width=style.columns if style.wrap else _ENDLESS,
        height=100,
        color_system=None,
        force_jupyter=False,
        legacy_windows=False,
        markup=False,
        emoji=False,
        highlight=False,
    )
    lines = console.render_lines(Group(*parts), pad=False)
    return "\n".join(_line(line, style) for line in lines)


def _line(segments: Sequence[Segment], style: Style) -> str:
    kept = list(segments)
    while kept and not kept[-1].text.strip(" "):
        kept.pop()
    if kept:
        kept[-1] = Segment(kept[-1].text.rstrip(" "), kept[-1].style)
    # 256 colours: nearly every terminal has them, and they are the same in light and dark themes.
    system = ColorSystem.EIGHT_BIT if style.color else None
    return "".join(s.style.render(s.text, color_system=system) if s.style else s.text for s in kept)
