"""Command-line options, made from the dataclasses in `planner.api.options`."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer

from planner.api.option import Option, OptionField, option_fields_of


def with_options(record: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that gives a command an option for each field of the dataclass `record`.

    These options replace the command's parameter `options`.
    """
    taken = [(keyword, keyword.option) for keyword in option_fields_of(record) if keyword.option is not None]
    offered = [_parameter(*one) for one in taken if one[0].typed is not bool]
    flags = [_parameter(*one) for one in taken if one[0].typed is bool]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shown: list[Parameter] = []
        for parameter in signature(command).parameters.values():
            shown += flags if parameter.name == "quiet" else []
            shown += offered if parameter.name == "options" else [parameter.replace(kind=Parameter.KEYWORD_ONLY)]

        @wraps(command)
        def run(**typed: Any) -> None:
            options = record(**{keyword.name: typed.pop(keyword.name) for keyword, _ in taken})
            command(options=options, **typed)

        run.__signature__ = Signature(shown)  # type: ignore[attr-defined]
        return run

    return decorate


def _parameter(keyword: OptionField, option: Option) -> Parameter:
    forms = option.forms.split() or [f"--{keyword.name.replace('_', '-')}"]
    # Only the title of rich's panels is used: `planner.cli.help` makes sections of them.
    declared = typer.Option(
        *forms, metavar=option.metavar or None, help=option.help, rich_help_panel=option.section or None
    )
    typed: Any = keyword.typed if keyword.default is not None else keyword.typed | None
    return Parameter(
        keyword.name, Parameter.KEYWORD_ONLY, default=keyword.default, annotation=Annotated[typed, declared]
    )
