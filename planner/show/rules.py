"""What findings mean, for people who met one."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from planner.core.findings import Rule
from planner.show.rendering import BLANK, heading, plain, render
from planner.show.style import Style

__all__ = ["rules_text"]


def rules_text(rules: Sequence[Rule], style: Style) -> str:
    """Each with its code, what it means, why it matters, and what to do."""
    parts: list[RenderableType] = []
    for known in rules:
        parts.append(heading(plain(f"{known.code} ({known.severity}): {known.title}", style)))
        for title, said in (("meaning", known.meaning), ("why", known.why), ("what to do", known.remedy)):
            parts.append(Padding(Text(plain(f"{title}: {said}", style)), (0, 0, 0, 2), expand=False))
        parts.append(BLANK)
    return render(style, *parts[:-1])
