"""gpipe-plan: an automatic partitioner and planner for pipeline-parallel training.

    profile = planner.profile("model.py")                        # measure every layer
    plan = planner.solve(profile, devices=8, mem="8GB")          # the fastest plan that fits
    planner.emit(plan, profile=profile)                          # balance.yaml and train.py
    verdict = planner.check("plan.yaml", device="h100")          # does it still fit?

Other functions:

    load_plan       read a plan
    solve_family    make a plan for each of several numbers of devices
    compare         compare plans
    sweep           find the smallest cluster that trains a model
    explore         write an interactive report with adjustable cuts
    verify          run a plan and compare the run with its prediction
    export          write the weights of a checkpoint as one file

Functions are imported on first use, so `import planner` is fast.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    """Return the `__getattr__` of a package that imports names on first use.

    `modules` has the module of each name, relative to the package.
    """

    def get(name: str) -> Any:
        if name in modules:
            return getattr(import_module(f"{package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


__getattr__ = lazy_attributes(
    __name__,
    {
        "Plan": "core.values.plan",
        "PlannerError": "core.errors",
        "Profile": "core.values.profile",
        "check": "api.checking",
        "compare": "api.comparing",
        "emit": "api.emitting",
        "explore": "api.exploring",
        "export": "api.exporting",
        "load_plan": "api.reading",
        "profile": "api.profiling",
        "solve": "api.solving",
        "solve_family": "api.solving",
        "sweep": "api.solving",
        "verify": "api.verifying",
    },
)


# `profile`, `solve` and `emit` are also subpackages. Python makes a subpackage an attribute of its package when it is
# first imported. They are imported here, so that a later import does not replace the functions.
for _name in ("emit", "profile", "solve"):
    import_module(f"{__name__}.{_name}")
    del globals()[_name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
