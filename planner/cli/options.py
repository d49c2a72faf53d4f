"""Options that several commands share, and options made from the dataclasses in `planner.api.options`."""

import os
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.api.option import Option, OptionField, option_fields_of, option_name
from planner.api.texts import parse_choice
from planner.cli.console import style_for_stdout

if TYPE_CHECKING:
    from planner.show.terminal.style import Style

PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="Plan; `-`: standard input.")]
ProfileFile = Annotated[str, typer.Argument(metavar="PROFILE", help="Profile; `-`: standard input.")]
ProfileFiles = Annotated[
    list[str],
    typer.Argument(metavar="PROFILE…", help="Profile, or one profile per tensor-parallel size; `-`: standard input."),
]
Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Output file.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only results, warnings and errors.")]
Format = Annotated[str, typer.Option("--format", metavar="text|json", help="Format of what is printed.")]
OrMarkdown = Annotated[str, typer.Option("--format", metavar="text|json|markdown", help="Format of what is printed.")]


MARKDOWN = ("text", "json", "markdown")

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def import_numpy_without_threads() -> None:
    """Import numpy without starting threads, for commands that neither measure nor search.

    OpenBLAS's threads would spin for a fifth of the CPU time of `check`. The limit of one thread is set only during the
    import, so child processes do not inherit it. If the user has set `OPENBLAS_NUM_THREADS`, the function does nothing.
    """
    if _BLAS_THREADS not in os.environ:
        os.environ[_BLAS_THREADS] = "1"
        import numpy  # noqa: F401, ICN001

        del os.environ[_BLAS_THREADS]


def formatted(value: Any, format_: str, *, text: Callable[[Any, "Style"], str], markdown: Callable[[Any], str]) -> str:
    """Return a command's result as text, JSON or Markdown."""
    from planner import files

    if format_ == "json":
        return files.json_text(value)
    return markdown(value) if format_ == "markdown" else text(value, style_for_stdout())


def check_format(name: str, formats: tuple[str, ...] = ("text", "json")) -> bool:
    """Check the name of an output format, and return True if it is `json`.

    Raises:
        UsageError: The format is not one of `formats`.
    """
    return parse_choice("--format", name, formats) == "json"


def with_options(record: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that replaces a command's parameter `options` by one option per field of `record`."""
    keywords = [(keyword, keyword.option) for keyword in option_fields_of(record) if keyword.option is not None]
    with_value = [_parameter(*each) for each in keywords if each[0].command_line_type is not bool]
    flags = [_parameter(*each) for each in keywords if each[0].command_line_type is bool]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters: list[Parameter] = []
        for own in signature(command).parameters.values():
            parameters += flags if own.name == "quiet" else []
            parameters += with_value if own.name == "options" else [own.replace(kind=Parameter.KEYWORD_ONLY)]

        @wraps(command)
        def run(**values: Any) -> None:
            options = record(**{keyword.name: values.pop(keyword.name) for keyword, _ in keywords})
            command(options=options, **values)

        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


def _parameter(keyword: OptionField, option: Option) -> Parameter:
    forms = option.forms.split() or [option_name(keyword.name)]
    # Only the title of rich's panels is used: `planner.cli.help` makes sections of them.
    declared = typer.Option(
        *forms, metavar=option.metavar or None, help=option.help, rich_help_panel=option.section or None
    )
    kind: Any = keyword.command_line_type if keyword.default is not None else keyword.command_line_type | None
    return Parameter(
        keyword.name, Parameter.KEYWORD_ONLY, default=keyword.default, annotation=Annotated[kind, declared]
    )
