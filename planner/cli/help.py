"""Parsing of command lines, and help texts that list options in sections."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from planner.core.errors import PlannerError
from planner.core.values.limits import truncate

_LONGEST = 200
"""Largest number of characters of a command's summary in the list of commands."""


class _AsTyped:
    """Mixin for commands whose options stay texts. To convert them, typer would import pydantic, which is slow."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            _take_as_typed(parameter)
        return parameters


def _take_as_typed(parameter: Any) -> None:
    # Other versions of typer keep their own parsing.
    with suppress(ImportError, AttributeError):
        from typer._coercion import PassThroughRuntimeParam

        of = parameter.type_descriptor
        if of.annotation in (str, bool):
            parameter._runtime_param = PassThroughRuntimeParam(
                parameter_info=of.parameter_info, annotation=of.annotation
            )


class Commands(_AsTyped, TyperGroup):
    """Group of all commands. Its help has whole summaries; typer would cut them off."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        summaries = [(name, command.get_short_help_str(limit=_LONGEST)) for name, command in commands if command]
        if summaries:
            with formatter.section("Commands"):
                formatter.write_dl(summaries)


class SectionedCommand(_AsTyped, TyperCommand):
    """Command whose `--help` lists options in sections, without rich's boxes."""

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
        # `planner.cli.main` reads this flag of all commands.
        last.insert(-1, ("--debug", "Show the traceback of errors."))
        sections["Options"] = last
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def usage_error_of(error: TyperException, arguments: Sequence[str], command: str) -> PlannerError:
    """Return the error for an invalid command line. The error's hint suggests similar names and the right `--help`."""
    see = f"see `gpipe-plan {command} --help`" if command else "see `gpipe-plan --help`"
    near = sorted(getattr(error, "possibilities", None) or ())
    if near and hasattr(error, "message"):
        meant = " or ".join(f"`{name}`" for name in near)
        return PlannerError(_plain(error.message), hint=f"did you mean {meant}? {see}")
    kind = next((kind for kind in ("integer", "number") if f"a valid {kind}" in getattr(error, "message", "")), "")
    option = next((word for word in getattr(getattr(error, "param", None), "opts", ()) if word in arguments[:-1]), "")
    if kind and option:
        value = arguments[list(arguments).index(option) + 1]
        return PlannerError(f"`{option} {truncate(value)}`: expected a{'n' * (kind == 'integer')} {kind}", hint=see)
    return PlannerError(_plain(error.format_message() if hasattr(error, "format_message") else str(error)), hint=see)


def _plain(message: str) -> str:
    # typer's messages begin with a capital and end with a period; ours do not.
    return message[:1].lower() + message[1:].rstrip(".")
