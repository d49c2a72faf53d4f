"""`gpipe-plan solve`: the fastest plan under the caps."""

import time
from dataclasses import replace

from planner import api, files
from planner.api.options import SolveOptions, values_of
from planner.api.reading import profile_of
from planner.api.solving import PLAN_HEADER, faster_schedule_for, with_schedules
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, Format, Output, ProfileFile, Quiet, check_format
from planner.cli.plans import events_of
from planner.cli.records import with_options
from planner.core.schedule import schedule_of
from planner.core.values.cluster import Link
from planner.core.values.devices import training_kind
from planner.core.values.plan import Inputs, Plan
from planner.core.values.profile import Profile
from planner.core.values.units import bytes_option, counted, format_bytes, format_rate, format_us
from planner.show import plan_text
from planner.show.views.numbers import percent


@with_options(SolveOptions)
def solve(
    options: SolveOptions,
    profile: ProfileFile = "profile.yaml",
    output: Output = "plan.yaml",
    format_: Format = "text",
    *,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Find the stage boundaries, micro-batches and recomputation with the smallest step time that fits."""
    console = Console(quiet=quiet)
    as_json = check_format(format_)
    source = profile_of(profile)
    options = replace(
        options, output=None if output == "-" else output, note=lambda text: console.note(f"note: {text}")
    )
    began_s = time.monotonic()
    plan = api.solve(source, **values_of(options))
    if output == "-":
        console.result(files.dump(plan, as_json=as_json, header=PLAN_HEADER))
        return
    read = source.profile
    if as_json:
        console.result(files.json_text(plan))
    else:
        shown = plan if quiet else with_schedules(read, plan, options)
        console.result(plan_text(shown, events_of(plan, read), style_for_stdout()))
    _notes(console, plan.inputs, read, extrapolated=options.extrapolate)
    if not quiet:
        _faster(console, plan, faster_schedule_for(read, plan, options, spent_s=time.monotonic() - began_s))
    if read.device.how == "estimated" and options.reserve is None and options.calibration is None:
        console.note(f"note: {_assumed_reserve(plan.inputs.reserve_bytes)}")
    console.note(f"wrote {output}")
    console.next("gpipe-plan emit" if output == "plan.yaml" else f"gpipe-plan emit {output}")


def _notes(console: Console, inputs: Inputs, profile: Profile, *, extrapolated: bool) -> None:
    for cap in sorted(set(inputs.memory_bytes)):
        console.note(f"note: cap {cap / 1e9:g} GB = {format_bytes(cap)} per device")
    if inputs.links:
        console.note(f"note: {counted(len(inputs.links), 'measured link')}")
    if inputs.link != Link():
        kind = ", not overlapping with compute" if inputs.link.blocking else ""
        rate = format_rate(inputs.link.bytes_per_s) if inputs.link.bytes_per_s else "unlimited"
        console.note(f"note: link {rate}, {format_us(inputs.link.latency_us)}{kind}")
    if inputs.replicas != 1 and inputs.allreduce is None:
        console.note("note: no `--allreduce`: summing gradients over replicas is taken to cost nothing")
    if inputs.link == Link() and not inputs.links and training_kind(profile.device.kind) != "cpu":
        console.note("note: no `--link`: moving tensors between stages is taken to cost nothing")
    if extrapolated:
        console.warning("micro-batch sizes outside the profiled range are extrapolated: peaks may be under-estimated")


def _faster(console: Console, plan: Plan, other: Plan | None) -> None:
    """Says what another schedule than the one asked for would give."""
    if other is not None:
        option = "--schedule auto" + (" --recompute auto" if plan.inputs.recompute == "layers" else "")
        less = percent(1 - other.predicted.step_us / plan.predicted.step_us)
        name, step = schedule_of(other.schedule).title, format_us(other.predicted.step_us)
        console.note(f"note: {name} would take {step}, {less} less: `{option}`")


def _assumed_reserve(reserve_bytes: int) -> str:
    if not reserve_bytes:
        return "nothing is kept free for the context and libraries of an estimated device: `--reserve 1GB` is a start"
    size = bytes_option(reserve_bytes)
    return f"reserve {size} per device, assumed and not measured; `--reserve` takes what you know of yours"
