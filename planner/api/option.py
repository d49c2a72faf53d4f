"""One option of a verb: how it is typed, what its help says, and the keyword that it is in Python.

The records of `planner.api.options` are made of them.
"""

from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True, slots=True)
class Option:
    """How a keyword is typed on the command line, and what its help says."""

    metavar: str
    """What stands behind it; empty for a flag."""
    help: str
    section: str = ""
    """The title that it stands under in the command's help."""
    forms: str = ""
    """How it is spelled, where that is not its name with dashes."""
    repeatable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyword:
    """A field of a record."""

    name: str
    annotation: Any
    default: Any
    help: str
    option: Option | None
    """None: only Python has it."""

    @property
    def typed(self) -> Any:
        """What a command line gives: `str`, `int`, `bool`, or `list[str]` of an option that may be repeated."""
        if self.option is not None and self.option.repeatable:
            return list[str]
        kinds = {*(get_args(self.annotation) or [self.annotation])} - {NoneType}
        return kinds.pop() if kinds in ({int}, {bool}) else str


def keywords_of(record: type[Any]) -> tuple[Keyword, ...]:
    """The fields of a record, in order."""
    hints = get_type_hints(record, include_extras=True)
    keywords = []
    for of in fields(record):
        plain, about = get_args(hints[of.name])
        option, text = (about, about.help) if isinstance(about, Option) else (None, about)
        keywords.append(Keyword(name=of.name, annotation=plain, default=of.default, help=text, option=option))
    return tuple(keywords)


def values_of(options: Any) -> dict[str, Any]:
    """A record's values by name, as the function takes them."""
    return {of.name: getattr(options, of.name) for of in fields(options)}


def ignore(*_: object) -> None:
    """Takes what nobody asked to be told."""
