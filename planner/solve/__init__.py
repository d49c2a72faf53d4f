"""Solver: find the plan with the smallest step time for a profile, devices and limits, with a lower bound.

Read `search.py` first. It splits a `Request` into cases (`cases.py`) and calls the search of each case. The searches
are in `chain` (one stage per device), `chunks` (several stages per device), `orders` (schedules made by the solver),
`layers` (recomputation layer by layer) and `integer.py` (an independent integer program). All implement
`answer.PlanSearch` and use the tables in `space`. `questions` solves variations of a request.
"""

from typing import TYPE_CHECKING

from planner import lazy_attributes

if TYPE_CHECKING:
    from planner.solve.request import Request
    from planner.solve.search import solve

__all__ = ["Request", "solve"]

__getattr__ = lazy_attributes(__name__, {"Request": "request", "solve": "search"})
