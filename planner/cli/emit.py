"""`gpipe-plan emit`: the files that run a plan."""

from pathlib import Path
from typing import Annotated

import typer

from planner import files
from planner.cli.console import Console
from planner.cli.options import Debug, Quiet
from planner.cli.plans import profile_for, profile_path
from planner.core.errors import StaleError
from planner.core.judge.verdict import judge
from planner.core.values.balance import launch_line
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.emit import (
    Emitted,
    EngineFile,
    check_apart,
    check_engine,
    emit_engine,
    emit_jax,
    emit_native,
    emit_standalone,
    refuse_edited,
)

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
    read = files.read_plan(plan)
    measured = profile_for(read, plan, profile)
    verdict = judge(read, measured, profile_digest=files.digest_of(measured))
    for finding in verdict.findings:
        if finding.code in ("GP201", "GP202"):
            raise StaleError(finding.message, path=plan, hint=finding.hint)
        tell = console.note if finding.severity == "note" else console.warning
        tell(f"{finding.code}: {finding.message}")
    now = verdict.plan or read
    place = profile_path(read, plan, profile)
    folder = str(Path(place).parent)
    read_from = (plan, place, files.model_path(measured, folder))
    if format_ in ("native", "jax"):
        check_apart(format_, read_from, standalone=standalone, folder=output)
    if standalone:
        _standalone(console, now, measured, output, folder, force=force)
    elif format_ == "native":
        _native(console, now, measured, output, folder, force=force)
    elif format_ == "jax":
        _jax(console, now, measured, output, folder, force=force)
    else:
        _engine(console, emit_engine(format_, now, measured), format_, output, read_from, force=force)


def _native(console: Console, plan: Plan, profile: Profile, output: str, profile_folder: str, *, force: bool) -> None:
    emitted = emit_native(plan, profile, folder=output, profile_folder=profile_folder)
    script = _write(console, emitted, output, force=force)
    used = sorted({plan.device_of(stage) for stage in plan.stages})
    if used[-1] >= len(used):
        places = ",".join(map(str, used))
        console.note(f"note: the stages are planned for devices {places} (CUDA_VISIBLE_DEVICES={places})")
    console.next(launch_line(plan.num_devices * plan.replicas, str(script)))


def _standalone(
    console: Console, plan: Plan, profile: Profile, output: str, profile_folder: str, *, force: bool
) -> None:
    text = emit_standalone(plan, profile, folder=output, profile_folder=profile_folder)
    script = Path(output, "train.py")
    if not force:
        refuse_edited(script)
    files.write_text(str(script), text)
    console.result(str(script))
    console.next(f"torchrun --nproc-per-node {len(plan.stages)} {script}")


def _jax(console: Console, plan: Plan, profile: Profile, output: str, profile_folder: str, *, force: bool) -> None:
    emitted = emit_jax(plan, profile, folder=output, profile_folder=profile_folder)
    script = _write(console, emitted, output, force=force)
    console.note(f"note: {emitted.note} (`--compile v2` asks the compiler)")
    console.next(f"python {script}")


def _engine(
    console: Console, emitted: EngineFile, name: str, output: str, read: tuple[str | None, ...], *, force: bool
) -> None:
    check_apart(name, read, standalone=False, folder=output, name=emitted.name)
    path = Path(output, emitted.name)
    if not force:
        refuse_edited(path)
    files.write_text(str(path), emitted.text)
    console.result(str(path))
    for note in emitted.notes:
        console.note(f"note: {note}")
    console.next(emitted.use)


def _write(console: Console, emitted: Emitted, output: str, *, force: bool) -> Path:
    written = emitted.write(output, force=force)
    script = Path(output, emitted.name)
    console.result(str(Path(output, "balance.yaml")))
    if written:
        console.result(str(script))
    else:
        console.note(f"note: {script} was edited and stays; it runs the new balance.yaml (`--force` writes it anew)")
    return script
