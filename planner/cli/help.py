"""What commands make of a command line and say of themselves: options in sections, what was meant by one unknown."""

from contextlib import suppress
from typing import Any

from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from planner.core.errors import PlannerError


class _AsTyped:
    """A mixin: texts and flags are taken as they were typed.

    typer has pydantic look at each of them, which takes longer to import than `check` to answer.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            _take_as_typed(parameter)
        return parameters


def _take_as_typed(parameter: Any) -> None:
    # A typer that does this otherwise goes on as it does.
    with suppress(ImportError, AttributeError):
        from typer._coercion import PassThroughRuntimeParam

        of = parameter.type_descriptor
        if of.annotation in (str, bool):
            parameter._runtime_param = PassThroughRuntimeParam(
                parameter_info=of.parameter_info, annotation=of.annotation
            )


class Commands(_AsTyped, TyperGroup):
    """All commands that may be asked for."""


class Sectioned(_AsTyped, TyperCommand):
    """A command whose `--help` has sections; typer itself makes them in rich's boxes only."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        last: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            if parameter.param_type_name == "argument":
                sections["Arguments"].append(record)
            elif title := getattr(parameter, "rich_help_panel", None):
                sections.setdefault(title, []).append(record)
            else:
                last.append(record)
        sections["Options"] = last
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def misused(error: TyperException, command: str) -> PlannerError:
    """The error for a command line that cannot be read: what there is, near to what was typed, and where it is told."""
    see = f"see `gpipe-plan {command} --help`" if command else "see `gpipe-plan --help`"
    near = sorted(getattr(error, "possibilities", None) or ())
    if near and hasattr(error, "message"):
        meant = " or ".join(f"`{name}`" for name in near)
        return PlannerError(_plain(error.message), hint=f"did you mean {meant}? {see}")
    return PlannerError(_plain(error.format_message() if hasattr(error, "format_message") else str(error)), hint=see)


def _plain(message: str) -> str:
    # typer's sentences begin with a capital and end with a full stop; ours do not.
    return message[:1].lower() + message[1:].rstrip(".")
