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
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inspect import Signature

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


class Verb(ModuleType):
    """A subpackage that can be called as the function of its name in `planner.api`.

    `from planner.solve import Request` makes Python put the subpackage where the function was: `planner.solve(…)` goes
    on to work because `solve`, `emit` and `profile` give themselves this class.
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._function(*arguments, **options)

    @property
    def _function(self) -> Any:
        return getattr(import_module("planner.api"), self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> "Signature":
        from inspect import signature  # noqa: PLC0415 - for notebooks and `help` alone

        return signature(self._function)


def imported_when_asked(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose names are imported when first asked for, each from a module of its own."""

    def get(name: str) -> Any:
        if name in modules:
            return getattr(import_module(f"{package}.{modules[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


__getattr__ = imported_when_asked(
    __name__,
    {
        **dict.fromkeys(__all__, "api"),
        "Plan": "core.values.plan",
        "PlannerError": "core.errors",
        "Profile": "core.values.profile",
    },
)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
