"""Safe printing of text from files, so that no text controls a terminal, hides its content or commands a CI runner.

Terminals execute escape sequences. Bidirectional control characters make text look different from its content. GitHub's
runner executes printed lines that begin with `::` or contain `##[`.
"""

import re

_COMMAND = re.compile(r"^(\s*):(?=:)")
_OLD_COMMAND = "##["


def escape_unprintable(text: str) -> str:
    """Return `text` on one line, with unprintable characters escaped as in Python strings."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable(text: str) -> str:
    """Return `text` on one line, escaped so that a CI runner takes no part of it as a command."""
    return escape_unprintable(text).replace("::", r":\x3a").replace(_OLD_COMMAND, r"#\x23[")


def printable_lines(text: str) -> str:
    """Return a message with all lines after the first indented, so that none looks like another message."""
    first, *rest = text.split("\n")
    return "\n".join([_line(first), *(_line(line if not line or line[0] == " " else f"  {line}") for line in rest)])


def _line(text: str) -> str:
    return _COMMAND.sub(r"\1\\x3a", escape_unprintable(text)).replace(_OLD_COMMAND, r"#\x23[")
