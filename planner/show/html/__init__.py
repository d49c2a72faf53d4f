"""HTML report of a plan or a profile, as one file without external resources."""

from planner.show.html.page import plan_html, profile_html

__all__ = ["plan_html", "profile_html"]
