"""gpipe-plan: an automatic partitioner and planner for pipeline-parallel training.

    profile = planner.profile("model.py")                        # measure every layer
    plan = planner.solve(profile, devices=8, mem="8GB")          # the fastest plan that fits
    planner.emit(plan, profile=profile)                          # balance.yaml and train.py
    verdict = planner.check("plan.yaml", device="h100")          # does it still fit?

`planner.load_plan` reads a plan, `planner.solve_family` makes one for each of several numbers of devices,
`planner.compare` sets plans side by side, `planner.sweep` finds the smallest cluster, `planner.explore` writes a page
on which a plan is changed by hand, `planner.verify` runs a plan and compares the run with its prediction, and
`planner.export` writes the weights of a checkpoint as one file. They are imported when first used: `import planner`
itself costs nothing.
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
    """The `__getattr__` of a package whose names are imported when first asked for, each from a module of its own."""

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
