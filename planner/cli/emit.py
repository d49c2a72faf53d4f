"""`gpipe-plan emit`: the files that run a plan."""

from pathlib import Path
from typing import Annotated

import typer

from planner import files
from planner.cli.console import Console
from planner.cli.options import Debug, Quiet
from planner.cli.plans import profile_for, profile_path
from planner.core.errors import FileError, StaleError
from planner.core.verdict import judge
from planner.emit import emit_native, is_edited

__all__ = ["emit"]


def emit(
    plan: Annotated[str, typer.Argument(metavar="[PLAN]", help="The plan; `-` is standard input.")] = "plan.yaml",
    output: Annotated[str, typer.Option("--output", "-o", metavar="DIR", help="Folder to write to.")] = ".",
    profile: Annotated[str | None, typer.Option(metavar="FILE", help="The plan's profile, if it was moved.")] = None,
    *,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a train.py that was edited.")] = False,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Write balance.yaml and train.py, the pipelined training script."""
    console = Console(quiet=quiet)
    read = files.read_plan(plan)
    measured = profile_for(read, plan, profile)
    verdict = judge(read, measured, profile_digest=files.digest_of(measured))
    for finding in verdict.findings:
        if finding.code in ("GP201", "GP202"):
            raise StaleError(finding.message, path=plan, hint=finding.hint)
        console.warning(f"{finding.code}: {finding.message}")
    profile_folder = str(Path(profile_path(read, plan, profile)).parent)
    emitted = emit_native(verdict.plan or read, measured, folder=output, profile_folder=profile_folder)
    script = Path(output, "train.py")
    if not force and is_edited(script):
        raise FileError("was edited since it was emitted", path=str(script), hint="keep it, or pass `--force`")
    files.write_text(str(Path(output, "balance.yaml")), emitted.balance)
    files.write_text(str(script), emitted.script)
    console.result(f"{Path(output, 'balance.yaml')}\n{script}")
    order = [read.device_of(stage) for stage in read.stages]
    if order != sorted(order) or order[-1] >= len(order):
        places = ",".join(map(str, order))
        console.note(
            f"note: the stages are planned for devices {places}, in this order (CUDA_VISIBLE_DEVICES={places})"
        )
    console.next(f"torchrun --nproc-per-node {len(read.stages)} {script}")
