"""`solve`: find the fastest plan for each given number of devices. `sweep`: find the smallest cluster."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from planner import files
from planner.api import texts
from planner.api.defaults import AUTO, default_batch_note, headroom_of
from planner.api.keywords import profile_command
from planner.api.notebooks import enable_notebook_display
from planner.api.option import ignore_arguments, option_values
from planner.api.options.solving import SolveOptions, SolverOptions, SweepOptions
from planner.api.reading import NOWHERE, AnyProfile, ProfileSource, path_of, profile_of, profile_reference
from planner.api.schedule_file import schedule_file_path
from planner.core.errors import InfeasibleError, UsageError
from planner.core.extras import install_command
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.core.values.sweep import Sweep
from planner.core.values.units import pluralize
from planner.solve.deadline import SearchObserver

if TYPE_CHECKING:
    from planner.solve.request import Request

enable_notebook_display(Sweep)

PLAN_HEADER = """\
Made by `gpipe-plan solve`. You may edit balance, stages[].recompute, micro_batches and micro_batch_size;
then run `gpipe-plan check`, which recomputes all other values from the profile."""


@profile_command(SolveOptions)
def solve(profile: AnyProfile, options: SolveOptions) -> Plan:
    """Find the plan with the smallest step time that fits: cuts, micro-batches, schedule and recomputation.

    Args:
        profile: A profile, or its file; or one file per tensor-parallel size, merged to `plan-profile.yaml`.
        options: Options of `solve`.

    Returns:
        The plan.

    Raises:
        InfeasibleError: No plan fits; the hint says what would fit.
        NoPlanFoundError: No plan was found that fits, but there may be one; the hint says what would fit.
        UsageError: The options contradict each other or the profile.
        FileError: The profile cannot be read, or the plan cannot be written.
        SolverError: No plan was found within the time limit.
    """
    if options.devices is not None:
        texts.parse_device_count(options.devices)  # refuses several numbers
    (plan,) = solve_family(profile, **option_values(options))
    return plan


@profile_command(SolveOptions)
def solve_family(profile: AnyProfile, options: SolveOptions) -> tuple[Plan, ...]:
    """Find a plan for each of several numbers of devices, for training that may lose devices.

    Plans are ordered from most to fewest devices. The first plan is written to `output`, the others next to it:
    `plan.yaml`, `plan-6.yaml`, `plan-4.yaml`. Files are written only if a plan was found for every number.

    Args:
        profile: A profile, or its file.
        options: Options of `solve`, with several numbers in `devices`.

    Returns:
        One plan per number of devices.

    Raises:
        InfeasibleError: For one of the numbers no plan fits; the hint says what would fit.
        UsageError: The options contradict each other or the profile.
        FileError: The profile cannot be read, or a plan cannot be written.
        SolverError: For one of the numbers no plan was found within the time limit.
    """
    counts = texts.parse_device_counts(options.devices) if options.devices is not None else ()
    output = path_of(options.output)
    source = _placed(profile_of(profile), output)
    paths = (None,) * max(1, len(counts)) if output is None else plan_paths(output, counts)
    plans: list[Plan] = []
    for path, count in zip(paths, counts or (None,), strict=True):
        _check_output(path, source, options)
        # The notes on the options are the same for all plans.
        of_count = replace(options, devices=count)
        if plans:
            of_count = replace(of_count, batch=plans[0].inputs.batch, note=ignore_arguments)
        try:
            plans.append(_solved(source, of_count, path))
        except InfeasibleError as error:
            if len(paths) == 1:
                raise
            raise InfeasibleError(f"with {pluralize(count or 0, 'device')}: {error.message}", hint=error.hint) from None
    if output is not None:
        _write_merged(source)
    for path, plan in zip(paths, plans, strict=True):
        if path is not None:
            files.write(path, plan, header=PLAN_HEADER)
    return tuple(plans)


def plan_paths(output: str, counts: Sequence[int]) -> tuple[str, ...]:
    """Return the path of the plan for each number of devices.

    Raises:
        UsageError: Several plans would be written to standard output.
    """
    if len(counts) < 2:
        return (output,)
    if output == "-":
        raise UsageError(
            f"{len(counts)} plans cannot be written to standard output", hint="name a file: `--output plan.yaml`"
        )
    path = Path(output)
    return (output, *(str(path.with_name(f"{path.stem}-{count}{path.suffix}")) for count in counts[1:]))


def merged_path(output: str) -> str:
    """Return the path for a merged profile, next to the plan `output`."""
    path = Path(output)
    return str(path.with_name(f"{path.stem}-profile.yaml"))


def _placed(source: ProfileSource, output: str | None) -> ProfileSource:
    if not source.merged or output in (None, NOWHERE):
        return source
    return replace(source, path=merged_path(str(output)))


def _write_merged(source: ProfileSource) -> None:
    if source.merged and source.path != NOWHERE:
        files.write(source.path, source.profile, header=f"Merged from {', '.join(source.merged)}.")


def _check_output(output: str | None, source: ProfileSource, options: SolveOptions) -> None:
    if output is not None:
        merged = {"the merged profile": source.path} if source.merged else {}
        profile_paths = source.merged or (source.path,)
        files.check_outputs({"--output": output, **merged}, (*profile_paths, *_files_of(options)))
        files.check_writable(output)


def _solved(source: ProfileSource, options: SolveOptions, output: str | None) -> Plan:
    # `planner.solve` is slow to import, and `--help` does not need it.
    from planner.api.solver_request import ineffective_options, request_of  # noqa: PLC0415
    from planner.core.cost.costs import CostTable  # noqa: PLC0415
    from planner.solve import solve as solve_plan  # noqa: PLC0415
    from planner.solve.methods import lacks_highs  # noqa: PLC0415

    profile = source.profile
    request = request_of(profile, profile_reference(source, output or NOWHERE), options)
    for text in ineffective_options(options, request.inputs):
        options.note(text)
    if options.batch is None:
        options.note(default_batch_note(profile, request.inputs.batch))
    share = request.inputs.headroom
    if share and options.headroom in (AUTO, None):
        otherwise = "" if options.headroom else "; `--headroom 0%` uses all memory"
        kept = f"headroom {100 * share:.4g}% of every memory limit"
        options.note(f"{kept}, as much as earlier predictions of this kind were too low{otherwise}")
    if CostTable(profile).is_split_backward_assumed and all(each.splits_backward for each in request.schedules):
        options.note(
            "the profile has no split backward times: each pass is assumed to take half of the backward, and saved "
            "activations are assumed to be held until the weight-gradient pass; profile on the device to measure them"
        )
    plan = solve_plan(profile, replace(request, watch=options.watch))
    if profile.model.batch_norm and plan.micro_batches > 1:
        options.note(
            f"batch normalization uses micro-batches of {pluralize(plan.micro_batch_size, 'sample')}, not the batch of "
            f"{plan.inputs.batch}; `--min-micro-batch 8` sets a smallest size"
        )
    if profile.proof is not None and profile.proof.uncovered and len(plan.stages) > 1:
        options.note(
            f"{pluralize(profile.proof.uncovered, 'cut')} of {len(profile.layers) - 1} were not compared with "
            "the unpartitioned model; `gpipe-plan verify` compares the cuts of this plan"
        )
    if plan.solver.status == "feasible" and lacks_highs(request.schedules):
        options.note(
            "highspy is not installed; with it the gap may be smaller and the plan faster "
            f"(`{install_command('milp')}`)"
        )
    return files.with_seal(_with_details(profile, request, plan, options))


def _with_details(profile: Profile, request: "Request", plan: Plan, options: SolveOptions) -> Plan:
    from planner.solve.questions.insight import frontier_of, insight_of  # noqa: PLC0415 - slow to import
    from planner.solve.questions.trade_off import figures_by_schedule  # noqa: PLC0415

    is_stopped = options.watch.is_stopped
    # `on_plan` of the observer is only for plans of the request itself.
    request = replace(request, watch=SearchObserver(is_stopped=is_stopped))
    if options.frontier and not is_stopped():
        points = frontier_of(profile, request, plan)
        schedules = figures_by_schedule(profile, plan, micro_batches=request.micro_batches, watch=request.watch)
        # The last points may not have been searched to the end.
        plan = plan if is_stopped() else replace(plan, frontier=points, schedules=schedules)
    if options.explain and not is_stopped():
        insight = insight_of(profile, request, plan)
        plan = plan if is_stopped() else replace(plan, insight=insight)
    return plan


def _files_of(options: SolveOptions) -> tuple[str | None, ...]:
    cuts = path_of(options.balance)
    is_file = cuts is not None and not cuts[:1].isdigit()
    return (
        path_of(options.links),
        path_of(options.calibration),
        cuts if is_file else None,
        schedule_file_path(options.schedule),
    )


@profile_command(SweepOptions)
def sweep(profile: AnyProfile, options: SweepOptions) -> Sweep:
    """Find the best plan for every device count and memory limit.

    Args:
        profile: A profile, or its file.
        options: Options of `sweep`.

    Returns:
        The table of plans.

    Raises:
        UsageError: The options contradict each other or the profile.
        FileError: The profile cannot be read, or a plan cannot be written.
    """
    from planner.api.solver_request import request_of  # noqa: PLC0415 - slow to import
    from planner.solve.questions.sweep import sweep_of  # noqa: PLC0415

    schedule_path = schedule_file_path(options.schedule)
    if schedule_path is not None:
        raise UsageError(
            f"`sweep` tries several numbers of devices, but `--schedule {schedule_path}` is for one",
            hint=f"use `gpipe-plan solve --schedule {schedule_path}`",
        )
    counts, nodes = _sizes(options)
    source, output = profile_of(profile), path_of(options.output)
    if output is not None:
        files.check_writable(str(Path(output, "1x1GB.yaml")))
    place = profile_reference(source, NOWHERE if output is None else str(Path(output, "plan.yaml")))
    request = request_of(source.profile, place, _options_of_largest_cluster(options, max(counts), nodes))
    if options.batch is None:
        options.note(default_batch_note(source.profile, request.inputs.batch))
    limits = request.inputs.memory_bytes[:1] if options.mem is None else texts.parse_sizes_bytes("--mem", options.mem)
    share = headroom_of(options.headroom, source.profile, limits)
    answers = sweep_of(
        source.profile, request, devices=counts, memory_bytes=limits, headroom=share, progress=options.progress
    )
    if output is not None:
        plans = {str(Path(output, cell.file_name)): cell.plan for cell in answers.cells if cell.plan is not None}
        files.check_outputs({name: name for name in plans}, (source.path,))
        for name, plan in plans.items():
            files.write(name, plan, header=PLAN_HEADER)
    return answers


def _sizes(options: SweepOptions) -> tuple[tuple[int, ...], str | None]:
    if options.nodes is None:
        return texts.parse_integers("--devices", options.devices or "1,2,4,8"), None
    if options.devices is not None:
        raise UsageError(f"`--devices {options.devices}` and `--nodes {options.nodes}`: give one of them")
    clusters = [texts.parse_node_counts(each) for each in options.nodes.split(",")]
    if len({each for _, each in clusters}) > 1:
        raise UsageError(
            f"`--nodes {options.nodes}`: nodes have different numbers of devices",
            hint="try other numbers of equal nodes: `--nodes 1x8,2x8,4x8`",
        )
    largest = max(clusters)
    return tuple(count * each for count, each in clusters), f"{largest[0]}x{largest[1]}"


def _options_of_largest_cluster(options: SweepOptions, devices: int, nodes: str | None) -> SolverOptions:
    # The headroom is 0, because `sweep_of` subtracts it from each memory limit.
    shared = {of.name for of in fields(SweepOptions)} & {of.name for of in fields(SolverOptions)}
    same = {name: getattr(options, name) for name in shared - {"devices", "nodes", "mem", "headroom"}}
    mem = None if options.mem is None else max(texts.parse_sizes_bytes("--mem", options.mem))
    return SolverOptions(devices=devices, nodes=nodes, mem=mem, headroom="0%", **same)
