"""The commands as functions: `planner.profile`, `planner.solve`, `planner.emit`, `planner.check`, and three more.

Options have the names and defaults that they have on the command line, and take its texts ("8GB", "25GB/s,5us") or
values (bytes, numbers, lists, a `Link`). Profiles and plans may be values or paths. Nothing is printed, and a profile
or plan is written to a file only where `output` names one. Errors are those of `planner.core.errors`.
"""

from planner.api.checking import check
from planner.api.comparing import compare
from planner.api.emitting import emit
from planner.api.profiling import profile
from planner.api.solving import solve, sweep
from planner.api.verifying import verify
from planner.core.values.plan import Plan
from planner.show.notebook import plan_html

__all__ = ["check", "compare", "emit", "profile", "solve", "sweep", "verify"]

# The core draws nothing; whoever uses this package may be in a notebook.
Plan._repr_html_ = plan_html  # type: ignore[attr-defined]
