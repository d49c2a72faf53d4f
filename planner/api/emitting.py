"""`emit`: write the files that run a plan, with the bundled executor or in another engine."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from planner.api import texts
from planner.api.keywords import plan_command
from planner.api.option import ignore_arguments
from planner.api.options.emitting import EmitOptions
from planner.api.question import calibrated_solve_options
from planner.api.reading import judge_again_from_profile, plan_of, profile_for
from planner.api.texts import File
from planner.core.errors import UsageError
from planner.core.values.findings import Finding
from planner.core.values.nodes import Nodes
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile

if TYPE_CHECKING:
    from planner.emit.engines import EmitResult


@plan_command(EmitOptions)
def emit(plan: File | Plan, options: EmitOptions) -> tuple[Path, ...]:
    """Write the files that run a plan, by default `balance.yaml` and the script `train.py`.

    Without the option `force`, an edited `train.py` is not overwritten.

    Args:
        plan: A plan, or its file.
        options: Options of `emit`. The field `smaller` has plans for fewer processes, used if devices are lost.

    Returns:
        Paths of the files.

    Raises:
        StaleError: The profile differs from the one that a plan was made from.
        InfeasibleError: With the chosen engine, a device needs more memory than its limit.
        UsageError: The engine cannot run the plan, the profile names no model file, or the nodes have too few devices.
            Also raised if a plan in `options.smaller` does not have fewer processes than `plan`, has as many processes
            as another plan in `options.smaller`, or has another mini-batch size than `plan`.
        FileError: A file cannot be read or written, or balance.yaml was edited.
    """
    return emit_files(plan, options, on_finding=ignore_arguments).paths


def emit_files(plan: File | Plan, options: EmitOptions, *, on_finding: Callable[[Finding], None]) -> "EmitResult":
    """Report the findings of `check` on a plan, then write its files as `emit` does.

    Args:
        plan: A plan, or its file.
        options: Options of `emit`.
        on_finding: Called with every finding of `check`.

    Returns:
        The paths of the written files, and the command that uses them.
    """
    from planner.emit.engines import check_engine, write_engine_files  # noqa: PLC0415 - only here
    from planner.emit.native import InputPaths  # noqa: PLC0415 - only here

    others = options.smaller or ()
    check_engine(options.engine, launch=options.launch, has_smaller=bool(others))
    nodes = _nodes(options)
    loaded_plan, place = plan_of(plan)
    source = profile_for(loaded_plan, place, options.profile)
    smaller = [plan_of(other) for other in others]
    fresh = [_recomputed(each, source.profile, where, on_finding) for each, where in ((loaded_plan, place), *smaller)]
    return write_engine_files(
        fresh[0],
        source.profile,
        engine=options.engine,
        folder=os.fspath(options.output),
        input_paths=InputPaths(plan=place, profile=source.path, smaller=tuple(where for _, where in smaller)),
        force=options.force,
        smaller=fresh[1:],
        launch=options.launch,
        nodes=nodes,
        repeat_options=calibrated_solve_options,
    )


def _nodes(options: EmitOptions) -> Nodes | None:
    if options.nodes is None:
        return None
    if options.launch is None:
        raise UsageError(
            f"`--nodes {options.nodes}` needs `--launch`",
            hint="add `--launch slurm`; to plan for nodes, use `solve --nodes`",
        )
    count, devices = texts.parse_node_counts(options.nodes)
    return Nodes(count=count, devices=devices)


def _recomputed(plan: Plan, profile: Profile, place: str, on_finding: Callable[[Finding], None]) -> Plan:
    verdict = judge_again_from_profile(plan, profile, place)
    for finding in verdict.findings:
        on_finding(finding)
    return verdict.plan or plan
