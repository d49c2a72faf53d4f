"""gpipe-plan: an automatic partitioner and planner for pipeline-parallel training.

    profile = planner.profile("model.py")                        # measure every layer
    plan = planner.solve(profile, devices=8, mem="8GB")          # the fastest plan that fits
    planner.emit(plan, profile=profile)                          # balance.yaml and train.py
    verdict = planner.check("plan.yaml", device="h100")          # does it still fit?

Other functions:

    load_plan       read a plan
    solve_family    make a plan for each of several numbers of devices
    compare         compare plans
    sweep           find the smallest cluster
    explore         write an interactive report with adjustable cuts
    verify          run a plan and compare the run with its prediction
    export          write the weights of a checkpoint as one file

They are imported on first use, so `import planner` itself takes no time.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.api import (
        check,
        compare,
        emit,
        explore,
        export,
        load_plan,
        profile,
        solve,
        solve_family,
        sweep,
        verify,
    )
    from planner.core.errors import PlannerError
    from planner.core.values.plan import Plan
    from planner.core.values.profile import Profile

__all__ = [
    "Plan",
    "PlannerError",
    "Profile",
    "__version__",
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

__version__ = "0.1.0"


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names are imported on first use, each from a module of its own."""

    def get(name: str) -> Any:
        if name in modules:
            return getattr(import_module(f"{package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


__getattr__ = lazy_attributes(
    __name__,
    {
        **dict.fromkeys(__all__, "api"),
        "Plan": "core.values.plan",
        "PlannerError": "core.errors",
        "Profile": "core.values.profile",
    },
)


# `profile`, `solve` and `emit` are subpackages, too. Python makes a subpackage an attribute of its package when it is
# first imported. That is done here, so that the functions keep their names whatever is imported later.
for _name in ("emit", "profile", "solve"):
    import_module(f"{__name__}.{_name}")
    del globals()[_name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
