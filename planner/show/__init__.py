"""Profiles, plans, verdicts and run reports as text; in modules of their own, as HTML, SVG and traces.

Knows `planner.core` only.
"""

from planner.show.links import links_text
from planner.show.memory import memory_text
from planner.show.plan import plan_text
from planner.show.profile import profile_text
from planner.show.rules import rules_text
from planner.show.run import comparison_text, run_text
from planner.show.style import Style, style_for
from planner.show.timeline import timeline_text
from planner.show.verdict import verdict_text
from planner.show.verification import verification_text

__all__ = [
    "Style",
    "comparison_text",
    "links_text",
    "memory_text",
    "plan_text",
    "profile_text",
    "rules_text",
    "run_text",
    "style_for",
    "timeline_text",
    "verdict_text",
    "verification_text",
]
