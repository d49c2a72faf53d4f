"""What findings mean, for people who met one."""

from collections.abc import Iterator, Sequence
from itertools import chain

from rich.padding import Padding
from rich.text import Text

from planner.core.values.findings import Rule
from planner.show.terminal.rendering import BLANK, heading, plain, render
from planner.show.terminal.style import Style

__all__ = ["rules_text"]


def rules_text(rules: Sequence[Rule], style: Style) -> str:
    """Each with its code, what it means, why it matters, and what to do."""
    return render(style, *chain.from_iterable(_rule(rule, style) for rule in rules)).rstrip("\n")


def _rule(rule: Rule, style: Style) -> Iterator[Text | Padding]:
    yield heading(plain(f"{rule.code} ({rule.severity}): {rule.title}", style))
    for title, said in (("meaning", rule.meaning), ("why", rule.why), ("what to do", rule.remedy)):
        yield Padding(Text(plain(f"{title}: {said}", style)), (0, 0, 0, 2), expand=False)
    yield BLANK
