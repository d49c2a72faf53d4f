"""`gpipe-plan profile-links`: measure the links between neighboring processes of a pipeline."""

import os
from typing import Annotated

import typer

from planner.api.texts import parse_choice
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Format, Output, Quiet, check_format
from planner.core.errors import ExitCode, UsageError
from planner.core.values.devices import TORCH_KINDS

_START = "torchrun --nproc-per-node 4 -m planner profile-links"


def profile_links(
    output: Output = "links.yaml",
    device: Annotated[
        str,
        typer.Option(
            metavar="|".join(("auto", *TORCH_KINDS)),
            help="Device of the processes; auto: CUDA if each process has a GPU.",
        ),
    ] = "auto",
    format_: Format = "text",
    *,
    quiet: Quiet = False,
) -> None:
    """Measure latency and bandwidth between neighboring processes; start it with torchrun."""
    from planner import files

    is_first = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=quiet or not is_first)
    if "RANK" not in os.environ:
        raise UsageError("`profile-links` needs several processes", hint=f"start it with `{_START}`")
    try:
        as_json = check_format(format_)
        _check_usage(device)
    except UsageError:
        if is_first:
            raise
        raise typer.Exit(ExitCode.ERROR) from None  # the first process reports it
    if is_first:
        files.check_writable(output)

    from planner.executor.measure.links import measure_links  # torch

    with console.progress("measuring links") as progress:
        links = measure_links(device, progress)
    if links is None:
        return
    if output == "-":
        console.result(files.dump(links, as_json=as_json, header=_HEADER))
        return
    files.write(output, links, header=_HEADER)
    from planner.show.terminal.links import links_text

    console.result(files.json_text(links) if as_json else links_text(links, style_for_stdout()))
    console.note(f"wrote {output}")
    console.note(f"next: gpipe-plan solve --devices {len(links.boundaries) + 1} --mem 8GB --links {output}")


def _check_usage(device: str) -> None:
    parse_choice("--device", device, ("auto", *TORCH_KINDS))
    if os.environ.get("WORLD_SIZE", "1") == "1":
        raise UsageError("`profile-links` needs several processes", hint=f"start 2 or more: `{_START}`")


_HEADER = "Measured by `gpipe-plan profile-links`: the link from each process to the next."
