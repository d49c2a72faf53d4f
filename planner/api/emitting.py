"""`emit`: the files that run a plan, here or in another engine."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from planner import files
from planner.api.keywords import on_plan
from planner.api.options import EmitOptions
from planner.api.reading import File, fresh_verdict, plan_of, profile_for
from planner.core.values.findings import Finding
from planner.core.values.plan import Plan

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
    return written(plan, options, tell=lambda _: None).paths


def written(plan: File | Plan, options: EmitOptions, *, tell: Callable[[Finding], None]) -> "Written":
    """Writes the files, after what `check` finds in the plan went to `tell`; raises as `emit`."""
    from planner.emit import check_engine, write_emitted  # noqa: PLC0415 - only here

    check_engine(options.engine, standalone=options.standalone)
    read, place = plan_of(plan)
    source = profile_for(read, place, options.profile)
    verdict = fresh_verdict(read, source.profile, place)
    for finding in verdict.findings:
        tell(finding)
    folder = str(Path(source.path).parent)
    return write_emitted(
        verdict.plan or read,
        source.profile,
        engine=options.engine,
        standalone=options.standalone,
        folder=os.fspath(options.output),
        profile_folder=folder,
        read=(place, source.path, files.model_path(source.profile, folder)),
        force=options.force,
    )
