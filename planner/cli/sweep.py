"""`gpipe-plan sweep`: what is the smallest cluster that trains this?"""

from typing import Annotated

import typer

from planner import api, files
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, Quiet, check_format
from planner.core.errors import ExitCode
from planner.core.values.plan import DEFAULT_SCHEDULE

__all__ = ["sweep"]

_FORMATS = ("text", "json", "markdown")


def sweep(
    profile: Annotated[
        str, typer.Argument(metavar="PROFILE", help="The profile; `-` is standard input.")
    ] = "profile.yaml",
    devices: Annotated[str, typer.Option(metavar="1,2,4,8", help="How many devices there may be.")] = "1,2,4,8",
    mem: Annotated[str | None, typer.Option(metavar="16GB,80GB", help="Memory caps that they may have.")] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="B", help="Samples per optimizer step; default: the largest profiled size.")
    ] = None,
    micro_batches: Annotated[str, typer.Option(metavar="auto|M", help="How many micro-batches.")] = "auto",
    schedule: Annotated[
        str, typer.Option(metavar="gpipe|1f1b|interleaved|auto", help="In which order micro-batches run.")
    ] = DEFAULT_SCHEDULE,
    recompute: Annotated[
        str, typer.Option(metavar="auto|never|except-last|always|layers", help="Recompute activations in backward.")
    ] = "auto",
    link_: Annotated[str | None, typer.Option("--link", metavar="25GB/s,5us", help="Links between neighbours.")] = None,
    overhead: Annotated[
        str | None, typer.Option(metavar="1ms", help="Executor's time per micro-batch, stage and direction.")
    ] = None,
    reserve: Annotated[
        str | None, typer.Option(metavar="500MB", help="Kept free on every device, as measured or 0B.")
    ] = None,
    headroom: Annotated[str, typer.Option(metavar="5%", help="Share of every cap kept free.")] = "0%",
    time_limit: Annotated[
        str | None, typer.Option(metavar="60s", help="For each cell; then the best plan found, with its proven gap.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="DIR", help="Write the plan of every cell there.")
    ] = None,
    format_: Annotated[str, typer.Option("--format", metavar="|".join(_FORMATS), help="How to print it.")] = "text",
    *,
    extrapolate: Annotated[bool, typer.Option("--extrapolate", help="Allow unprofiled micro-batch sizes.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Find the best plan for every number of devices and every cap. Exit code 1: none of them trains this model."""
    console = Console(quiet=quiet)
    check_format(format_, _FORMATS)
    with console.progress("solving every cell") as progress:
        found = api.sweep(
            profile,
            devices=devices,
            mem=mem,
            batch=batch,
            micro_batches=micro_batches,
            schedule=schedule,
            recompute=recompute,
            link=link_,
            overhead=overhead,
            reserve=reserve,
            headroom=headroom,
            time_limit=time_limit,
            output=output,
            extrapolate=extrapolate,
            progress=progress,
        )
    if batch is None:
        console.note(f"note: no `--batch`: planning for {found.batch} samples per step, the largest size profiled")
    if format_ == "json":
        console.result(files.dump(found, as_json=True))
    elif format_ == "markdown":
        from planner.show.gate import sweep_markdown  # noqa: PLC0415 - only where it is asked for

        console.result(sweep_markdown(found))
    else:
        from planner.show.terminal.sweep import sweep_text  # noqa: PLC0415 - likewise

        console.result(sweep_text(found, style_for_stdout()))
    if output is not None:
        console.note(f"wrote {sum(cell.plan is not None for cell in found.cells)} plans to {output}")
    raise typer.Exit(ExitCode.NO if found.smallest is None else ExitCode.OK)
