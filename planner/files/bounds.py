"""How much a file may ask of the reader: YAML lets a few hundred bytes stand for gigabytes, or for endless nests."""

import re
from collections.abc import Iterable, Iterator

import yaml

MAX_BYTES = 2**28
"""The largest file that is read; a profile of ten thousand layers has a few megabytes."""

MAX_DEPTH = 32
"""How deep lists and mappings may lie within each other; our own files need eight."""

MAX_VALUES = 2**23
"""Values of a YAML file, those that aliases stand for included; a profile of ten thousand layers has three million."""


class UnboundedError(Exception):
    """A file asks for more than any of ours needs; `line`, from 1, is where."""

    hint = "the files of gpipe-plan are plain lists and mappings; write the file anew with the command that makes it"

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.message, self.line = message, line


def bounded(events: Iterable[yaml.Event]) -> Iterator[yaml.Event]:
    """Pass on the events of a document, as long as it asks for no more than any of our files.

    Raises:
        UnboundedError: It nests too deeply, has too many values, or refers to itself.
        yaml.YAMLError: It is not YAML.
    """
    # A count of values for the document and for every list or mapping that is open, and the anchor it goes to.
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
            # What is not defined is the reader's to refuse.
            counts[-1] += sizes.get(event.anchor or "", 1)
        if counts[-1] > MAX_VALUES:
            raise _refusal(event, f"has more than {MAX_VALUES} values, those that aliases stand for included")
        yield event


def is_too_deep(text: str) -> bool:
    """Whether the lists and mappings of a JSON text lie deeper within each other than is read."""
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


def _refusal(event: yaml.Event, message: str) -> UnboundedError:
    return UnboundedError(message, event.start_mark.line + 1 if event.start_mark else 1)
