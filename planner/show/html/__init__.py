"""HTML report of a plan, a profile or a run, as one file without external resources."""

from planner.show.html.page import plan_html, profile_html, run_html

__all__ = ["plan_html", "profile_html", "run_html"]
