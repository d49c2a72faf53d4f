"""Text from files, shown to people: it moves no cursor, turns no direction, and commands no machine that reads along.

Terminals obey escape sequences, bidirectional controls show another text than there is, and the runner of GitHub takes
lines that begin with `::` (or hold `##[`) for commands, from whatever is printed in a step.
"""

import re

_COMMAND = re.compile(r"^(\s*):(?=:)")
_OLD_COMMAND = "##["


def spelled_out(text: str) -> str:
    """`text` on one line: every character that does not print, as Python writes it in a string."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def printable(text: str) -> str:
    """A value on one line, which commands nothing wherever in a line it comes to stand."""
    return spelled_out(text).replace("::", r":\x3a").replace(_OLD_COMMAND, r"#\x23[")


def printable_lines(text: str) -> str:
    """A message that may have several lines: those after the first are indented, so that none passes for another."""
    first, *rest = text.split("\n")
    return "\n".join([_line(first), *(_line(line if not line or line[0] == " " else f"  {line}") for line in rest)])


def _line(text: str) -> str:
    return _COMMAND.sub(r"\1\\x3a", spelled_out(text)).replace(_OLD_COMMAND, r"#\x23[")
