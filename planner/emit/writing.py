"""A plan written to a folder in the format of any engine."""

from collections.abc import Iterable
from pathlib import Path

from planner import files
from planner.core.errors import UsageError
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.emit.engines import ENGINES, emit_engine
from planner.emit.jax_program import JAX_SCRIPT, emit_jax
from planner.emit.native import emit_native
from planner.emit.signature import refuse_edited
from planner.emit.standalone import emit_standalone

__all__ = ["check_apart", "check_engine", "write_emitted"]


def check_engine(engine: str, *, standalone: bool) -> None:
    """Whether there is such an engine, and whether it goes with `standalone`.

    Raises:
        UsageError: There is none, or it does not.
    """
    if engine not in ("native", "jax", *ENGINES):
        raise UsageError(f"unknown `--format {engine}`", hint=f"one of native, jax, {', '.join(ENGINES)}")
    if standalone and engine != "native":
        raise UsageError(f"`--standalone` goes with the native format, not with `--format {engine}`")


def check_apart(engine: str, read: Iterable[str | None], *, standalone: bool, folder: str, name: str = "") -> None:
    """Refuses a folder in which a file to be written is one that was read.

    Args:
        engine: `native`, `jax` or one of `ENGINES`.
        read: The files that were read; None where there is none, `-` is standard input.
        standalone: Whether the script is written alone.
        folder: Where to.
        name: What the engine's file is called, where it is one of `ENGINES`.

    Raises:
        UsageError: It would be overwritten.
    """
    names = [name] if name else [JAX_SCRIPT if engine == "jax" else "train.py"]
    if engine in ("native", "jax") and not standalone:
        names.append("balance.yaml")
    files.check_outputs({path: path for path in (str(Path(folder, each)) for each in names)}, read)


def write_emitted(
    plan: Plan,
    profile: Profile,
    *,
    engine: str,
    standalone: bool,
    folder: str,
    profile_folder: str,
    read: Iterable[str | None],
    force: bool,
) -> tuple[Path, ...]:
    """Writes what runs `plan`, and says where it stands; the script or the engine's file comes last.

    Args:
        plan: The plan.
        profile: The profile it was made from.
        engine: `native`, `jax` or one of `ENGINES`.
        standalone: Whether the script needs torch alone.
        folder: Where to.
        profile_folder: Where the profile stands, from which the model's path counts.
        read: The files that were read, none of which is overwritten.
        force: Whether to overwrite what was edited.

    Raises:
        UsageError: There is no such engine, it cannot run the plan, or a file that was read would be overwritten.
        FileError: A file cannot be written, or was edited.
    """
    check_engine(engine, standalone=standalone)
    if engine in ("native", "jax"):
        check_apart(engine, read, standalone=standalone, folder=folder)
    if engine in ("native", "jax") and not standalone:
        emit = emit_native if engine == "native" else emit_jax
        emitted = emit(plan, profile, folder=folder, profile_folder=profile_folder)
        emitted.write(folder, force=force)
        return Path(folder, "balance.yaml"), Path(folder, emitted.name)
    if standalone:
        name, text = "train.py", emit_standalone(plan, profile, folder=folder, profile_folder=profile_folder)
    else:
        file = emit_engine(engine, plan, profile)
        name, text = file.name, file.text
        check_apart(engine, read, standalone=False, folder=folder, name=name)
    path = Path(folder, name)
    if not force:
        refuse_edited(path)
    files.write_text(str(path), text)
    return (path,)
