"""`gpipe-plan solve`: the fastest plan under the caps."""

from dataclasses import replace
from typing import Annotated, cast, get_args

import typer

from planner import files
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, Format, Quiet, caps, check_format, integers, link, names, speeds
from planner.cli.plans import events_of, reference_path
from planner.core.cluster import ExecutorCost, Link
from planner.core.errors import UsageError
from planner.core.plan import Inputs, ProfileReference, RecomputePolicy, SchedulePolicy
from planner.core.precision import precision_of
from planner.core.profile import Profile
from planner.core.units import format_bytes, format_rate, format_us, parse_bytes, parse_share, parse_us
from planner.show import plan_text
from planner.solve import Request, Solver, frontier_of, insight_of
from planner.solve import solve as solve_plan

__all__ = ["solve"]


def solve(
    profile: Annotated[
        str, typer.Argument(metavar="[PROFILE]", help="The profile; `-` is standard input.")
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
    ] = "gpipe",
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
    reserve: Annotated[str, typer.Option(metavar="500MB", help="Kept free on every device.")] = "0B",
    headroom: Annotated[str, typer.Option(metavar="5%", help="Share of every cap kept free.")] = "0%",
    balance: Annotated[
        str | None, typer.Option(metavar="6,6,6,6", help="Judge these cuts instead of searching.")
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
    cuts = integers("--balance", balance) if balance is not None else None
    fixed = None if micro_batches == "auto" else _one("--micro-batches", micro_batches)
    share = parse_share(headroom)
    given_link = link(link_) if link_ is not None else None
    given_overhead_us = parse_us(overhead) if overhead is not None else None
    num_devices, node_devices = _devices(devices, nodes)
    policy = _schedule(schedule)
    read = files.read_profile(profile)
    executor = read.device.executor or ExecutorCost(overhead_us=0.0, link=Link())
    inputs = Inputs(
        profile=ProfileReference(path=reference_path(profile, output), digest=files.digest_of(read)),
        model_digest=read.model.digest,
        devices=num_devices,
        memory_bytes=tuple(int(cap * (1 - share)) for cap in _caps(mem, num_devices, read)),
        speeds=speeds(speed, num_devices) if speed is not None else (),
        batch=_batch(batch, read, console),
        link=executor.link if given_link is None else given_link,
        inter_link=link(inter_link, "--inter-link") if inter_link is not None else None,
        node_devices=node_devices,
        allreduce=link(allreduce, "--allreduce") if allreduce is not None else None,
        reserve_bytes=parse_bytes(reserve),
        overhead_us=executor.overhead_us if given_overhead_us is None else given_overhead_us,
        schedule=policy,
        chunks=_count_or_auto("--chunks", chunks) if policy in ("interleaved", "auto") else _no_chunks(chunks, policy),
        replicas=_count_or_auto("--replicas", replicas),
        together=tuple(names("--together", group) for group in together or ()),
        apart=tuple(names("--apart", group) for group in apart or ()),
        any_order=devices_any_order,
        recompute=_policy(recompute),
        optimizer=read.optimizer,
        dtype=precision_of(read.environment.dtype),
        extrapolate=extrapolate,
    )
    request = Request(
        inputs=inputs,
        micro_batches=fixed,
        balance=cuts,
        time_limit_s=parse_us(time_limit) / 1e6 if time_limit is not None else None,
        solver=_solver(solver),
    )
    plan = solve_plan(read, request)
    if frontier:
        plan = replace(plan, frontier=frontier_of(read, request))
    if explain:
        plan = replace(plan, insight=insight_of(read, request, plan))
    if output == "-":
        console.result(files.dump(plan, as_json=as_json, header=_HEADER))
        return
    files.write(output, plan, header=_HEADER)
    text = files.dump(plan, as_json=True) if as_json else plan_text(plan, events_of(plan, read), style_for_stdout())
    console.result(text)
    _notes(console, plan.inputs, read, extrapolated=extrapolate)
    console.note(f"wrote {output}")
    console.next("gpipe-plan emit" if output == "plan.yaml" else f"gpipe-plan emit {output}")


_HEADER = """\
Made by `gpipe-plan solve`. You may edit balance, stages[].recompute, and micro_batches with micro_batch_size by hand:
then run `gpipe-plan check`, which recomputes everything else from the profile."""


def _caps(text: str | None, devices: int, profile: Profile) -> tuple[int, ...]:
    if text is not None:
        return caps(text, devices)
    if profile.device.memory_bytes == 0:
        raise UsageError(
            f"the profile does not say how much memory its device has ({profile.device.kind})",
            hint="give the cap per device: `--mem 8GB`",
        )
    return (profile.device.memory_bytes,) * devices


def _devices(devices: int | None, nodes: str | None) -> tuple[int, int]:
    """How many devices there are, and how many in each node (0 where nodes make no difference)."""
    if nodes is None:
        if devices is None:
            raise UsageError("how many devices are there?", hint="`--devices 8`, or `--nodes 4x8`")
        if devices < 1:
            raise UsageError(f"`--devices {devices}`: at least 1 device is needed")
        return devices, 0
    count, _, each = nodes.partition("x")
    if not (count.isdecimal() and each.isdecimal() and int(count) and int(each)):
        raise UsageError(f"expected nodes times devices as in `--nodes 4x8`, got `--nodes {nodes}`")
    total = int(count) * int(each)
    if devices is not None and not 1 <= devices <= total:
        raise UsageError(f"`--devices {devices}`, but `--nodes {nodes}` has {total}", hint="leave `--devices` out")
    return total if devices is None else devices, int(each)


def _schedule(text: str) -> SchedulePolicy:
    if text not in get_args(SchedulePolicy):
        raise UsageError(f"unknown `--schedule {text}`", hint=f"one of {', '.join(get_args(SchedulePolicy))}")
    return cast("SchedulePolicy", text)


def _solver(text: str) -> Solver:
    if text not in get_args(Solver):
        raise UsageError(f"unknown `--solver {text}`", hint=f"one of {', '.join(get_args(Solver))}")
    return cast("Solver", text)


def _count_or_auto(option: str, text: str) -> int:
    """A count, or 0 where the solver may choose."""
    return 0 if text == "auto" else _one(option, text)


def _no_chunks(text: str, policy: SchedulePolicy) -> int:
    if text not in ("auto", "1"):
        raise UsageError(f"`--chunks {text}` needs `--schedule interleaved`, not `{policy}`")
    return 1


def _batch(batch: int | None, profile: Profile, console: Console) -> int:
    if batch is None:
        batch = max(profile.micro_batch_sizes)
        console.note(f"note: no `--batch`: planning for {batch} samples per step, the largest size profiled")
    if batch < 1:
        raise UsageError(f"`--batch {batch}`: at least 1 sample is needed")
    return batch


def _one(option: str, text: str) -> int:
    numbers = integers(option, text)
    if len(numbers) > 1:
        raise UsageError(f"expected one number, got `{option} {text}`")
    return numbers[0]


def _policy(text: str) -> RecomputePolicy:
    if text not in get_args(RecomputePolicy):
        raise UsageError(f"unknown `--recompute {text}`", hint=f"one of {', '.join(get_args(RecomputePolicy))}")
    return cast("RecomputePolicy", text)


def _notes(console: Console, inputs: Inputs, profile: Profile, *, extrapolated: bool) -> None:
    for cap in sorted(set(inputs.memory_bytes)):
        console.note(f"note: cap {cap / 1e9:g} GB = {format_bytes(cap)} per device")
    if inputs.link != Link():
        kind = ", not overlapping with compute" if inputs.link.blocking else ""
        rate = format_rate(inputs.link.bytes_per_s) if inputs.link.bytes_per_s else "unlimited"
        console.note(f"note: link {rate}, {format_us(inputs.link.latency_us)}{kind}")
    if inputs.replicas != 1 and inputs.allreduce is None:
        console.note("note: no `--allreduce`: summing gradients over replicas is taken to cost nothing")
    if inputs.link == Link() and profile.device.kind == "cuda":
        console.note("note: no `--link`: moving tensors between stages is taken to cost nothing")
    if extrapolated:
        console.warning("micro-batch sizes outside the profiled range are extrapolated: peaks may be under-estimated")
