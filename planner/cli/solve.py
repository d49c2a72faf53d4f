"""`gpipe-plan solve`: the fastest plan under the caps."""

from typing import Annotated, cast, get_args

import typer

from planner import files
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, Format, Quiet, caps, check_format, integers, link
from planner.cli.plans import events_of, reference_path
from planner.core.cluster import ExecutorCost, Link
from planner.core.errors import UsageError
from planner.core.plan import Inputs, ProfileReference, RecomputePolicy
from planner.core.profile import Profile
from planner.core.units import format_bytes, format_rate, format_us, parse_bytes, parse_share, parse_us
from planner.show import plan_text
from planner.solve import Request
from planner.solve import solve as solve_plan

__all__ = ["solve"]


def solve(
    profile: Annotated[
        str, typer.Argument(metavar="[PROFILE]", help="The profile; `-` is standard input.")
    ] = "profile.yaml",
    devices: Annotated[int, typer.Option(metavar="K", help="Devices in the pipeline; the plan may use fewer.")] = ...,  # type: ignore[assignment]
    mem: Annotated[
        str | None, typer.Option(metavar="8GB", help="Memory cap per device, or one each: 24GB,24GB,80GB.")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="B", help="Samples per optimizer step; default: the largest profiled size.")
    ] = None,
    micro_batches: Annotated[str, typer.Option(metavar="auto|M", help="How many micro-batches.")] = "auto",
    recompute: Annotated[
        str, typer.Option(metavar="auto|never|except-last|always", help="Recompute activations in backward.")
    ] = "auto",
    link_: Annotated[
        str | None,
        typer.Option(
            "--link", metavar="25GB/s,5us", help="Links between neighbours; `,blocking` if they do not overlap."
        ),
    ] = None,
    overhead: Annotated[
        str | None, typer.Option(metavar="1ms", help="Executor's time per micro-batch, stage and direction.")
    ] = None,
    reserve: Annotated[str, typer.Option(metavar="500MB", help="Kept free on every device.")] = "0B",
    headroom: Annotated[str, typer.Option(metavar="5%", help="Share of every cap kept free.")] = "0%",
    balance: Annotated[
        str | None, typer.Option(metavar="6,6,6,6", help="Judge these cuts instead of searching.")
    ] = None,
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to write.")] = "plan.yaml",
    format_: Format = "text",
    *,
    extrapolate: Annotated[bool, typer.Option("--extrapolate", help="Allow unprofiled micro-batch sizes.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Find the stage boundaries, micro-batches and recomputation with the smallest step time that fits."""
    console = Console(quiet=quiet)
    as_json = check_format(format_)
    if devices < 1:
        raise UsageError(f"`--devices {devices}`: at least 1 device is needed")
    cuts = integers("--balance", balance) if balance is not None else None
    fixed = None if micro_batches == "auto" else _one("--micro-batches", micro_batches)
    share = parse_share(headroom)
    given_link = link(link_) if link_ is not None else None
    given_overhead_us = parse_us(overhead) if overhead is not None else None
    read = files.read_profile(profile)
    executor = read.device.executor or ExecutorCost(overhead_us=0.0, link=Link())
    inputs = Inputs(
        profile=ProfileReference(path=reference_path(profile, output), digest=files.digest_of(read)),
        model_digest=read.model.digest,
        devices=devices,
        memory_bytes=tuple(int(cap * (1 - share)) for cap in _caps(mem, devices, read)),
        batch=_batch(batch, read, console),
        link=executor.link if given_link is None else given_link,
        reserve_bytes=parse_bytes(reserve),
        overhead_us=executor.overhead_us if given_overhead_us is None else given_overhead_us,
        recompute=_policy(recompute),
        optimizer=read.optimizer,
        extrapolate=extrapolate,
    )
    plan = solve_plan(read, Request(inputs=inputs, micro_batches=fixed, balance=cuts))
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
    cap = max(inputs.memory_bytes)
    console.note(f"note: cap {cap / 1e9:g} GB = {format_bytes(cap)} per device")
    if inputs.link != Link():
        kind = ", not overlapping with compute" if inputs.link.blocking else ""
        rate = format_rate(inputs.link.bytes_per_s) if inputs.link.bytes_per_s else "unlimited"
        console.note(f"note: link {rate}, {format_us(inputs.link.latency_us)}{kind}")
    elif profile.device.kind == "cuda":
        console.note("note: no `--link`: moving tensors between stages is taken to cost nothing")
    if extrapolated:
        console.warning("micro-batch sizes outside the profiled range are extrapolated: peaks may be under-estimated")
