"""The solver: profile, devices and limits to the plan with the smallest step time, with a certificate."""

import sys

from planner import Verb
from planner.solve.certificate import certified
from planner.solve.faster import MOST_HINT_S, faster_schedule
from planner.solve.insight import frontier_of, insight_of
from planner.solve.remedy import what_would_fit
from planner.solve.request import Request, Solver
from planner.solve.search import solve
from planner.solve.sweep import sweep_of
from planner.solve.trade_off import trade_off_of

__all__ = [
    "MOST_HINT_S",
    "Request",
    "Solver",
    "certified",
    "faster_schedule",
    "frontier_of",
    "insight_of",
    "solve",
    "sweep_of",
    "trade_off_of",
    "what_would_fit",
]

sys.modules[__name__].__class__ = Verb
