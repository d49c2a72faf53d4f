"""Building blocks of the report's sections. They escape all texts that are not markup."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from planner.core.values.printable import printable
from planner.show.markup import element, escape_text, number
from planner.show.views.table import Column, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Section of the report."""

    anchor: str
    """Identifier of the section, for links."""
    title: str
    body: str
    """Content of the section, as markup."""
    lead: str = ""
    """Sentences below the title."""


def layer_name_markup(name: str) -> str:
    """Return the name of a layer as markup, with possible line breaks after dots."""
    return element("span", escape_text(name).replace(".", ".<wbr>"), class_="name")


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, num_text_columns: int = 1) -> str:
    """Return a table as markup.

    Args:
        header: Titles of the columns.
        rows: Cells of each row, as markup.
        num_text_columns: Number of columns with text, from the left.
    """

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(element(tag, cell, class_=None if n < num_text_columns else "n") for n, cell in enumerate(row))

    head = element("thead", element("tr", cells("th", [escape_text(name) for name in header])))
    body = element("tbody", *(element("tr", cells("td", row)) for row in rows))
    return element("div", element("table", head, body), class_="wide", tabindex="0", role="group")


def values_table(shown: Table, *, num_text_columns: int = 1, marks: Mapping[str, str] | None = None) -> str:
    """Return a table of values as markup. Emphasized values get a suffix.

    Args:
        shown: The table of values.
        num_text_columns: Number of columns with text, from the left.
        marks: Suffix of the values that `Column.marked` emphasizes, by column name, such as ` ◀`.
    """
    columns = [_cells(column, (marks or {}).get(column.name, "")) for column in shown.columns]
    return html_table(
        [column.heading for column in shown.columns], zip(*columns, strict=True), num_text_columns=num_text_columns
    )


def _cells(column: Column, mark: str) -> list[str]:
    if column.name in ("layer", "layers"):
        return [layer_name_markup(text if column.name == "layer" else printable(text)) for text in column.texts()]
    return [f"{escape_text(text)}{mark if row in column.marked else ''}" for row, text in enumerate(column.texts())]


def scroll_box(content: str, label: str) -> str:
    """Return a box of limited height in which `content` (markup) scrolls. `label` is its name for screen readers."""
    return element("div", content, class_="tall", tabindex="0", role="group", aria_label=label)


def definition_list(items: Iterable[tuple[str, str]]) -> str:
    """Return a list of names with texts, without names whose text is empty."""
    return element(
        "dl", *(element("div", element("dt", escape_text(k)), element("dd", escape_text(v))) for k, v in items if v)
    )


def chart_figure(
    caption: str, *elements: str, height: float, label: str = "", below: str = "", style_class: str | None = None
) -> str:
    """Return a picture made of SVG elements, with a caption above it and the markup `below` below it.

    Args:
        caption: Text above the picture.
        *elements: SVG elements of the picture.
        height: Height in pixels; the picture is as wide as its container.
        label: Text for screen readers; if empty, the caption is used.
        below: Markup below the picture.
        style_class: Style class of the figure.
    """
    picture = element("svg", *elements, width="100%", height=height, role="img", aria_label=label or caption)
    return element("figure", element("figcaption", escape_text(caption)), picture, below, class_=style_class)


def chart_line(style_class: str, x: tuple[float, float], y: tuple[float, float]) -> str:
    """Return a line of a chart.

    Args:
        style_class: Style class of the line.
        x: Horizontal positions of both ends, in percent of the width.
        y: Vertical positions of both ends, in pixels.
    """
    begin, end = (f"{number(across)}%" for across in x)
    return element("line", class_=style_class, x1=begin, x2=end, y1=y[0], y2=y[1])


def remark(text: str) -> str:
    """Return a paragraph with a remark."""
    return element("p", escape_text(text), class_="note")


def collapsible(summary: str, content: str) -> str:
    """Return content that a click on its summary shows or hides. At first it is hidden."""
    return element("details", element("summary", escape_text(summary)), content)


def legend(items: Iterable[tuple[str, str]]) -> str:
    """Return a legend: a colored sample and a label for each pair (style class, label)."""
    return element(
        "ul",
        *(element("li", element("i", class_=f"key {style_class}"), escape_text(text)) for style_class, text in items),
        class_="legend",
    )


def bar_part(style_class: str, start: float, width: float, tip: str = "") -> str:
    """Return a part of a horizontal bar.

    Args:
        style_class: Style class of the part.
        start: Left edge, as a share of the bar's full width.
        width: Width, as a share of the bar's full width.
        tip: Tooltip; empty for none.
    """
    place = f"left:{number(start * 100)}%;width:{number(max(0.0, width) * 100)}%"
    return element("i", class_=style_class, style=place, title=tip or None)


def section_markup(section: Section) -> str:
    """Return the markup of a section with its heading."""
    heading = element("h2", escape_text(section.title), id=f"h-{section.anchor}")
    lead = element("p", escape_text(section.lead), class_="lead") if section.lead else ""
    return element("section", heading, lead, section.body, id=section.anchor, aria_labelledby=f"h-{section.anchor}")
