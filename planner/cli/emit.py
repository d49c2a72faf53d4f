"""`gpipe-plan emit`: the files that run a plan."""

from typing import Annotated

import typer

from planner.api.emitting import fresh_plan
from planner.cli.console import Console
from planner.cli.options import Debug, Quiet
from planner.emit import check_engine

__all__ = ["emit"]


def emit(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="The plan; `-` is standard input.")] = "plan.yaml",
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="Folder to write to.")] = ".",
    profile: Annotated[str | None, typer.Option(metavar="FILE", help="The plan's profile, if it was moved.")] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="native|jax|torchgpipe|torch|torchtitan|deepspeed|megatron|device-map",
            help="For which engine; native is the bundled executor, jax one program for TPUs.",
        ),
    ] = "native",
    *,
    standalone: Annotated[
        bool,
        typer.Option("--standalone", help="A train.py that needs torch alone: plain GPipe or 1F1B, nn.Sequential."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that was edited.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Write balance.yaml and train.py, the pipelined training script; or the plan in another engine's format."""
    console = Console(quiet=quiet)
    check_engine(format_, standalone=standalone)
    fresh = fresh_plan(plan, profile=profile)
    for finding in fresh.findings:
        tell = console.note if finding.severity == "note" else console.warning
        tell(f"{finding.code}: {finding.message}")
    written = fresh.write(output, engine=format_, standalone=standalone, force=force)
    for path in written.paths[:-1] if written.kept else written.paths:
        console.result(str(path))
    if written.kept:
        script = written.paths[-1]
        console.note(f"note: {script} was edited and stays; it runs the new balance.yaml (`--force` writes it anew)")
    for note in written.notes:
        console.note(f"note: {note}")
    console.next(written.use)
