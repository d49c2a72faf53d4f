"""The HTML report of a plan, a profile or a run: one file that needs nothing else, to be sent to a colleague."""

from planner.show.html.page import plan_html, profile_html, run_html

__all__ = ["plan_html", "profile_html", "run_html"]
