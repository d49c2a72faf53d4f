"""`solve`: the fastest plan that fits."""

from dataclasses import replace

from planner import files
from planner.api.keywords import on_profile
from planner.api.options import SolveOptions
from planner.api.reading import NOWHERE, AnyProfile, path_of, profile_of, reference
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.core.values.units import parse_us

PLAN_HEADER = """\
Made by `gpipe-plan solve`. You may edit balance, stages[].recompute, and micro_batches with micro_batch_size by hand:
then run `gpipe-plan check`, which recomputes everything else from the profile."""


@on_profile(SolveOptions)
def solve(profile: AnyProfile, options: SolveOptions) -> Plan:
    """Finds the plan with the smallest step time that fits: cuts, micro-batches, recomputation.

    Args:
        profile: A profile, or its file.
        options: What is asked.

    Raises:
        InfeasibleError: Nothing fits; the hint says what would.
        UsageError: The options contradict each other or the profile.
        FileError: The profile cannot be read, or the plan not written.
        SolverError: No plan was found in time.
    """
    # `planner.solve` is imported where a plan is made, not by the help of commands.
    from planner.api.asked import request_of  # noqa: PLC0415
    from planner.solve import frontier_of, insight_of  # noqa: PLC0415
    from planner.solve import solve as solve_plan  # noqa: PLC0415

    source = profile_of(profile)
    read, output = source.profile, path_of(options.output)
    if output is not None:
        files.check_outputs({"--output": output}, (source.path, *_files_of(options)))
        files.check_writable(output)
    if options.batch is None:
        largest = max(read.micro_batch_sizes)
        options.note(f"no `--batch`: planning for {largest} samples per step, the largest size profiled")
    request = request_of(read, reference(source, output or NOWHERE), options)
    plan = solve_plan(read, request)
    if options.frontier:
        plan = replace(plan, frontier=frontier_of(read, request))
    if options.explain:
        plan = replace(plan, insight=insight_of(read, request, plan))
    if output is not None:
        files.write(output, plan, header=PLAN_HEADER)
    return plan


def faster_schedule_for(profile: Profile, plan: Plan, options: SolveOptions, *, spent_s: float) -> Plan | None:
    """The best plan under another schedule than `options` ask for, if one that is faster than `plan` is soon found.

    `spent_s` is how much of the time limit that answer has taken, in seconds.
    """
    from planner.solve import MOST_HINT_S, faster_schedule  # noqa: PLC0415 - numpy only where plans are made

    left_s = MOST_HINT_S if options.time_limit is None else parse_us(options.time_limit) / 1e6 - spent_s
    if options.solver == "milp" or left_s <= 0:
        return None
    fixed = None if options.micro_batches == "auto" else plan.micro_batches
    return faster_schedule(profile, plan, micro_batches=fixed, time_limit_s=min(MOST_HINT_S, left_s))


def _files_of(options: SolveOptions) -> tuple[str | None, ...]:
    """Paths of the files that options name."""
    cuts = path_of(options.balance)
    is_file = cuts is not None and not cuts[:1].isdigit()
    return path_of(options.links), path_of(options.calibration), cuts if is_file else None
