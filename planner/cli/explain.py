"""`gpipe-plan explain`: explain findings of `check`."""

from typing import Annotated

import typer

from planner.cli.console import Console
from planner.cli.options import MARKDOWN, OrMarkdown, Quiet, check_format, formatted


def explain(
    codes: Annotated[
        list[str] | None, typer.Argument(metavar="CODE", help="Codes such as GP101; default: all.")
    ] = None,
    format_: OrMarkdown = "text",
    *,
    quiet: Quiet = False,
) -> None:
    """Explain findings of `gpipe-plan check`: meaning, importance and remedy."""
    from planner.core.values.findings import RULES, rule_of_code
    from planner.show.gate import rules_markdown
    from planner.show.terminal.verdict import rules_text

    check_format(format_, MARKDOWN)
    rules = tuple(dict.fromkeys(map(rule_of_code, codes))) if codes else RULES
    Console(quiet=quiet).result(formatted(rules, format_, text=rules_text, markdown=rules_markdown))
