"""Results as small pieces of HTML for notebooks, without scripts and style sheets."""

from collections.abc import Callable, Mapping
from html import escape
from typing import Any

from planner.core.judge.difference import Comparison
from planner.core.judge.verdict import Verdict
from planner.core.judge.verification import Verification
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.core.values.sweep import Sweep
from planner.show.terminal.plan import plan_text
from planner.show.terminal.plans import plan_comparison_text, sweep_text
from planner.show.terminal.profile import profile_text
from planner.show.terminal.run import verification_text
from planner.show.terminal.style import Style
from planner.show.terminal.verdict import verdict_text

_PLAIN = Style(width=120, color=False, wrap=False)
_TEXTS: Mapping[type, Callable[[Any, Style], str]] = {
    Comparison: plan_comparison_text,
    Plan: lambda plan, style: plan_text(plan, (), style),
    Profile: profile_text,
    Sweep: sweep_text,
    Verdict: verdict_text,
    Verification: verification_text,
}


def result_html(value: Any) -> str:
    """Return a result's command-line text as HTML. The text of a plan has no timeline and no error ranges."""
    return f'<pre style="white-space:pre">{escape(_TEXTS[type(value)](value, _PLAIN))}</pre>'
