"""Best plans for clusters with several numbers of equal devices, from few searches.

If the best plan of a larger cluster fits a smaller one, it is also the best plan there, because the smaller cluster
allows fewer plans. If no plan fits the larger cluster, none fits the smaller one. Larger clusters are solved first, and
a search is skipped if its answer is already known.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.core.cost.width import CostTablesByWidth, tensor_parallel_widths
from planner.core.cost.workload import SampleWork, training_run, workload_of
from planner.core.errors import InfeasibleError, SolverError
from planner.core.values.plan import Plan, memory_limit_of_device
from planner.core.values.profile import Profile
from planner.core.values.sweep import Sweep, SweepCell
from planner.solve.request import Request
from planner.solve.search import solve

SweepCallback = Callable[[str, int, int], None]

_Answer = Plan | InfeasibleError | SolverError


def sweep_of(
    profile: Profile,
    request: Request,
    *,
    devices: Sequence[int],
    memory_bytes: Sequence[int],
    headroom: float = 0.0,
    progress: SweepCallback = lambda *_: None,
) -> Sweep:
    """Return the best plan for every combination of a number of devices and a memory limit.

    Args:
        profile: The profile to plan for.
        request: Request with all other inputs; its own devices and memory limits are ignored.
        devices: Numbers of devices to plan for.
        memory_bytes: Memory limits per device to plan for, in bytes.
        headroom: Share of each memory limit that is kept free.
        progress: Called before each combination is solved, with its name (such as `4 x 80 GB`), the number of solved
            combinations, and the number of all combinations.

    Raises:
        UsageError: The request contradicts itself or the profile.
    """
    counts, limits = sorted(set(devices)), sorted(set(memory_bytes))
    tables = CostTablesByWidth(profile)
    answers: dict[tuple[int, int], _Answer] = {}
    for count in reversed(counts):
        for limit in reversed(limits):
            progress(f"{count} x {limit / 1e9:g} GB", len(answers), len(counts) * len(limits))
            # A pipeline has no use for more devices than layers, or groups of GPUs.
            widest = max((width for width in tensor_parallel_widths(profile) if width <= count), default=1)
            most = len(profile.layers) * widest * request.inputs.replicas or count
            question = _question(request, min(count, most), limit, headroom)
            larger = _answer_of_larger(answers, question, (count, limit))
            answers[count, limit] = _solved(profile, question, tables) if larger is None else larger
    workload = workload_of(profile)
    cells = tuple(_cell(count, limit, answers[count, limit], workload) for count in counts for limit in limits)
    return Sweep(
        profile=request.inputs.profile,
        batch=request.inputs.batch,
        devices=tuple(counts),
        memory_bytes=tuple(limits),
        cells=cells,
        smallest=next((n for n, cell in enumerate(cells) if cell.plan is not None), None),
        cheapest=_cheapest(cells),
    )


def _cheapest(cells: Sequence[SweepCell]) -> int | None:
    with_plan = [n for n, cell in enumerate(cells) if cell.plan is not None]
    return max(with_plan, key=lambda n: cells[n].samples_per_device_s, default=None)


def _question(request: Request, devices: int, limit: int, headroom: float) -> Request:
    usable = (memory_limit_of_device(limit, headroom),) * devices
    return replace(request, inputs=replace(request.inputs, devices=devices, memory_bytes=usable, headroom=headroom))


def _answer_of_larger(
    answers: dict[tuple[int, int], _Answer], question: Request, size: tuple[int, int]
) -> _Answer | None:
    inputs = question.inputs
    for (devices, limit), answer in answers.items():
        if devices < size[0] or limit < size[1]:
            continue
        if isinstance(answer, InfeasibleError):
            return answer
        limit_bytes = inputs.memory_bytes[0]
        if (
            isinstance(answer, Plan)
            and answer.num_gpus <= inputs.devices
            and max(answer.peak_bytes_by_device()) <= limit_bytes
        ):
            stages = tuple(replace(stage, memory_bytes=limit_bytes) for stage in answer.stages)
            return replace(answer, inputs=inputs, stages=stages)
    return None


def _solved(profile: Profile, request: Request, tables: CostTablesByWidth) -> _Answer:
    try:
        return solve(profile, request, tables=tables)
    except (InfeasibleError, SolverError) as error:
        return error


def _cell(devices: int, limit: int, answer: _Answer, workload: SampleWork) -> SweepCell:
    if not isinstance(answer, Plan):
        return SweepCell(
            devices=devices, memory_bytes=limit, status="none" if isinstance(answer, InfeasibleError) else "unknown"
        )
    step_us = answer.predicted.step_us
    return SweepCell(
        devices=devices,
        memory_bytes=limit,
        status="optimal" if answer.solver.status == "optimal" else "feasible",
        samples_per_device_s=answer.predicted.samples_per_s / devices,
        training=training_run(answer.inputs, step_us, workload, devices=devices),
        # The plan may come from a larger cluster, so its training cost is computed for this cluster.
        plan=replace(answer, training=training_run(answer.inputs, step_us, workload)),
    )
