"""Kinds of files, such as `plan` and `profile`: the word in the middle of a file's `schema` key.

The class of a kind is imported when it is first needed, because importing all classes is slow.
"""

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from planner.core.values.balance import Balance
    from planner.core.values.calibration import Calibration
    from planner.core.values.links import Links
    from planner.core.values.partial import PartialProfile
    from planner.core.values.plan import Plan
    from planner.core.values.profile import Profile
    from planner.core.values.run_report import RunReport

    Value: TypeAlias = Profile | Plan | RunReport | Balance | Links | Calibration | PartialProfile


class FileKind(NamedTuple):
    """Kind of file: the dataclass of its content, and the command that makes such files."""

    module: str
    """Module in `planner.core.values` that defines the dataclass."""
    class_name: str
    made_by: str
    """Command that makes a file of this kind."""

    @property
    def value_class(self) -> "type[Value]":
        """Dataclass of the content."""
        kind: type[Value] = getattr(import_module(f"planner.core.values.{self.module}"), self.class_name)
        return kind

    @property
    def schema(self) -> str:
        """Value of the key `schema` in files of this kind."""
        return next(str(field.default) for field in fields(self.value_class) if field.name == "schema")


KINDS: Final[Mapping[str, FileKind]] = {
    "profile": FileKind("profile", "Profile", "gpipe-plan profile MODEL.py"),
    "plan": FileKind("plan", "Plan", "gpipe-plan solve"),
    "run": FileKind("run_report", "RunReport", "torchrun … train.py --report run.json"),
    "balance": FileKind("balance", "Balance", "gpipe-plan emit"),
    "links": FileKind("links", "Links", "torchrun --nproc-per-node K -m planner profile-links"),
    "calibration": FileKind("calibration", "Calibration", "gpipe-plan verify"),
    "partial": FileKind("partial", "PartialProfile", "gpipe-plan profile MODEL.py"),
}


def kind_in_schema_key(schema: str) -> str:
    """Return the word KIND of a schema key `gpipe-plan/KIND/v1`; empty for a text of another form."""
    parts = schema.split("/")
    return parts[1] if len(parts) == 3 else ""
