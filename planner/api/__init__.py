"""The commands as functions: `planner.profile`, `planner.solve`, `planner.emit`, `planner.check`, and others.

Options have the same names and defaults as on the command line. An option is a text as on the command line ("8GB",
"25GB/s,5us") or a Python value (bytes, numbers, lists, a `Link`). Profiles and plans may be values or paths. Functions
print nothing. A profile or plan is written to a file only if `output` names the file. All errors are defined in
`planner.core.errors`.

The module of a function is imported when the function is first used, so that the command line starts fast.
"""

from typing import TYPE_CHECKING

from planner import lazy_attributes
from planner.api.notebooks import enable_notebook_display
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile

if TYPE_CHECKING:
    from planner.api.checking import check
    from planner.api.comparing import compare
    from planner.api.emitting import emit
    from planner.api.exploring import explore
    from planner.api.exporting import export
    from planner.api.profiling import profile
    from planner.api.reading import load_plan
    from planner.api.solving import solve, solve_family, sweep
    from planner.api.verifying import verify

__all__ = [
    "check",
    "compare",
    "emit",
    "explore",
    "export",
    "load_plan",
    "profile",
    "solve",
    "solve_family",
    "sweep",
    "verify",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "check": "checking",
        "compare": "comparing",
        "emit": "emitting",
        "explore": "exploring",
        "export": "exporting",
        "load_plan": "reading",
        "profile": "profiling",
        "solve": "solving",
        "solve_family": "solving",
        "sweep": "solving",
        "verify": "verifying",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


enable_notebook_display(Plan)
enable_notebook_display(Profile)
