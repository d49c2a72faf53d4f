"""Options of commands: their form on the command line, their help, and their keyword in Python.

The records of `planner.api.options` consist of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True, slots=True)
class Conversion:
    """Conversion of a solver option to and from the field of `Inputs` with the option's name."""

    read: Callable[[str, Any], Any]
    """Return the value of the field, from the option's name and its value; raise `UsageError` if that is invalid."""
    write: Callable[[Any], str] = str
    """Return the value as typed on the command line; for a repeatable option, one of its values."""


@dataclass(frozen=True, slots=True)
class Option:
    """Form of a keyword on the command line, and its help."""

    metavar: str
    """Placeholder of the value in the help; empty for a flag."""
    help: str
    section: str = ""
    """Section of the command's help."""
    forms: str = ""
    """Names on the command line, if they differ from the keyword's name with dashes."""
    repeatable: bool = False
    recorded: Conversion | None = None
    """Conversion to the field in `Inputs`; None if no field depends on this option alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keyword:
    """Field of an option record."""

    name: str
    annotation: Any
    default: Any
    help: str
    option: Option | None
    """Option on the command line; None if only Python has the keyword."""

    @property
    def typed(self) -> Any:
        """Type on the command line: `str`, `int`, `bool`, or `list[str]` for a repeatable option."""
        if self.option is not None and self.option.repeatable:
            return list[str]
        kinds = {*(get_args(self.annotation) or [self.annotation])} - {NoneType}
        return kinds.pop() if kinds in ({int}, {bool}) else str


def keywords_of(record: type[Any]) -> tuple[Keyword, ...]:
    """Return the fields of a record, in order."""
    hints = get_type_hints(record, include_extras=True)
    keywords = []
    for of in fields(record):
        plain, about = get_args(hints[of.name])
        option, text = (about, about.help) if isinstance(about, Option) else (None, about)
        keywords.append(Keyword(name=of.name, annotation=plain, default=of.default, help=text, option=option))
    return tuple(keywords)


def values_of(options: Any) -> dict[str, Any]:
    """Return the values of a record by name, as keyword arguments."""
    return {of.name: getattr(options, of.name) for of in fields(options)}


def ignore(*_: object) -> None:
    """Ignore the arguments; the default of callbacks."""
