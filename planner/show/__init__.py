"""Profiles, plans, verdicts and run reports as text, HTML, SVG and traces. Knows `planner.core` only."""

from planner.show.html import plan_html, profile_html, run_html
from planner.show.memory import memory_text
from planner.show.names import schedule_name
from planner.show.plan import plan_text
from planner.show.profile import profile_text
from planner.show.run import comparison_text, run_text
from planner.show.style import Style, style_for
from planner.show.svg import timeline_svg
from planner.show.timeline import timeline_text
from planner.show.trace import trace_json
from planner.show.verdict import verdict_text

__all__ = [
    "Style",
    "comparison_text",
    "memory_text",
    "plan_html",
    "plan_text",
    "profile_html",
    "profile_text",
    "run_html",
    "run_text",
    "schedule_name",
    "style_for",
    "timeline_svg",
    "timeline_text",
    "trace_json",
    "verdict_text",
]
