"""Profiles, plans, verdicts and run reports as text; in modules of their own, as HTML, SVG and traces."""

from planner.show.terminal.links import links_text
from planner.show.terminal.plan import plan_text
from planner.show.terminal.profile import profile_text
from planner.show.terminal.run import comparison_text, run_text, verification_text
from planner.show.terminal.style import Style, style_for
from planner.show.terminal.verdict import rules_text, verdict_text

__all__ = [
    "Style",
    "comparison_text",
    "links_text",
    "plan_text",
    "profile_text",
    "rules_text",
    "run_text",
    "style_for",
    "verdict_text",
    "verification_text",
]
