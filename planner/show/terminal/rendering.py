"""Conversion of rich's renderables to lines of text.

Text from files must pass through `printable` first. Otherwise a terminal would obey escape codes in it.
"""

from collections.abc import Iterable, Sequence
from io import StringIO

from rich.color import ColorSystem
from rich.console import Console, Group, RenderableType
from rich.segment import Segment
from rich.text import Text

from planner.show.terminal.style import Style

BLANK = Text("")

_ENDLESS = 1_000_000


def heading(text: str) -> Text:
    """Return the title of a section."""
    return Text(text, style="bold")


def wrap_items(items: Iterable[Text | str], style: Style, *, gap: str = "  ", indent: str = "") -> Text:
    """Return items on as few lines as possible. Only an item that is longer than a line is broken.

    Args:
        items: The items, in order.
        style: Style of the output, with the width.
        gap: Text between items on a line.
        indent: Indentation of all lines except the first one.
    """
    lines: list[Text] = []
    for item in items:
        piece = Text(item) if isinstance(item, str) else item
        if lines and lines[-1].cell_len + len(gap) + piece.cell_len <= style.columns:
            lines[-1].append(gap).append_text(piece)
        else:
            lines.append(Text(indent if lines else "").append_text(piece))
    return Text("\n").join(lines)


def render(style: Style, *parts: RenderableType) -> str:
    """Return renderables as text, without blanks at line ends and without a final line feed."""
    # The console only computes the layout. It gets width and height, so it does not query a terminal. Colors are added
    # below, because the console would interpret NO_COLOR, FORCE_COLOR and TERM itself, and `style` already does.
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
    # Nearly every terminal supports 256 colors, and they are the same in light and dark themes.
    system = ColorSystem.EIGHT_BIT if style.color else None
    return "".join(s.style.render(s.text, color_system=system) if s.style else s.text for s in kept)
