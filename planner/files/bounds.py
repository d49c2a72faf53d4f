"""Limit size and nesting of YAML files, because a few hundred bytes of YAML can expand to gigabytes."""

import re
from collections.abc import Iterable, Iterator

import yaml

MAX_BYTES = 2**28
"""Largest number of characters of a file that is read; a profile of ten thousand layers has a few million."""

MAX_DEPTH = 32
"""Largest nesting depth of lists and mappings; our own files need eight."""

MAX_VALUES = 2**23
"""Largest number of values of a YAML file, with aliases expanded; a profile of ten thousand layers has three million.
"""


class LimitExceededError(Exception):
    """Error that a file exceeds a limit, at `line` (counted from 1)."""

    hint = "files of gpipe-plan are plain lists and mappings; write the file again with the command that makes it"

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message, self.line = message, line


def limited_events(events: Iterable[yaml.Event]) -> Iterator[yaml.Event]:
    """Yield the parser events of a YAML document, and raise an error as soon as they exceed a limit.

    Raises:
        LimitExceededError: The document is nested too deeply, has too many values, or refers to itself.
        yaml.YAMLError: The text is not YAML.
    """
    # For the document and for each open list or mapping: the number of values so far, and the anchor.
    counts, anchors = [0], [""]
    sizes: dict[str, int] = {}
    for event in events:
        if isinstance(event, yaml.ScalarEvent):
            sizes[event.anchor or ""] = 1
            counts[-1] += 1
        elif isinstance(event, yaml.CollectionStartEvent):
            counts.append(1)
            anchors.append(event.anchor or "")
            sizes.pop(anchors[-1], None)
            if len(counts) > MAX_DEPTH + 1:
                raise _refusal(event, f"is nested more than {MAX_DEPTH} levels deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            count, anchor = counts.pop(), anchors.pop()
            sizes[anchor] = count
            counts[-1] += count
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in anchors and event.anchor not in sizes:
                raise _refusal(event, f"refers to itself (`*{str(event.anchor)[:40]}`)")
            # The reader rejects undefined aliases.
            counts[-1] += sizes.get(event.anchor or "", 1)
        if counts[-1] > MAX_VALUES:
            raise _refusal(event, f"has more than {MAX_VALUES} values, including those of aliases")
        yield event


def is_too_deep(text: str) -> bool:
    """Return True if lists and mappings of a JSON text are nested more than `MAX_DEPTH` levels deep."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    depth = 0
    for bracket in _NO_BRACKETS.sub("", _STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        if depth > MAX_DEPTH:
            return True
    return False


_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")


def _refusal(event: yaml.Event, message: str) -> LimitExceededError:
    return LimitExceededError(message, event.start_mark.line + 1 if event.start_mark else 1)
