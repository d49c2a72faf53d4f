"""Pieces that every section of the report is made of. All text passes `safe`; what is called markup has done so."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.core.values.printable import printable
from planner.show.markup import element, number, safe
from planner.show.views.table import Column, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the report."""

    anchor: str
    title: str
    body: str
    """Markup."""
    lead: str = ""
    """A sentence under the title."""


def layer_name(name: str) -> str:
    """A module path, or a range of them, that may break behind its dots."""
    return element("span", safe(name).replace(".", ".<wbr>"), class_="name")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, text: int = 1, caption: str = "") -> str:
    """A table of markup; the first `text` columns are words, the others numbers."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(element(tag, cell, class_=None if n < text else "n") for n, cell in enumerate(row))

    head = element("thead", element("tr", cells("th", [safe(name) for name in header])))
    body = element("tbody", *(element("tr", cells("td", row)) for row in rows))
    title = element("caption", safe(caption)) if caption else ""
    return element("div", element("table", title, head, body), class_="wide", tabindex="0", role="group")


def view(shown: Table, *, text: int = 1, marks: Mapping[str, str] | None = None) -> str:
    """A table of values, the first `text` columns words; `marks` says by column what follows its marked values.

    Columns called `layer` and `layers` hold names, which may be broken.
    """
    columns = [_cells(column, (marks or {}).get(column.name, "")) for column in shown.columns]
    return table([column.heading for column in shown.columns], zip(*columns, strict=True), text=text)


def _cells(column: Column, mark: str) -> list[str]:
    if column.name in ("layer", "layers"):
        return [layer_name(text if column.name == "layer" else printable(text)) for text in column.texts()]
    return [f"{safe(text)}{mark if row in column.marked else ''}" for row, text in enumerate(column.texts())]


def scroll(content: str, label: str) -> str:
    """Markup that may be tall: it scrolls on a screen, by keyboard too, and is whole on paper."""
    return element("div", content, class_="tall", tabindex="0", role="group", aria_label=label)


def definitions(items: Iterable[tuple[str, str]]) -> str:
    """Names and what there is to say of each; texts."""
    return element("dl", *(element("div", element("dt", safe(k)), element("dd", safe(v))) for k, v in items if v))


def figure(caption: str, *drawn: str, height: float, label: str = "", below: str = "", look: str | None = None) -> str:
    """A picture, `height` pixels high and as wide as its place, under a caption; who cannot see it is told `label`."""
    picture = element("svg", *drawn, width="100%", height=height, role="img", aria_label=label or caption)
    return element("figure", element("figcaption", safe(caption)), picture, below, class_=look)


def line(look: str, x: tuple[float, float], y: tuple[float, float]) -> str:
    """A line of a picture, from one end to the other: across in percent of its width, down in pixels."""
    begin, end = (f"{number(across)}%" for across in x)
    return element("line", class_=look, x1=begin, x2=end, y1=y[0], y2=y[1])


def note(text: str) -> str:
    """A remark."""
    return element("p", safe(text), class_="note")


def details(summary: str, content: str) -> str:
    """Markup that is closed at first."""
    return element("details", element("summary", safe(summary)), content)


def legend(items: Iterable[tuple[str, str]]) -> str:
    """Looks (classes) and what they mean."""
    return element(
        "ul", *(element("li", element("i", class_=f"key {look}"), safe(text)) for look, text in items), class_="legend"
    )


def bar(look: str, start: float, width: float, tip: str = "") -> str:
    """A part of a bar, in shares of its track."""
    place = f"left:{number(start * 100)}%;width:{number(max(0.0, width) * 100)}%"
    return element("i", class_=look, style=place, title=tip or None)


def section_markup(section: Section) -> str:
    """A part of the report with its heading."""
    heading = element("h2", safe(section.title), id=f"h-{section.anchor}")
    lead = element("p", safe(section.lead), class_="lead") if section.lead else ""
    return element("section", heading, lead, section.body, id=section.anchor, aria_labelledby=f"h-{section.anchor}")
