"""`solve`: the fastest plan that fits, or one for each number of devices; `sweep`: the best for each and every cap."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from planner import files
from planner.api import texts
from planner.api.given_lists import lists_path, refuse_lists
from planner.api.headroom import AUTO, headroom_of
from planner.api.keywords import on_profile
from planner.api.notebooks import shown_in_notebooks
from planner.api.options.solving import SolveOptions, SolverOptions, SweepOptions
from planner.api.reading import NOWHERE, AnyProfile, ReadProfile, path_of, profile_of, reference
from planner.core.errors import InfeasibleError, UsageError
from planner.core.extras import command_for
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.core.values.sweep import Sweep
from planner.core.values.units import counted, parse_us

shown_in_notebooks(Sweep)

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
    source, output = profile_of(profile), path_of(options.output)
    _check_output(output, source, options)
    plan = _solved(source, options, output)
    if output is not None:
        files.write(output, plan, header=PLAN_HEADER)
    return plan


@on_profile(SolveOptions)
def solve_family(profile: AnyProfile, options: SolveOptions) -> tuple[Plan, ...]:
    """Finds a plan for each of several numbers of devices, most first: for when some of them are lost.

    The first is written to `output`, the others beside it: `plan.yaml`, `plan-6.yaml`, `plan-4.yaml`. None is written
    unless there is one for each.

    Args:
        profile: A profile, or its file.
        options: What is asked, with several numbers in `devices`.

    Raises:
        InfeasibleError: For one of the numbers nothing fits; the hint says what would.
        UsageError: The options contradict each other or the profile.
        FileError: The profile cannot be read, or a plan not written.
        SolverError: A plan was not found in time.
    """
    source = profile_of(profile)
    counts = texts.device_counts(options.devices) if options.devices is not None else ()
    output = path_of(options.output)
    paths = (None,) * max(1, len(counts)) if output is None else family_paths(output, counts)
    plans: list[Plan] = []
    for path, count in zip(paths, counts or (None,), strict=True):
        _check_output(path, source, options)
        # What is told of the options is the same for all of them.
        asked = replace(options, devices=count, note=options.note if not plans else lambda _: None)
        try:
            plans.append(_solved(source, asked, path))
        except InfeasibleError as error:
            if len(paths) == 1:
                raise
            raise InfeasibleError(f"with {counted(count or 0, 'device')}: {error.message}", hint=error.hint) from None
    for path, plan in zip(paths, plans, strict=True):
        if path is not None:
            files.write(path, plan, header=PLAN_HEADER)
    return tuple(plans)


def family_paths(output: str, counts: Sequence[int]) -> tuple[str, ...]:
    """Where the plans for so many devices are written; raises `UsageError` where they would be one file."""
    if len(counts) < 2:
        return (output,)
    if output == "-":
        raise UsageError(
            f"{len(counts)} plans cannot be written to standard output", hint="name a file: `--output plan.yaml`"
        )
    path = Path(output)
    return (output, *(str(path.with_name(f"{path.stem}-{count}{path.suffix}")) for count in counts[1:]))


def _check_output(output: str | None, source: ReadProfile, options: SolveOptions) -> None:
    """Before time is spent on what is to be written there."""
    if output is not None:
        files.check_outputs({"--output": output}, (source.path, *_files_of(options)))
        files.check_writable(output)


def _solved(source: ReadProfile, options: SolveOptions, output: str | None) -> Plan:
    """The plan that will stand at `output`, for one number of devices."""
    # `planner.solve` is imported where a plan is made, not by the help of commands.
    from planner.api.asked import headroom_asked, request_of  # noqa: PLC0415
    from planner.core.cost.costs import CostTable  # noqa: PLC0415
    from planner.solve import solve as solve_plan  # noqa: PLC0415
    from planner.solve.questions.insight import frontier_of, insight_of  # noqa: PLC0415
    from planner.solve.questions.trade_off import trade_off_of  # noqa: PLC0415
    from planner.solve.search import lacks_bound  # noqa: PLC0415

    read = source.profile
    if options.batch is None:
        largest = max(read.micro_batch_sizes)
        options.note(f"no `--batch`: planning for {largest} samples per step, the largest size profiled")
    request = request_of(read, reference(source, output or NOWHERE), options)
    if options.headroom == AUTO:
        share = headroom_asked(read, options)
        options.note(f"headroom {100 * share:.4g}% of every cap, as far as peaks came out above such predictions")
    if CostTable(read).halves_assumed and all(each.splits_backward for each in request.schedules):
        options.note(
            "the profile says nothing of backwards in halves: each is taken to be half of the whole, and all that a "
            "forward keeps to be kept until the second; profile on the device to measure them"
        )
    plan = solve_plan(read, request)
    if read.model.batch_norm and plan.micro_batches > 1:
        options.note(
            f"batch normalization sees micro-batches of {counted(plan.micro_batch_size, 'sample')}, not the batch of "
            f"{plan.inputs.batch}; `--min-micro-batch 8` bounds them below"
        )
    if read.proof is not None and read.proof.uncovered and len(plan.stages) > 1:
        options.note(
            f"{counted(read.proof.uncovered, 'cut')} of {len(read.layers) - 1} were not compared with "
            "the unpartitioned model; `gpipe-plan verify` compares those of this plan"
        )
    if plan.solver.status == "feasible" and lacks_bound(request.schedules):
        options.note(
            "highspy is not installed: with its bound the gap may be smaller, and the plan faster "
            f"(`{command_for('milp')}`)"
        )
    if options.frontier:
        schedules = trade_off_of(read, plan, micro_batches=request.micro_batches)
        plan = replace(plan, frontier=frontier_of(read, request), schedules=schedules)
    if options.explain:
        plan = replace(plan, insight=insight_of(read, request, plan))
    return plan


def faster_schedule_for(profile: Profile, plan: Plan, options: SolveOptions, *, spent_s: float) -> Plan | None:
    """The best plan under another schedule than `options` ask for, if one that is faster than `plan` is soon found.

    `spent_s` is how much of the time limit that answer has taken, in seconds.
    """
    from planner.solve.questions.faster import MOST_HINT_S, faster_schedule  # noqa: PLC0415 - imports numpy

    left_s = MOST_HINT_S if options.time_limit is None else parse_us(options.time_limit) / 1e6 - spent_s
    if options.solver == "milp" or left_s <= 0:
        return None
    fixed = None if options.micro_batches == "auto" else plan.micro_batches
    return faster_schedule(profile, plan, micro_batches=fixed, time_limit_s=min(MOST_HINT_S, left_s))


def with_schedules(profile: Profile, plan: Plan, options: SolveOptions) -> Plan:
    """`plan` with what each schedule would give, if `options` left the schedule open."""
    from planner.solve.questions.trade_off import trade_off_of  # noqa: PLC0415 - imports numpy

    if plan.schedules:
        return plan
    fixed = None if options.micro_batches == "auto" else plan.micro_batches
    return replace(plan, schedules=trade_off_of(profile, plan, micro_batches=fixed))


def _files_of(options: SolveOptions) -> tuple[str | None, ...]:
    """Paths of the files that options name."""
    cuts = path_of(options.balance)
    is_file = cuts is not None and not cuts[:1].isdigit()
    return path_of(options.links), path_of(options.calibration), cuts if is_file else None, lists_path(options.schedule)


@on_profile(SweepOptions)
def sweep(profile: AnyProfile, options: SweepOptions) -> Sweep:
    """The best plan for every number of devices and every cap: the smallest cluster that trains, and what others bring.

    Args:
        profile: A profile, or its file.
        options: What is asked.

    Raises:
        UsageError: The options contradict each other or the profile.
        FileError: The profile cannot be read, or a plan not written.
    """
    from planner.api.asked import request_of  # noqa: PLC0415 - as in `solve`
    from planner.solve.questions.sweep import sweep_of  # noqa: PLC0415

    refuse_lists(options.schedule, "sweep")
    counts = texts.integers("--devices", options.devices)
    source, output = profile_of(profile), path_of(options.output)
    place = reference(source, NOWHERE if output is None else str(Path(output, "plan.yaml")))
    request = request_of(source.profile, place, _of_largest(options, max(counts)))
    caps = request.inputs.memory_bytes[:1] if options.mem is None else texts.sizes(options.mem)
    share = headroom_of(options.headroom, source.profile, caps)
    answers = sweep_of(
        source.profile, request, devices=counts, memory_bytes=caps, headroom=share, progress=options.progress
    )
    if output is not None:
        plans = {str(Path(output, cell.file_name)): cell.plan for cell in answers.cells if cell.plan is not None}
        files.check_outputs({name: name for name in plans}, (source.path,))
        for name, plan in plans.items():
            files.write(name, plan, header=PLAN_HEADER)
    return answers


def _of_largest(options: SweepOptions, devices: int) -> SolverOptions:
    """What is asked of the largest cluster; the headroom is taken off every cap in turn."""
    shared = {of.name for of in fields(SweepOptions)} & {of.name for of in fields(SolverOptions)}
    same = {name: getattr(options, name) for name in shared - {"devices", "mem", "headroom"}}
    return SolverOptions(devices=devices, mem=None if options.mem is None else max(texts.sizes(options.mem)), **same)
