"""The solver: profile, devices and limits to the plan with the smallest step time, with a certificate.

What is asked beside that stands in modules of its own, each imported when its function is first asked for: `check`
solves one question again and has no use for the others.
"""

from typing import TYPE_CHECKING

from planner import imported_when_asked

if TYPE_CHECKING:
    from planner.solve.questions.certificate import certified
    from planner.solve.questions.faster import MOST_HINT_S, faster_schedule
    from planner.solve.questions.insight import frontier_of, insight_of
    from planner.solve.questions.remedy import what_would_fit
    from planner.solve.questions.sweep import sweep_of
    from planner.solve.questions.trade_off import trade_off_of
    from planner.solve.request import Request, Solver
    from planner.solve.search import solve

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

__getattr__ = imported_when_asked(
    __name__,
    {
        "MOST_HINT_S": "questions.faster",
        "Request": "request",
        "Solver": "request",
        "certified": "questions.certificate",
        "faster_schedule": "questions.faster",
        "frontier_of": "questions.insight",
        "insight_of": "questions.insight",
        "solve": "search",
        "sweep_of": "questions.sweep",
        "trade_off_of": "questions.trade_off",
        "what_would_fit": "questions.remedy",
    },
)
