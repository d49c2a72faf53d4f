"""`gpipe-plan export`: a checkpoint as one state dict."""

from pathlib import Path
from typing import Annotated

import typer

from planner.cli.console import Console
from planner.cli.options import Debug, Quiet
from planner.core.errors import FileError, UsageError


def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint of train.py, or a folder of them: the latest.")
    ] = "checkpoints",
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Where to write; .pt or .safetensors.")
    ] = "model.pt",
    *,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Write the weights in a checkpoint as one state dict of the whole model, for use without a pipeline."""
    from planner import files

    console = Console(quiet=quiet)
    files.check_writable(output)

    from planner.executor import check_whole, export_weights, latest_checkpoint  # torch

    latest = latest_checkpoint(checkpoint)
    if latest is None:
        raise FileError(
            "there is no checkpoint in it", path=checkpoint, hint="train.py writes them with `--checkpoint DIR`"
        )
    if Path(output).resolve().is_relative_to(latest.resolve()):
        raise UsageError(f"`--output {output}` lies in the checkpoint that is read", hint="name another file")
    check_whole(latest)
    count = export_weights(str(latest), output)
    console.result(output)
    console.note(
        f"{count} tensors of {latest}: `model.load_state_dict(torch.load({output!r}))`, or `--weights {output}`"
    )
