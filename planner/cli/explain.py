"""`gpipe-plan explain`: what a finding of `check` means, why it matters, and what to do."""

import json
from typing import Annotated

import typer

from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, check_format
from planner.core.values.findings import RULES, rule
from planner.files import to_plain
from planner.show import rules_text

__all__ = ["explain"]

_FORMATS = ("text", "json", "markdown")


def explain(
    codes: Annotated[
        list[str] | None, typer.Argument(metavar="CODE", help="Codes such as GP101; without any, all of them.")
    ] = None,
    format_: Annotated[str, typer.Option("--format", metavar="|".join(_FORMATS), help="How to print it.")] = "text",
    *,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Tell what a finding of `gpipe-plan check` means, why it matters, and what to do."""
    check_format(format_, _FORMATS)
    asked = tuple(dict.fromkeys(map(rule, codes))) if codes else RULES
    console = Console(quiet=False)
    if format_ == "json":
        console.result(json.dumps([to_plain(one) for one in asked], indent=2))
    elif format_ == "markdown":
        from planner.show.gate import rules_markdown  # noqa: PLC0415 - for the documentation

        console.result(rules_markdown(asked))
    else:
        console.result(rules_text(asked, style_for_stdout()))
