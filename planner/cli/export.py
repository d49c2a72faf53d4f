"""`gpipe-plan export`: write a checkpoint as one state dict."""

from typing import Annotated

import typer

from planner.cli.console import Console
from planner.cli.options import Format, Quiet, check_format


def export(
    checkpoint: Annotated[
        str,
        typer.Argument(metavar="CHECKPOINT", help="Checkpoint of train.py, or a folder of checkpoints."),
    ] = "checkpoints",
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="FILE", help="Output file, .pt or .safetensors.")
    ] = "model.pt",
    format_: Format = "text",
    *,
    quiet: Quiet = False,
) -> None:
    """Write the weights of a checkpoint as one state dict of the unpartitioned model."""
    import planner
    from planner import files

    as_json = check_format(format_)
    done = planner.export(checkpoint, output)
    console = Console(quiet=quiet)
    words = {"output": output, "checkpoint": str(done.checkpoint), "tensors": done.tensors}
    console.result(files.json_text(words) if as_json else output)
    load = f"model.load_state_dict(torch.load({output!r}))"
    if output.endswith(".safetensors"):  # has a tied tensor under one of its names
        load = f"safetensors.torch.load_model(model, {output!r})"
    console.note(f"next: load {done.tensors} tensors of {done.checkpoint}: `{load}`, or `train.py --weights {output}`")
