"""Table of engines, and functions that write a plan in an engine's format."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from planner import files
from planner.core.errors import UsageError
from planner.core.extensions import load_extension, registered_names
from planner.core.values.nodes import Nodes
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.emit.automodel import emit_automodel
from planner.emit.deepspeed import emit_deepspeed
from planner.emit.device_map import emit_device_map
from planner.emit.launch import LAUNCHERS, make_launch_job
from planner.emit.layout import EngineFile, PlanLayout, refuse_tensor_parallel_or_sharded
from planner.emit.megatron import emit_megatron
from planner.emit.native import InputPaths, RepeatOptions, emit_native
from planner.emit.schedule_csv import emit_schedule_csv
from planner.emit.signature import is_edited_script, refuse_overwrite
from planner.emit.split_spec import emit_split_spec
from planner.emit.torchgpipe import emit_torchgpipe
from planner.emit.torchtitan import emit_torchtitan

ENGINES: Final[dict[str, Callable[[PlanLayout], EngineFile]]] = {
    "torchgpipe": emit_torchgpipe,
    "torch": emit_split_spec,
    "torchtitan": emit_torchtitan,
    "automodel": emit_automodel,
    "deepspeed": emit_deepspeed,
    "megatron": emit_megatron,
    "device-map": emit_device_map,
}
"""Emitters of other engines' formats, by name of the format."""

FORMATS: Final = {**ENGINES, "csv": emit_schedule_csv}
"""Formats of other engines, and `csv`: the schedule alone, which several engines read."""


def format_names() -> tuple[str, ...]:
    """Return the names of all formats, that of the bundled executor first."""
    return ("native", *registered_names("FORMATS"), *FORMATS)


def check_engine(engine: str, *, launch: str | None = None, has_smaller: bool = False) -> None:
    """Raise UsageError for an unknown format or job scheduler, or if `--launch` or `--smaller` needs another format.

    Args:
        engine: Name of the format.
        launch: Value of `emit --launch`, the cluster's job scheduler, such as `slurm`; None if not given.
        has_smaller: True if `emit --smaller` is given.
    """
    formats = format_names()
    if engine not in formats:
        raise UsageError(f"unknown `--format {engine}`", hint=f"one of {', '.join(formats)}")
    for option, is_set in (("--launch", launch is not None), ("--smaller", has_smaller)):
        if is_set and engine != "native":
            raise UsageError(f"`{option}` needs the bundled executor's train.py, not `--format {engine}`")
    if launch not in (None, *LAUNCHERS):
        raise UsageError(f"unknown `--launch {launch}`", hint=f"one of {', '.join(LAUNCHERS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitResult:
    """Paths of the files that `emit` wrote for a plan, and how to use the files."""

    paths: tuple[Path, ...]
    """Paths of the files; the path of the script, or of the engine's file, is last."""
    kept: bool = False
    """True if the script was not overwritten, because it was edited."""
    notes: tuple[str, ...] = ()
    """Remarks about the files."""
    use: str
    """Command or call that uses the files."""


def write_engine_files(
    plan: Plan,
    profile: Profile,
    *,
    engine: str,
    folder: str,
    input_paths: InputPaths,
    force: bool,
    smaller: Sequence[Plan] = (),
    launch: str | None = None,
    nodes: Nodes | None = None,
    repeat_options: RepeatOptions | None = None,
) -> EmitResult:
    """Write the files with which an engine runs a plan. Inputs and the model's file are never overwritten.

    Args:
        plan: Plan to write.
        profile: Profile of the plan.
        engine: Name of the format, one of `format_names`.
        folder: Folder of the written files.
        input_paths: Paths of the plans and the profile.
        force: True to overwrite edited files.
        smaller: Plans for fewer processes, made from the same profile; only for the bundled executor.
        launch: Job scheduler for which a launcher is written, such as `slurm`; None for no launcher.
        nodes: Nodes for the launcher; defaults to the nodes of the plan.
        repeat_options: Function that returns the `solve` options to compute a plan again, for commands that the
            script prints.

    Returns:
        Paths of the files, and notes for the user.

    Raises:
        InfeasibleError: With the chosen engine, a device needs more memory than its limit.
        UsageError: The engine cannot run the plan, an input would be overwritten, or the nodes have too few devices.
            Also raised if a plan in `smaller` has another mini-batch size or more processes than `plan`, or if two
            plans have equally many processes.
        FileError: A file cannot be written, or was edited.
    """
    refuse_tensor_parallel_or_sharded(engine, plan)
    profile_folder = str(Path(input_paths.profile).parent)
    inputs = (input_paths.plan, input_paths.profile, files.model_path(profile, profile_folder), *input_paths.smaller)
    where = {"folder": folder, "profile_folder": profile_folder}
    if engine in FORMATS:
        file = engine_file(engine, plan, profile)
        texts = {**file.extra_files, file.name: file.text}
        return _write(texts, folder, inputs, force=force, notes=file.notes, use=file.use)
    if engine == "native":
        emitted = emit_native(
            plan, profile, smaller=smaller, input_paths=input_paths, repeat_options=repeat_options, **where
        )
    else:
        emitted = load_extension("FORMATS", engine)(plan, profile, **where)
    texts, notes, use = {"balance.yaml": emitted.balance, **emitted.smaller}, emitted.notes, emitted.use
    if launch is not None:
        script = Path(folder, emitted.name).as_posix()
        file = LAUNCHERS[launch](make_launch_job(emitted.plans, plan.inputs, script=script, nodes=nodes))
        texts, notes, use = {**texts, file.name: file.text}, (*notes, *file.notes), file.use
    texts[emitted.name] = emitted.script
    return _write(texts, folder, inputs, script=emitted.name, force=force, notes=notes, use=use)


def engine_file(engine: str, plan: Plan, profile: Profile) -> EngineFile:
    """Return a plan as a file in an engine's format.

    Args:
        engine: Name of the format, a key of `FORMATS`.
        plan: The plan.
        profile: Profile of the plan.

    Raises:
        UsageError: The format cannot express the plan, or the plan does not match the profile.
    """
    refuse_tensor_parallel_or_sharded(engine, plan)
    return FORMATS[engine](PlanLayout.of(plan, profile))


def _write(
    texts: Mapping[str, str],
    folder: str,
    inputs: Iterable[str | None],
    *,
    script: str = "",
    force: bool,
    notes: tuple[str, ...],
    use: str,
) -> EmitResult:
    # An edited `script` is kept, because it reads the new balance.yaml. All files are checked before one is written.
    paths = {Path(folder, name): text for name, text in texts.items()}
    files.check_outputs({str(path): str(path) for path in paths}, inputs)
    kept = bool(script) and not force and is_edited_script(Path(folder, script))
    written = {path: text for path, text in paths.items() if not (kept and path.name == script)}
    for path, text in written.items():
        if not force:
            refuse_overwrite(path, text)
    for path, text in written.items():
        files.write_text(str(path), text)
    return EmitResult(paths=tuple(paths), kept=kept, notes=notes, use=use)
