"""`gpipe-plan emit`: the files that run a plan."""

from planner.api.emitting import fresh_plan
from planner.api.options import EmitOptions
from planner.cli.console import Console
from planner.cli.options import Debug, PlanFile, Quiet
from planner.cli.records import with_options
from planner.emit import check_engine


@with_options(EmitOptions)
def emit(
    options: EmitOptions,
    plan: PlanFile = "plan.yaml",
    *,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Write balance.yaml and train.py, the pipelined training script; or the plan in another engine's format."""
    console = Console(quiet=quiet)
    check_engine(options.engine, standalone=options.standalone)
    fresh = fresh_plan(plan, profile=options.profile)
    for finding in fresh.findings:
        tell = console.note if finding.severity == "note" else console.warning
        tell(f"{finding.code}: {finding.message}")
    written = fresh.write(options)
    for path in written.paths[:-1] if written.kept else written.paths:
        console.result(str(path))
    if written.kept:
        script = written.paths[-1]
        console.note(f"note: {script} was edited and stays; it runs the new balance.yaml (`--force` writes it anew)")
    for note in written.notes:
        console.note(f"note: {note}")
    console.next(written.use)
