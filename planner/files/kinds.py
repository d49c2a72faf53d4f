"""The kinds of files, by the word in the middle of their schema; a kind's class is imported when a file needs it.

Most commands read a plan and its profile. To define the classes of all kinds takes longer than to read these two.
"""

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from planner.core.values.balance import Balance
    from planner.core.values.calibration import Calibration
    from planner.core.values.links import Links
    from planner.core.values.partial import Partial
    from planner.core.values.plan import Plan
    from planner.core.values.profile import Profile
    from planner.core.values.run_report import RunReport

    Value: TypeAlias = Profile | Plan | RunReport | Balance | Links | Calibration | Partial


class Kind(NamedTuple):
    """One kind of file."""

    module: str
    """Where its class stands, in `planner.core.values`."""
    class_name: str
    made_by: str
    """The command that makes one."""

    @property
    def of(self) -> "type[Value]":
        """The class of its values."""
        kind: type[Value] = getattr(import_module(f"planner.core.values.{self.module}"), self.class_name)
        return kind

    @property
    def schema(self) -> str:
        """What stands behind the key `schema`."""
        return next(str(field.default) for field in fields(self.of) if field.name == "schema")


KINDS: Final[Mapping[str, Kind]] = {
    "profile": Kind("profile", "Profile", "gpipe-plan profile MODEL.py"),
    "plan": Kind("plan", "Plan", "gpipe-plan solve"),
    "run": Kind("run_report", "RunReport", "torchrun … train.py --report run.json"),
    "balance": Kind("balance", "Balance", "gpipe-plan emit"),
    "links": Kind("links", "Links", "torchrun --nproc-per-node K -m planner profile-links"),
    "calibration": Kind("calibration", "Calibration", "gpipe-plan verify"),
    "partial": Kind("partial", "Partial", "gpipe-plan profile MODEL.py"),
}


def word_of(schema: str) -> str:
    """The word that tells the kind in `gpipe-plan/WORD/v1`; empty where there is none."""
    parts = schema.split("/")
    return parts[1] if len(parts) == 3 else ""
