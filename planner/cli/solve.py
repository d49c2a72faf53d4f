"""`gpipe-plan solve`: find the fastest plan that fits."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from types import FrameType
from typing import TYPE_CHECKING

from planner.api.option import option_values
from planner.api.options.solving import SolveOptions
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Format, Output, ProfileFiles, Quiet, check_format, with_options
from planner.core.schedule import SCHEDULES, schedule_of
from planner.core.values.cluster import Link
from planner.core.values.devices import training_device_kind
from planner.core.values.units import bytes_option, format_bytes, format_us, pluralize

if TYPE_CHECKING:
    from planner.api.reading import ProfileSource
    from planner.core.judge.certainty import Certainty
    from planner.core.values.plan import Plan, ScheduleName
    from planner.core.values.profile import Profile

_MUCH_RECOMPUTED = 0.02
"""Smallest share of recomputation in the compute time for which a note suggests `--recompute layers`."""

_LITTLE_SLOWER = 0.02
"""Largest relative increase of the step time for which a note suggests a simpler schedule."""


@with_options(SolveOptions)
def solve(
    options: SolveOptions,
    profile: ProfileFiles = ["profile.yaml"],  # noqa: B006 - typer needs a list
    output: Output = "plan.yaml",
    format_: Format = "text",
    *,
    quiet: Quiet = False,
) -> None:
    """Find the fastest plan that fits: cuts, micro-batches, schedule and recomputation."""
    from planner import files
    from planner.api.reading import profile_of
    from planner.api.solving import PLAN_HEADER, merged_path, plan_paths
    from planner.api.texts import parse_device_counts
    from planner.core.cost.evaluate import Evaluation
    from planner.core.judge.certainty import certainty_of, tight_findings
    from planner.show.terminal.plan import plan_text
    from planner.solve.deadline import SearchObserver

    console = Console(quiet=quiet)
    as_json = check_format(format_)
    source = profile_of(profile)
    options = replace(
        options, output=None if output == "-" else output, note=lambda text: console.note(f"note: {text}")
    )
    paths = plan_paths(output, () if options.devices is None else parse_device_counts(options.devices))
    began_s = time.monotonic()
    with console.progress("solving", announces=False) as show, _stopped_by_interrupt() as is_stopped:
        show("", 0, 0)
        line = _BestPlanLine(show)
        watch = SearchObserver(is_stopped=line.show_when_polled(is_stopped), on_plan=line.update)
        plans = _plans(source, replace(options, watch=watch))
    plan = plans[0]
    if is_stopped():
        console.note("note: interrupted: this is the best plan that was found so far")
    if output == "-":
        console.result(files.dump(plan, as_json=as_json, header=PLAN_HEADER))
        return
    source_profile = source.profile
    certainty = certainty_of(plan, source_profile)
    if as_json:
        console.result(files.json_text(plan if len(plans) == 1 else plans))
    else:
        shown = plan if quiet or is_stopped() else _with_schedule_figures(source_profile, plan, options)
        console.result(
            plan_text(shown, Evaluation.of(plan, source_profile).events, style_for_stdout(), certainty=certainty)
        )
        for smaller in plans[1:]:
            console.result(_in_a_line(smaller, certainty_of(smaller, source_profile)))
        _note_simpler_schedule(console, shown)
    for finding in tight_findings(plan, certainty):
        console.warning(f"{finding.message}: {finding.hint}")
    _notes(console, plan, source_profile, extrapolated=options.extrapolate)
    if not quiet and not is_stopped():
        _note_faster_plans(console, plan, source_profile, options, spent_s=time.monotonic() - began_s)
    if source_profile.device.how == "estimated" and options.reserve is None and options.calibration is None:
        console.note(f"note: {_assumed_reserve(plan)}")
    merged = [merged_path(output)] if source.merged else []
    console.note(f"wrote {', '.join((*paths, *merged))}")
    emit_format = _format(plan, source_profile)
    # Smaller plans are for train.py only.
    number = 1 if emit_format else len(plans)
    console.note(f"next: {_emit_line(plans[:number], paths[:number])}{emit_format}")


@contextmanager
def _stopped_by_interrupt() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after the first Ctrl-C. A second Ctrl-C interrupts as usual."""
    is_stopped = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal is_stopped
        is_stopped = True
        signal.signal(signal.SIGINT, before)

    if threading.current_thread() is not threading.main_thread():
        yield lambda: is_stopped
        return
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, stop)
    try:
        yield lambda: is_stopped
    finally:
        signal.signal(signal.SIGINT, before)


def _plans(source: "ProfileSource", options: SolveOptions) -> "tuple[Plan, ...]":
    import planner
    from planner.core.errors import SolverError

    try:
        return planner.solve_family(source, **option_values(options))
    except SolverError:
        if options.watch.is_stopped():
            raise KeyboardInterrupt from None
        raise


class _BestPlanLine:
    def __init__(self, show: Callable[[str, int, int], None]) -> None:
        self._show, self._step_us, self._text, self._shown_s = show, inf, "no plan found yet", time.monotonic()

    def show_when_polled(self, is_stopped: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that calls `is_stopped` and, at most once a second, shows the best-plan line again."""

        def repeated() -> bool:
            if time.monotonic() - self._shown_s >= 1:
                self._shown_s = time.monotonic()
                self._show(self._text, 0, 0)
            return is_stopped()

        return repeated

    def update(self, step_us: float, schedule: "ScheduleName", least_us: float) -> None:
        from planner.show.views.numbers import percent

        if step_us < self._step_us:
            self._step_us = step_us
            gap = percent(max(0.0, 1 - least_us / step_us)) if step_us else percent(0.0)
            self._text = f"best step {format_us(step_us)}, {schedule_of(schedule).title}, gap at most {gap}"
        self._show(self._text, 0, 0)


def _in_a_line(plan: "Plan", certainty: "Certainty") -> str:
    from planner.show.views.plan import plan_headline, step_rate_bubble_words

    step, speed, bubble = step_rate_bubble_words(plan, certainty)
    return f"{pluralize(plan.inputs.devices, 'device')}: {plan_headline(plan)}, {step}, {speed}, {bubble}"


def _emit_line(plans: "Sequence[Plan]", paths: Sequence[str]) -> str:
    words = ["gpipe-plan emit"] + [paths[0]] * (paths[0] != "plan.yaml")
    fewest = plans[0].num_gpus
    for plan, path in zip(plans[1:], paths[1:], strict=True):
        if plan.num_gpus < fewest:
            fewest = plan.num_gpus
            words.append(f"--smaller {path}")
    return " ".join(words)


def _format(plan: "Plan", profile: "Profile") -> str:
    from planner.core.errors import UsageError
    from planner.emit.layout import PlanLayout
    from planner.emit.megatron import MEGATRON_SCHEDULES
    from planner.emit.torchtitan import emit_torchtitan

    if "formula" not in profile.model.settings:
        return " --format torchtitan" if plan.shards_optimizer or plan.tensor_parallel > 1 else ""
    if any(layer.name.startswith("decoder_") for layer in profile.layers):  # Megatron-LM has decoders only
        return " --format csv"
    if plan.schedule in {schedule.name for schedule in MEGATRON_SCHEDULES}:
        return " --format megatron"
    # torchtitan reads any order of actions from a file, but cannot cut the layers of every formula.
    try:
        emit_torchtitan(PlanLayout.of(plan, profile))
    except UsageError:
        return " --format megatron"
    return " --format torchtitan"


def _notes(console: Console, plan: "Plan", profile: "Profile", *, extrapolated: bool) -> None:
    from planner.show.views.numbers import link_description, percent
    from planner.show.views.plan import gpu_noun

    inputs, node_devices = plan.inputs, plan.cluster.node_devices
    for limit in sorted(set(inputs.memory_bytes)):
        console.note(f"note: memory limit {limit / 1e9:g} GB = {format_bytes(limit)} per {gpu_noun(plan)}")
    if inputs.links:
        console.note(f"note: {pluralize(len(inputs.links), 'measured link')}")
    if inputs.link != Link():
        console.note(f"note: link {link_description(inputs.link)}")
    # Pipelines occupy consecutive devices: they are within nodes if each node holds whole ones.
    spans_nodes = 0 < node_devices < plan.num_devices * plan.replicas and node_devices % plan.num_devices
    if spans_nodes and inputs.inter_link is None and inputs.link != Link():
        console.note("note: no `--inter-link`: links between nodes are assumed to be as fast as within a node")
    if inputs.replicas != 1 and inputs.allreduce is None:
        console.note("note: no `--allreduce`: summing gradients over replicas is assumed to cost nothing")
    if plan.replicas > 1 and not inputs.shard_optimizer and profile.device.how == "estimated":
        console.note(
            "note: every replica has the whole optimizer; with `--shard-optimizer` they divide it (ZeRO stage 1)"
        )
    if inputs.link == Link() and not inputs.links and training_device_kind(profile.device.kind) != "cpu":
        console.note("note: no `--link`: transfers between stages are assumed to cost nothing")
    share = plan.predicted.recompute_share
    if inputs.recompute == "auto" and share >= _MUCH_RECOMPUTED and profile.device.how != "compiled":
        console.note(
            f"note: recomputing whole stages takes {percent(share)} of the compute time; `--recompute layers` "
            "recomputes only some layers, which may be faster, but takes longer to solve"
        )
    if extrapolated:
        console.warning("micro-batch sizes outside the profiled range are extrapolated: peaks may be underestimated")


def _with_schedule_figures(profile: "Profile", plan: "Plan", options: SolveOptions) -> "Plan":
    from planner.solve.questions.trade_off import figures_by_schedule

    if plan.schedules:
        return plan
    fixed = _fixed_micro_batches(plan, options)
    return replace(plan, schedules=figures_by_schedule(profile, plan, micro_batches=fixed, is_short_search=True))


def _fixed_micro_batches(plan: "Plan", options: SolveOptions) -> int | None:
    return None if options.micro_batches == "auto" else plan.micro_batches


def _note_faster_plans(
    console: Console, plan: "Plan", profile: "Profile", options: SolveOptions, *, spent_s: float
) -> None:
    from planner.api.texts import parse_duration_s
    from planner.show.views.plan import gpu_noun
    from planner.solve.questions.faster import MOST_HINT_S, find_faster_schedule_plan, plan_with_replicas

    fixed = _fixed_micro_batches(plan, options)
    left_s = MOST_HINT_S
    if options.time_limit is not None:
        left_s = min(left_s, parse_duration_s("--time-limit", options.time_limit) - spent_s)
    other = plan_with_replicas(profile, plan, micro_batches=fixed) if options.time_limit is None else None
    if other is not None:
        what = f"{other.replicas} replicas on {other.num_gpus} of {pluralize(plan.inputs.devices, gpu_noun(other))}"
        free = "" if plan.inputs.allreduce else ", if summing gradients costs nothing (`--allreduce`)"
        console.note(f"note: {what} would take {_less(plan, other)}{free}: `--replicas auto`")
    other = None
    if options.solver != "milp" and left_s > 0:
        other = find_faster_schedule_plan(profile, plan, micro_batches=fixed, time_limit_s=left_s)
    if other is not None:
        console.note(f"note: {schedule_of(other.schedule).title} would take {_less(plan, other)}: `--schedule auto`")


def _less(plan: "Plan", other: "Plan") -> str:
    from planner.show.views.numbers import percent

    less = percent(1 - other.predicted.step_us / plan.predicted.step_us)
    return f"{format_us(other.predicted.step_us)}, {less} less"


def _note_simpler_schedule(console: Console, plan: "Plan") -> None:
    from planner.show.views.numbers import percent

    names = list(SCHEDULES)
    own = names.index(plan.schedule) if plan.schedule in names else len(names)
    most_us = plan.predicted.step_us * (1 + _LITTLE_SLOWER)
    fast = [point for point in plan.schedules if point.fits and point.step_us <= most_us]
    for point in fast if not plan.inputs.simplest else []:
        if point.schedule in names[:own]:
            more = percent(point.step_us / plan.predicted.step_us - 1)
            name, step = schedule_of(point.schedule).title, format_us(point.step_us)
            console.note(f"note: {name}, a simpler schedule, would take {step}, {more} more: `--simplest 2%`")
            return


def _assumed_reserve(plan: "Plan") -> str:
    from planner.show.views.plan import gpu_noun

    if not plan.inputs.reserve_bytes:
        return "no memory is reserved for context and libraries of the estimated device: try `--reserve 1GB`"
    size = bytes_option(plan.inputs.reserve_bytes)
    return f"reserve of {size} per {gpu_noun(plan)} is assumed, not measured; `--reserve` changes it"
