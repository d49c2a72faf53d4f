"""`gpipe-plan emit`: write the files that run a plan."""

from dataclasses import replace
from typing import TYPE_CHECKING

from planner.api.options.emitting import EmitOptions
from planner.cli.console import Console
from planner.cli.options import PlanFile, Quiet, check_format, with_options

if TYPE_CHECKING:
    from planner.core.values.findings import Finding


@with_options(EmitOptions)
def emit(
    options: EmitOptions,
    plan: PlanFile = "plan.yaml",
    *,
    quiet: Quiet = False,
) -> None:
    """Write balance.yaml and train.py, or the plan in another engine's format."""
    from planner.api.emitting import emit_files
    from planner.emit.engines import format_names
    from planner.files import json_text

    console = Console(quiet=quiet)

    def print_finding(finding: "Finding") -> None:
        show = console.note if finding.severity == "note" else console.warning
        show(f"{finding.code}: {finding.message}")

    as_json = check_format(options.engine, (*format_names(), "json"))
    if as_json:
        options = replace(options, engine="native")
    done = emit_files(plan, options, on_finding=print_finding)
    paths = [str(path) for path in (done.paths[:-1] if done.kept else done.paths)]
    console.result(json_text({"written": paths, "next": done.use}) if as_json else "\n".join(paths))
    if done.kept:
        script = done.paths[-1]
        console.note(f"note: {script} was edited and is kept; it runs the new balance.yaml (`--force` overwrites it)")
    for note in done.notes:
        console.note(f"note: {note}")
    console.note(f"next: {done.use}")
