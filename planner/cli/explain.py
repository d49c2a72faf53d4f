"""`gpipe-plan explain`: explain findings of `check`."""

from typing import Annotated

import typer

from planner.cli.console import Console, style_for_stdout
from planner.cli.options import OrMarkdown, Quiet, check_format


def explain(
    codes: Annotated[
        list[str] | None, typer.Argument(metavar="CODE", help="Codes such as GP101; default: all.")
    ] = None,
    format_: OrMarkdown = "text",
    *,
    quiet: Quiet = False,
) -> None:
    """Explain findings of `gpipe-plan check`: meaning, importance and remedy."""
    from planner import files
    from planner.core.values.findings import RULES, rule
    from planner.show.gate import rules_markdown
    from planner.show.terminal.verdict import rules_text

    writers = {
        "text": lambda rules: rules_text(rules, style_for_stdout()),
        "json": files.json_text,
        "markdown": rules_markdown,
    }
    check_format(format_, writers)
    Console(quiet=quiet).result(writers[format_](tuple(dict.fromkeys(map(rule, codes))) if codes else RULES))
