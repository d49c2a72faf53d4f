"""The solver: profile, devices and limits to the plan with the smallest step time, with a certificate."""

from planner.solve.insight import frontier_of, insight_of
from planner.solve.search import Request, Solver, solve

__all__ = ["Request", "Solver", "frontier_of", "insight_of", "solve"]
