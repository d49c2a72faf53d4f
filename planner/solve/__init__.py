"""The solver: a profile, devices and limits in, the plan with the smallest step time out, with a lower bound.

Read `search.py` first: `request.py` is the question, `cases.py` lists its combinations of schedule, replicas and M, and
each case goes to the right search. Searches are in `chain` (one stage on each device), `chunks` (several), `orders`
(schedules that the solver makes), `layers` (single layers recomputed) and `integer.py` (a second opinion). They work on
the tables in `space` and have the shape in `answer.py`. `questions` asks again with one thing changed.
"""

from typing import TYPE_CHECKING

from planner import imported_when_asked

if TYPE_CHECKING:
    from planner.solve.request import Request
    from planner.solve.search import solve

__all__ = ["Request", "solve"]

__getattr__ = imported_when_asked(__name__, {"Request": "request", "solve": "search"})
