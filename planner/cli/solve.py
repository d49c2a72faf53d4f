"""`gpipe-plan solve`: the fastest plan under the caps."""

import time
from dataclasses import replace
from typing import Annotated

import typer

from planner import api, files
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, Format, Quiet, check_format
from planner.cli.plans import events_of
from planner.core.schedule import SCHEDULES
from planner.core.values.cluster import Link
from planner.core.values.plan import DEFAULT_SCHEDULE, Inputs, Plan
from planner.core.values.profile import Profile
from planner.core.values.units import bytes_option, format_bytes, format_rate, format_us, parse_us
from planner.show import plan_text
from planner.show.views.numbers import percent

__all__ = ["solve"]


def solve(
    profile: Annotated[
        str, typer.Argument(metavar="PROFILE", help="The profile; `-` is standard input.")
    ] = "profile.yaml",
    devices: Annotated[int | None, typer.Option(metavar="N", help="Devices there are; the plan may use fewer.")] = None,
    mem: Annotated[
        str | None, typer.Option(metavar="8GB", help="Memory cap per device, or one each: 24GB,24GB,80GB.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="B", help="Samples per optimizer step; default: the largest profiled size.")
    ] = None,
    micro_batches: Annotated[str, typer.Option(metavar="auto|M", help="How many micro-batches.")] = "auto",
    speed: Annotated[
        str | None, typer.Option(metavar="1,1,2.5", help="How many times faster than the profiled device each is.")
    ] = None,
    schedule: Annotated[
        str, typer.Option(metavar="gpipe|1f1b|interleaved|auto", help="In which order micro-batches run.")
    ] = DEFAULT_SCHEDULE,
    chunks: Annotated[
        str, typer.Option(metavar="auto|V", help="Stages per device of the interleaved schedule.")
    ] = "auto",
    replicas: Annotated[
        str, typer.Option(metavar="auto|R", help="Pipelines side by side, which share the batch and the devices.")
    ] = "1",
    recompute: Annotated[
        str,
        typer.Option(
            metavar="auto|never|except-last|always|layers",
            help="Recompute activations in backward; `layers`: layer by layer where that is better.",
        ),
    ] = "auto",
    link_: Annotated[
        str | None,
        typer.Option(
            "--link", metavar="25GB/s,5us", help="Links between neighbours; `,blocking` if they do not overlap."
        ),
    ] = None,
    links: Annotated[
        str | None, typer.Option(metavar="FILE", help="Links as `profile-links` measured them, one by one.")
    ] = None,
    nodes: Annotated[str | None, typer.Option(metavar="4x8", help="4 nodes of 8 devices, in pipeline order.")] = None,
    inter_link: Annotated[
        str | None, typer.Option(metavar="25GB/s,10us", help="Links between nodes; `--link` is then within a node.")
    ] = None,
    allreduce: Annotated[
        str | None, typer.Option(metavar="100GB/s,10us", help="What replicas sum their gradients over.")
    ] = None,
    overhead: Annotated[
        str | None, typer.Option(metavar="1ms", help="Executor's time per micro-batch, stage and direction.")
    ] = None,
    reserve: Annotated[
        str | None, typer.Option(metavar="500MB", help="Kept free on every device; default: as calibrated or measured.")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What `verify` measured of this machine: link, overhead and more."),
    ] = None,
    headroom: Annotated[str, typer.Option(metavar="5%", help="Share of every cap kept free.")] = "0%",
    balance: Annotated[
        str | None, typer.Option(metavar="6,6,6,6|FILE", help="Judge these cuts instead of searching.")
    ] = None,
    together: Annotated[
        list[str] | None, typer.Option(metavar="A,B", help="Layers that must be in one stage; may be repeated.")
    ] = None,
    apart: Annotated[
        list[str] | None, typer.Option(metavar="A,B", help="Layers of which no two may be in one stage; likewise.")
    ] = None,
    solver: Annotated[
        str, typer.Option(metavar="auto|dp|milp", help="Dynamic programme, or integer programme as a second opinion.")
    ] = "auto",
    time_limit: Annotated[
        str | None, typer.Option(metavar="60s", help="Then give the best plan found, with its proven gap.")
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to write.")] = "plan.yaml",
    format_: Format = "text",
    *,
    devices_any_order: Annotated[
        bool, typer.Option("--devices-any-order", help="Unlike devices may take any place in the pipeline.")
    ] = False,
    frontier: Annotated[bool, typer.Option("--frontier", help="Show the best plan for every M.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show what binds, what would help, and what noise does to the plan.")
    ] = False,
    extrapolate: Annotated[bool, typer.Option("--extrapolate", help="Allow unprofiled micro-batch sizes.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Find the stage boundaries, micro-batches and recomputation with the smallest step time that fits."""
    console = Console(quiet=quiet)
    as_json = check_format(format_)
    cuts = balance if balance is not None and not balance[:1].isdigit() else None
    read = files.read_profile(profile)
    files.check_outputs({"--output": output}, (profile, links, calibration, cuts))
    files.check_writable(output)
    if batch is None:
        largest = max(read.micro_batch_sizes)
        console.note(f"note: no `--batch`: planning for {largest} samples per step, the largest size profiled")
    began_s = time.monotonic()
    plan = api.solve(
        read,
        devices=devices,
        mem=mem,
        batch=batch,
        micro_batches=micro_batches,
        speed=speed,
        schedule=schedule,
        chunks=chunks,
        replicas=replicas,
        recompute=recompute,
        link=link_,
        links=links,
        nodes=nodes,
        inter_link=inter_link,
        allreduce=allreduce,
        overhead=overhead,
        reserve=reserve,
        calibration=calibration,
        headroom=headroom,
        balance=balance,
        together=together,
        apart=apart,
        solver=solver,
        time_limit=time_limit,
        devices_any_order=devices_any_order,
        frontier=frontier,
        explain=explain,
        extrapolate=extrapolate,
    )
    reference = replace(plan.inputs.profile, path=files.reference_path(profile, output))
    plan = replace(plan, inputs=replace(plan.inputs, profile=reference))
    if output == "-":
        console.result(files.dump(plan, as_json=as_json, header=api.PLAN_HEADER))
        return
    files.write(output, plan, header=api.PLAN_HEADER)
    text = files.dump(plan, as_json=True) if as_json else plan_text(plan, events_of(plan, read), style_for_stdout())
    console.result(text)
    _notes(console, plan.inputs, read, extrapolated=extrapolate)
    if not quiet and solver != "milp":
        fixed = None if micro_batches == "auto" else plan.micro_batches
        left_s = None if time_limit is None else parse_us(time_limit) / 1e6 - (time.monotonic() - began_s)
        _other_schedule(console, read, plan, fixed, left_s)
    if read.device.how == "estimated" and reserve is None and calibration is None:
        console.note(f"note: {_assumed_reserve(plan.inputs.reserve_bytes)}")
    console.note(f"wrote {output}")
    console.next("gpipe-plan emit" if output == "plan.yaml" else f"gpipe-plan emit {output}")


def _notes(console: Console, inputs: Inputs, profile: Profile, *, extrapolated: bool) -> None:
    for cap in sorted(set(inputs.memory_bytes)):
        console.note(f"note: cap {cap / 1e9:g} GB = {format_bytes(cap)} per device")
    if inputs.links:
        console.note(f"note: {len(inputs.links)} measured link{'s' * (len(inputs.links) > 1)}")
    if inputs.link != Link():
        kind = ", not overlapping with compute" if inputs.link.blocking else ""
        rate = format_rate(inputs.link.bytes_per_s) if inputs.link.bytes_per_s else "unlimited"
        console.note(f"note: link {rate}, {format_us(inputs.link.latency_us)}{kind}")
    if inputs.replicas != 1 and inputs.allreduce is None:
        console.note("note: no `--allreduce`: summing gradients over replicas is taken to cost nothing")
    if inputs.link == Link() and not inputs.links and profile.device.kind == "cuda":
        console.note("note: no `--link`: moving tensors between stages is taken to cost nothing")
    if extrapolated:
        console.warning("micro-batch sizes outside the profiled range are extrapolated: peaks may be under-estimated")


def _other_schedule(
    console: Console, profile: Profile, plan: Plan, micro_batches: int | None, left_s: float | None
) -> None:
    """Says what another schedule than the one asked for would give."""
    from planner.solve import MOST_HINT_S, faster_schedule  # noqa: PLC0415 - numpy only where plans are made

    limit_s = MOST_HINT_S if left_s is None else min(MOST_HINT_S, left_s)
    other = faster_schedule(profile, plan, micro_batches=micro_batches, time_limit_s=limit_s) if limit_s > 0 else None
    if other is not None:
        option = "--schedule auto" + (" --recompute auto" if plan.inputs.recompute == "layers" else "")
        less = percent(1 - other.predicted.step_us / plan.predicted.step_us)
        name, step = SCHEDULES[other.schedule].title, format_us(other.predicted.step_us)
        console.note(f"note: {name} would take {step}, {less} less: `{option}`")


def _assumed_reserve(reserve_bytes: int) -> str:
    if not reserve_bytes:
        return "nothing is kept free for the context and libraries of an estimated device: `--reserve 1GB` is a start"
    size = bytes_option(reserve_bytes)
    return f"reserve {size} per device, assumed and not measured; `--reserve` takes what you know of yours"
