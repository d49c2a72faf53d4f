"""Every engine that a plan can be taken to, and a plan written to a folder in the format of any of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from planner import files
from planner.core.errors import UsageError
from planner.core.values.balance import launch_line
from planner.core.values.nodes import Nodes
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.emit.automodel import emit_automodel
from planner.emit.deepspeed import emit_deepspeed
from planner.emit.device_map import emit_device_map
from planner.emit.jax_program import JAX_SCRIPT, emit_jax
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
    if engine not in ("native", "jax", *_FORMATS):
        raise UsageError(f"unknown `--format {engine}`", hint=f"one of native, jax, {', '.join(_FORMATS)}")
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
    compiled: str = "",
) -> Written:
    """Write what runs `plan` in `engine` to `folder`.

    No file of `places` is overwritten, nor the model's, and none that was edited but with `force`. For the bundled
    executor there may be plans for fewer processes, which are made from the same profile (`smaller`), and a file that
    starts the script where `launch` says, on `nodes`. `again` is as for `emit_native`; `compiled` is what a TPU's
    compiler says of a program that fits.

    Raises:
        InfeasibleError: A JAX program would need more than the cap, as predicted, and nothing was compiled.
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
        _check_apart(texts, read, folder)
        paths = _written(folder, texts, force=force)
        return Written(paths=paths, notes=file.notes, use=file.use)
    _check_apart((JAX_SCRIPT if engine == "jax" else "train.py", "balance.yaml"), read, folder)
    if engine == "jax":
        emitted = emit_jax(
            plan, profile, folder=folder, profile_folder=profile_folder, places=places, again=again, compiled=compiled
        )
        notes: tuple[str, ...] = (emitted.note,)
        use = f"python {Path(folder, JAX_SCRIPT)}"
    else:
        emitted = emit_native(
            plan, profile, folder=folder, profile_folder=profile_folder, smaller=smaller, places=places, again=again
        )
        script = Path(folder, emitted.name)
        notes, use = _skipped_devices(plan), launch_line(plan.num_devices * plan.replicas, str(script))
        if launch is not None:
            job = job_of(emitted.plans, plan.inputs, script=script.as_posix(), nodes=nodes)
            file = LAUNCHERS[launch](job)
            emitted, notes, use = replace(emitted, launch=file), (*notes, *file.notes), file.use
    paths = emitted.paths(folder)
    files.check_outputs({str(path): str(path) for path in paths}, read)
    kept = not emitted.write(folder, force=force)
    return Written(paths=paths, kept=kept, notes=notes, use=use)


def emit_engine(name: str, plan: Plan, profile: Profile) -> EngineFile:
    """`plan` in the format called `name`, one of `ENGINES` or `csv`; `profile` is what it was made from.

    Raises:
        UsageError: The format cannot hold the plan at all, or the plan does not cut the profile's chain.
    """
    return _FORMATS[name](Layout.of(plan, profile))


def _check_apart(names: Iterable[str], read: Iterable[str | None], folder: str) -> None:
    """Refuses a folder in which a file to be written is one that was read."""
    files.check_outputs({path: path for path in (str(Path(folder, name)) for name in names)}, read)


def _written(folder: str, texts: Mapping[str, str], *, force: bool) -> tuple[Path, ...]:
    """Writes files by name, all or none: no edited one is overwritten."""
    paths = tuple(Path(folder, name) for name in texts)
    for path, text in zip(paths, texts.values(), strict=True):
        if not force:
            refuse_other(path, text)
    for path, text in zip(paths, texts.values(), strict=True):
        files.write_text(str(path), text)
    return paths


def _skipped_devices(plan: Plan) -> tuple[str, ...]:
    used = sorted({plan.device_of(stage) for stage in plan.stages})
    if used[-1] < len(used):
        return ()
    places = ",".join(map(str, used))
    return (f"the stages are planned for devices {places} (CUDA_VISIBLE_DEVICES={places})",)
