"""`emit`: the files that run a plan, here or in another engine."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from planner import files
from planner.api.keywords import on_plan
from planner.api.options import EmitOptions
from planner.api.reading import File, ReadProfile, fresh_verdict, plan_of, profile_for
from planner.core.values.findings import Finding
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile

if TYPE_CHECKING:
    from planner.emit import Written


@on_plan(EmitOptions)
def emit(plan: File | Plan, options: EmitOptions) -> tuple[Path, ...]:
    """Writes what runs a plan, by default `balance.yaml` and the script `train.py`, and says where it stands.

    A `train.py` that was edited stays as it is: it runs whatever `balance.yaml` says.

    Args:
        plan: A plan, or its file.
        options: What is asked.

    Raises:
        StaleError: The plan was made from another profile.
        UsageError: The executor cannot run such a plan, or the profile names no model file.
        FileError: A file cannot be read or written; balance.yaml, or a standalone train.py, was edited.
    """
    from planner.emit import check_engine  # noqa: PLC0415 - only here

    check_engine(options.engine, standalone=options.standalone)
    return fresh_plan(plan, profile=options.profile).write(options).paths


@dataclass(frozen=True, slots=True, kw_only=True)
class FreshPlan:
    """A plan as its profile predicts it now, ready to be written for any engine."""

    plan: Plan
    plan_path: str
    source: ReadProfile
    findings: tuple[Finding, ...]
    """What `check` says of it; nothing that keeps it from being written."""

    def write(self, options: EmitOptions) -> "Written":
        """Writes the files; raises as `emit`."""
        from planner.emit import write_emitted  # noqa: PLC0415 - only here

        profile, folder = self.source.profile, str(Path(self.source.path).parent)
        return write_emitted(
            self.plan,
            profile,
            engine=options.engine,
            standalone=options.standalone,
            folder=os.fspath(options.output),
            profile_folder=folder,
            read=(self.plan_path, self.source.path, files.model_path(profile, folder)),
            force=options.force,
        )


def fresh_plan(plan: File | Plan, *, profile: File | Profile | None = None) -> FreshPlan:
    """A plan, recomputed from its profile, which is to be told where it is a value or its file was moved.

    Raises:
        StaleError: The plan was made from another profile.
        FileError: A file cannot be read.
    """
    read, place = plan_of(plan)
    source = profile_for(read, place, profile)
    verdict = fresh_verdict(read, source.profile, place)
    return FreshPlan(plan=verdict.plan or read, plan_path=place, source=source, findings=verdict.findings)
