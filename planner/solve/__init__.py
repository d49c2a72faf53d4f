"""The solver: profile, devices and limits to the plan with the smallest step time, with a certificate."""

from planner.solve.search import Request, solve

__all__ = ["Request", "solve"]
