"""Building blocks of the report's sections. All text passes `safe`; arguments called markup have passed it already."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.core.values.printable import printable
from planner.show.markup import element, number, safe
from planner.show.views.table import Column, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Section of the report."""

    anchor: str
    title: str
    body: str
    """Markup of the content."""
    lead: str = ""
    """Sentence below the title."""


def layer_name(name: str) -> str:
    """Return a module path, or a range of them, that may be broken after its dots."""
    return element("span", safe(name).replace(".", ".<wbr>"), class_="name")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1, caption: str = "") -> str:
    """Return a table of markup; the first `text` columns are words, the others numbers.

    Args:
        header: Titles of the columns.
        rows: Markup of the cells.
        text: Number of columns of words.
        caption: Caption, if any.

    Returns:
        Markup.
    """

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(element(tag, cell, class_=None if n < text else "n") for n, cell in enumerate(row))

    head = element("thead", element("tr", cells("th", [safe(name) for name in header])))
    body = element("tbody", *(element("tr", cells("td", row)) for row in rows))
    title = element("caption", safe(caption)) if caption else ""
    return element("div", element("table", title, head, body), class_="wide", tabindex="0", role="group")


def view(shown: Table, *, text: int = 1, marks: Mapping[str, str] | None = None) -> str:
    """Return a table of values as markup; columns called `layer` or `layers` hold names, which may be broken.

    Args:
        shown: The table.
        text: Number of columns of words, from the left.
        marks: By column, the suffix of its marked values.

    Returns:
        Markup.
    """
    columns = [_cells(column, (marks or {}).get(column.name, "")) for column in shown.columns]
    return table([column.heading for column in shown.columns], zip(*columns, strict=True), text=text)


def _cells(column: Column, mark: str) -> list[str]:
    if column.name in ("layer", "layers"):
        return [layer_name(text if column.name == "layer" else printable(text)) for text in column.texts()]
    return [f"{safe(text)}{mark if row in column.marked else ''}" for row, text in enumerate(column.texts())]


def scroll(content: str, label: str) -> str:
    """Return a box for tall markup: it scrolls on a screen, also by keyboard, and is complete on paper."""
    return element("div", content, class_="tall", tabindex="0", role="group", aria_label=label)


def definitions(items: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and texts; empty texts are left out."""
    return element("dl", *(element("div", element("dt", safe(k)), element("dd", safe(v))) for k, v in items if v))


def figure(caption: str, *drawn: str, height: float, label: str = "", below: str = "", look: str | None = None) -> str:
    """Return a picture with a caption.

    Args:
        caption: Text above the picture.
        *drawn: Markup of the picture.
        height: Height in pixels; the width is that of its container.
        label: Text for screen readers; default: the caption.
        below: Markup below the picture.
        look: Class of the figure.

    Returns:
        Markup.
    """
    picture = element("svg", *drawn, width="100%", height=height, role="img", aria_label=label or caption)
    return element("figure", element("figcaption", safe(caption)), picture, below, class_=look)


def line(look: str, x: tuple[float, float], y: tuple[float, float]) -> str:
    """Return a line of a picture.

    Args:
        look: Class of the line.
        x: Horizontal positions of both ends, in percent of the width.
        y: Vertical positions of both ends, in pixels.

    Returns:
        Markup.
    """
    begin, end = (f"{number(across)}%" for across in x)
    return element("line", class_=look, x1=begin, x2=end, y1=y[0], y2=y[1])


def note(text: str) -> str:
    """Return a remark."""
    return element("p", safe(text), class_="note")


def details(summary: str, content: str) -> str:
    """Return markup that is collapsed initially."""
    return element("details", element("summary", safe(summary)), content)


def legend(items: Iterable[tuple[str, str]]) -> str:
    """Return a legend of classes and their meanings."""
    return element(
        "ul", *(element("li", element("i", class_=f"key {look}"), safe(text)) for look, text in items), class_="legend"
    )


def bar(look: str, start: float, width: float, tip: str = "") -> str:
    """Return a part of a bar.

    Args:
        look: Class of the part.
        start: Start, as a share of the track.
        width: Width, as a share of the track.
        tip: Tooltip, if any.

    Returns:
        Markup.
    """
    place = f"left:{number(start * 100)}%;width:{number(max(0.0, width) * 100)}%"
    return element("i", class_=look, style=place, title=tip or None)


def section_markup(section: Section) -> str:
    """Return a section with its heading."""
    heading = element("h2", safe(section.title), id=f"h-{section.anchor}")
    lead = element("p", safe(section.lead), class_="lead") if section.lead else ""
    return element("section", heading, lead, section.body, id=section.anchor, aria_labelledby=f"h-{section.anchor}")
