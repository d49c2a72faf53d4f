"""Options of commands: names on the command line, help, and keywords in Python.

The dataclasses in `planner.api.options` annotate their fields with `Option`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True, slots=True)
class OptionConversion:
    """Conversion between a solver option and the field of `Inputs` with the same name."""

    read: Callable[[str, Any], Any]
    """Function (option's name, option's value) -> field. It raises `UsageError` for invalid values."""
    write: Callable[[Any], str] = str
    """Function (field) -> option's text. For a repeatable option, the argument is one entry of the field."""


@dataclass(frozen=True, slots=True)
class Option:
    """Option of a command: its names on the command line, and its help."""

    metavar: str
    """Placeholder of the value in the help; empty for a flag."""
    help: str
    section: str = ""
    """Section of the command's help that lists the option."""
    forms: str = ""
    """Names of the option, separated by spaces, such as `--output -o`; empty if `option_name` gives the only name."""
    repeatable: bool = False
    recorded: OptionConversion | None = None
    """Conversion between the option and its field of `Inputs`.

    None if there is no such field, or if the field's value also depends on the profile or on other options.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionField:
    """Field of a dataclass of options: a keyword in Python, and usually an option on the command line."""

    name: str
    annotation: Any
    default: Any
    help: str
    option: Option | None
    """Option on the command line; None if the keyword exists only in Python."""

    @property
    def command_line_type(self) -> Any:
        """Type of the option on the command line, such as `str`, or `list[str]` if it is repeatable."""
        if self.option is not None and self.option.repeatable:
            return list[str]
        kinds = {*(get_args(self.annotation) or [self.annotation])} - {NoneType}
        return kinds.pop() if kinds in ({int}, {bool}) else str


def option_fields_of(record: type[Any]) -> tuple[OptionField, ...]:
    """Return the fields of a dataclass of options, in order."""
    hints = get_type_hints(record, include_extras=True)
    keywords = []
    for of in fields(record):
        plain, about = get_args(hints[of.name])
        option, text = (about, about.help) if isinstance(about, Option) else (None, about)
        keywords.append(OptionField(name=of.name, annotation=plain, default=of.default, help=text, option=option))
    return tuple(keywords)


def option_name(keyword: str) -> str:
    """Return the command-line name of an option, such as `--time-limit` for the keyword argument `time_limit`."""
    return f"--{keyword.replace('_', '-')}"


def option_values(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass of options as keyword arguments."""
    return {of.name: getattr(options, of.name) for of in fields(options)}


def ignore_arguments(*_: object) -> None:
    """Ignore all arguments. This is the default of callbacks such as `note` and `progress`."""
