"""Results as small pieces of HTML for notebooks, without scripts and style sheets."""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from planner.core.judge.difference import Comparison
from planner.core.judge.verdict import Verdict
from planner.core.judge.verification import Verification
from planner.core.values.plan import Plan, Stage
from planner.core.values.profile import Profile
from planner.core.values.sweep import Sweep
from planner.show.terminal.plans import plan_comparison_text, sweep_text
from planner.show.terminal.profile import profile_text
from planner.show.terminal.run import verification_text
from planner.show.terminal.style import Style
from planner.show.terminal.verdict import verdict_text
from planner.show.views.numbers import percent
from planner.show.views.plan import figure_words, plan_headline, plan_stage_table

_LOOK = 'style="text-align:{};padding:2px 12px 2px 0"'
_TEXT, _NUMBER = _LOOK.format("left"), _LOOK.format("right")
_COLUMNS = ("stage", "layers", "recompute", "forward", "backward", "memory", "limit")


_PLAIN = Style(width=120, color=False, wrap=False)
_TEXTS: Mapping[type, Callable[[Any, Style], str]] = {
    Comparison: plan_comparison_text,
    Profile: profile_text,
    Sweep: sweep_text,
    Verdict: verdict_text,
    Verification: verification_text,
}


def result_html(value: Any) -> str:
    """Return a result as HTML: a plan as a table, any other result as the text that its command prints."""
    if isinstance(value, Plan):
        return notebook_html(value)
    return f'<pre style="white-space:pre">{escape(_TEXTS[type(value)](value, _PLAIN))}</pre>'


def notebook_html(plan: Plan) -> str:
    """Return a plan's figures, and a table with a row per stage and a bar of its memory."""
    view = plan_stage_table(plan, brief=True).pick(*_COLUMNS)
    looks = [_TEXT if column.unit == "text" else _NUMBER for column in view.columns]
    header = "".join(f"<th {_TEXT}>{name}</th>" for name in (*_COLUMNS, ""))
    rows = "".join(_row(texts, looks, stage) for texts, stage in zip(view.rows(), plan.stages, strict=True))
    return (
        f"<div><strong>{escape(plan_headline(plan))}</strong><br>"
        f"{escape(' · '.join((*figure_words(plan), plan.solver.status)))}"
        f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _row(texts: Sequence[str], looks: Sequence[str], stage: Stage) -> str:
    need, limit = stage.memory.total, stage.memory_bytes
    share = need / limit if limit else 1.0
    # A meter turns red above `high`, and screen readers recognize it.
    meter = f'<meter min="0" max="1" high="1" value="{min(share, 1):.3f}">{percent(share, decimals=0)}</meter>'
    over = " <strong>over</strong>" if need > limit else ""
    cells = "".join(f"<td {look}>{escape(text)}</td>" for look, text in zip(looks, texts, strict=True))
    return f"<tr>{cells}<td {_TEXT}>{meter} {percent(share, decimals=0)}{over}</td></tr>"
