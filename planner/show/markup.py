"""Markup for SVG and HTML, in which names from files are escaped and numbers are short."""

from html import escape

from planner.core.values.printable import escape_unprintable


def escape_text(text: str) -> str:
    """Return `text` escaped for content and quoted attributes of HTML.

    Control characters and characters that change the direction of text become Python escape sequences.
    """
    shown = escape_unprintable(text)
    return escape(shown, quote=True)


def number(value: float, decimals: int = 2) -> str:
    """Return a number as text for an SVG attribute, without trailing zeros: `12.5` or `3`."""
    text = f"{value:.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def element(tag: str, *content: str, **values: str | float | None) -> str:
    """Return an element of SVG or HTML, from markup and from attributes, which are escaped.

    None leaves an attribute out. `_` in the name of an attribute becomes `-`.
    """
    written = ((name.strip("_").replace("_", "-"), value) for name, value in values.items() if value is not None)
    attributes = "".join(f' {n}="{escape_text(v) if isinstance(v, str) else number(v)}"' for n, v in written)
    return f"<{tag}{attributes}>{''.join(content)}</{tag}>"
