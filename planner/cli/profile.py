"""`gpipe-plan profile`: measure every layer of a model."""

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, Format, Quiet, check_format, integers
from planner.core.cluster import ExecutorCost
from planner.core.errors import UsageError
from planner.core.precision import PRECISIONS, Precision, precision_of

__all__ = ["profile"]


def profile(
    model: Annotated[
        str, typer.Argument(metavar="MODEL.py[:ENTRY]", help="Your model; see `docs/` for what it needs.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to write.")] = "profile.yaml",
    batch_sizes: Annotated[
        str, typer.Option(metavar="1,2,4,8", help="Micro-batch sizes to measure; the solver chooses among them.")
    ] = "1,2,4,8",
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="What to measure on.")] = "cpu",
    optimizer: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="adamw, adam, sgd, …; default: the file's build_optimizer, or adamw."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(metavar="|".join(PRECISIONS), help="Precision to run in; default: as the model is built."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="A setting of build_model; repeatable.")
    ] = None,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input", metavar="3x224x224", help="Input shape[:dtype[:bound]], without example_batch; repeatable."
        ),
    ] = None,
    threads: Annotated[int, typer.Option(metavar="N", help="CPU threads per stage.")] = 1,
    repeat: Annotated[int, typer.Option(metavar="N", help="Timed repeats of every layer.")] = 10,
    format_: Format = "text",
    *,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Measure time and memory of every layer, at several micro-batch sizes."""
    console = Console(quiet=quiet)
    as_json = check_format(format_)
    sizes = tuple(sorted(set(integers("--batch-sizes", batch_sizes))))
    precision = _precision(dtype)
    if threads < 1 or repeat < 2:
        raise UsageError(f"`--threads {threads} --repeat {repeat}`: at least 1 thread and 2 repeats are needed")

    # torch takes longer to import than everything else together: only this command pays for it.
    from planner import files  # noqa: PLC0415
    from planner.model import in_precision, load_model  # noqa: PLC0415
    from planner.profile import ProfileOptions, profile_model  # noqa: PLC0415
    from planner.show import profile_text  # noqa: PLC0415

    files.check_writable(output)
    options = ProfileOptions(micro_batch_sizes=sizes, device=device, threads=threads, repeats=repeat)
    # What the user's code prints is not our answer.
    with contextlib.redirect_stdout(sys.stderr):
        loaded = load_model(model, settings=_pairs(settings or []), inputs=inputs or [], optimizer=optimizer)
        loaded = in_precision(loaded, precision)
        for note in loaded.notes:
            console.note(f"note: {note}")
        with console.progress(f"profiling {model}") as progress:
            measured = profile_model(loaded, options, progress)
        if measured.device.kind == "cpu":
            measured = replace(measured, device=replace(measured.device, executor=_executor(console)))
    measured = replace(measured, model=replace(measured.model, source=_relative(measured.model.source, output)))
    header = _HEADER.format(model=model)
    if output == "-":
        console.result(files.dump(measured, as_json=as_json, header=header))
        return
    files.write(output, measured, header=header)
    console.result(files.dump(measured, as_json=True) if as_json else profile_text(measured, style_for_stdout()))
    console.note(f"wrote {output}")
    console.next(f"gpipe-plan solve{'' if output == 'profile.yaml' else f' {output}'} --devices 2 --mem 8GB")


_HEADER = (
    "Measured by `gpipe-plan profile {model}`; times in microseconds, sizes in bytes, one value per micro-batch size."
)


def _precision(text: str | None) -> Precision:
    if text is None:
        return ""
    if not precision_of(text):
        raise UsageError(f"unknown precision `--dtype {text}`", hint=f"one of {', '.join(PRECISIONS)}")
    return precision_of(text)


def _executor(console: Console) -> ExecutorCost | None:
    """What two neighbouring processes on this machine cost, measured once and remembered."""
    from planner.executor import executor_cost  # noqa: PLC0415 - torch

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpipe-plan")
    try:
        return executor_cost(folder / "executor.json")
    except Exception as error:  # whatever it is, the profile that was just measured is worth more
        console.warning(f"two processes could not be run, so links are taken to cost nothing: {error}")
        return None


def _relative(source: str, output: str) -> str:
    """`path:entry` relative to the folder of the profile, so that both can move together; absolute paths stay."""
    path, colon, entry = source.rpartition(":")
    if output != "-" and not Path(path).is_absolute():
        path = Path(os.path.relpath(path, Path(output).parent)).as_posix()
    return f"{path}{colon}{entry}"


def _pairs(texts: list[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"expected `--set name=value`, got `--set {text}`")
        pairs[name] = value
    return pairs
