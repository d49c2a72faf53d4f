"""Text for SVG and HTML: escaped, safe for any names in files, with short numbers."""

from html import escape

from planner.core.values.printable import spelled_out


def safe(text: str) -> str:
    """Return `text` escaped for content and quoted attributes; control and direction characters are spelled out."""
    shown = spelled_out(text)
    return escape(shown, quote=True)


def number(value: float, decimals: int = 2) -> str:
    """Return a coordinate without trailing zeros: `12.5`, `3`."""
    text = f"{value:.{decimals}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def element(tag: str, *content: str, **values: str | float | None) -> str:
    """Return an element with `content`, which is markup, and attributes, which are escaped.

    Attributes that are None are left out; `_` in a name becomes `-`.
    """
    written = ((name.strip("_").replace("_", "-"), value) for name, value in values.items() if value is not None)
    attributes = "".join(f' {n}="{safe(v) if isinstance(v, str) else number(v)}"' for n, v in written)
    return f"<{tag}{attributes}>{''.join(content)}</{tag}>"
