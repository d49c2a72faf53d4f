"""Every engine that a plan can be taken to, and a plan written to a folder in the format of any of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from planner import files
from planner.core.errors import UsageError
from planner.core.extensions import load, names_of
from planner.core.values.nodes import Nodes
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.emit.automodel import emit_automodel
from planner.emit.deepspeed import emit_deepspeed
from planner.emit.device_map import emit_device_map
from planner.emit.launch import LAUNCHERS, check_launcher, job_of
from planner.emit.layout import EngineFile, Layout
from planner.emit.megatron import emit_megatron
from planner.emit.native import AskAgain, Places, emit_native, no_options
from planner.emit.schedule_csv import emit_schedule_csv
from planner.emit.signature import refuse_other
from planner.emit.split_spec import emit_split_spec
from planner.emit.torchgpipe import emit_torchgpipe
from planner.emit.torchtitan import emit_torchtitan

ENGINES: Final[dict[str, Callable[[Layout], EngineFile]]] = {
    "torchgpipe": emit_torchgpipe,
    "torch": emit_split_spec,
    "torchtitan": emit_torchtitan,
    "automodel": emit_automodel,
    "deepspeed": emit_deepspeed,
    "megatron": emit_megatron,
    "device-map": emit_device_map,
}
"""Engines of others, by the name of the format."""

_FORMATS: Final = {**ENGINES, "csv": emit_schedule_csv}
"""These, and the schedule alone, which several of them read."""


def check_engine(engine: str, *, launch: str | None = None, has_smaller: bool = False) -> None:
    """Raises `UsageError` where there is no such engine, or it does not go with what else is asked."""
    known = ("native", *names_of("FORMATS"), *_FORMATS)
    if engine not in known:
        raise UsageError(f"unknown `--format {engine}`", hint=f"one of {', '.join(known)}")
    for option, is_asked in (("--launch", launch is not None), ("--smaller", has_smaller)):
        if is_asked and engine != "native":
            raise UsageError(f"`{option}` goes with the bundled executor's train.py, not with `--format {engine}`")
    if launch is not None:
        check_launcher(launch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What stands in a folder after a plan was written to it."""

    paths: tuple[Path, ...]
    """The script or the engine's file comes last."""
    kept: bool = False
    """Whether that one was edited, and stays as it is."""
    notes: tuple[str, ...] = ()
    """What to know of the files."""
    use: str
    """What to do with them: the command that usually follows."""


def write_emitted(
    plan: Plan,
    profile: Profile,
    *,
    engine: str,
    folder: str,
    places: Places,
    force: bool,
    smaller: Sequence[Plan] = (),
    launch: str | None = None,
    nodes: Nodes | None = None,
    again: AskAgain = no_options,
    say: Callable[[str], None],
) -> Written:
    """Write what runs `plan` in `engine` to `folder`.

    No file of `places` is overwritten, nor the model's, and none that was edited but with `force`. For the bundled
    executor there may be plans for fewer processes, which are made from the same profile (`smaller`), and a file that
    starts the script where `launch` says, on `nodes`. `again` is as for `emit_native`; `say` is called with what takes
    long, before it is done.

    Raises:
        InfeasibleError: What runs the plan in that engine would need more memory than the plan's limit.
        UsageError: There is no such engine, it cannot run the plan, or a file that was read would be overwritten; the
            nodes do not hold the processes; or one of `smaller` is no smaller plan of the same training.
        FileError: A file cannot be written, or was edited.
    """
    check_engine(engine, launch=launch, has_smaller=bool(smaller))
    profile_folder = str(Path(places.profile).parent)
    read = (places.plan, places.profile, files.model_path(profile, profile_folder), *places.smaller)
    if engine in _FORMATS:
        file = emit_engine(engine, plan, profile)
        texts = {**file.beside, file.name: file.text}
        paths = tuple(Path(folder, name) for name in texts)
        files.check_outputs({str(path): str(path) for path in paths}, read)
        _write(dict(zip(paths, texts.values(), strict=True)), force=force)
        return Written(paths=paths, notes=file.notes, use=file.use)
    where = {"folder": folder, "profile_folder": profile_folder}
    if engine == "native":
        emitted = emit_native(plan, profile, smaller=smaller, places=places, again=again, **where)
    else:
        emitted = load("FORMATS", engine)(plan, profile, say=say, **where)
    if launch is not None:
        script = Path(folder, emitted.name).as_posix()
        file = LAUNCHERS[launch](job_of(emitted.plans, plan.inputs, script=script, nodes=nodes))
        emitted = replace(emitted, launch=file, notes=(*emitted.notes, *file.notes), use=file.use)
    paths = emitted.paths(folder)
    files.check_outputs({str(path): str(path) for path in paths}, read)
    kept = not emitted.write(folder, force=force)
    return Written(paths=paths, kept=kept, notes=emitted.notes, use=emitted.use)


def emit_engine(name: str, plan: Plan, profile: Profile) -> EngineFile:
    """`plan` in the format called `name`, one of `ENGINES` or `csv`; `profile` is what it was made from.

    Raises:
        UsageError: The format cannot hold the plan at all, or the plan does not cut the profile's chain.
    """
    return _FORMATS[name](Layout.of(plan, profile))


def _write(texts: Mapping[Path, str], *, force: bool) -> None:
    """Write all files, or none if one was edited."""
    for path, text in texts.items():
        if not force:
            refuse_other(path, text)
    for path, text in texts.items():
        files.write_text(str(path), text)
