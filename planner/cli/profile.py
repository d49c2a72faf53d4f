"""`gpipe-plan profile`: measure every layer of a model."""

import contextlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Debug, Format, Quiet, check_format
from planner.core.cost.calibration import calibrated_executor
from planner.core.errors import UsageError
from planner.core.values.cluster import ExecutorCost
from planner.core.values.options import choice, micro_batch_sizes
from planner.core.values.options import precision as precision_asked
from planner.core.values.precision import PRECISIONS
from planner.core.values.profile import Granularity
from planner.core.values.units import parse_us

if TYPE_CHECKING:
    from planner.core.values.profile import Profile
    from planner.core.values.proof import Proof
    from planner.model import LoadedModel

__all__ = ["profile"]


def profile(
    model: Annotated[
        str, typer.Argument(metavar="MODEL.py[:ENTRY]", help="Your model; see `docs/` for what it needs.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to write.")] = "profile.yaml",
    batch_sizes: Annotated[
        str,
        typer.Option(
            metavar="auto|1,2,4,8",
            help="Micro-batch sizes to measure; the solver chooses among them. `auto`: powers of two up to `--batch` "
            "while they fit into memory, without those too small for batch normalization.",
        ),
    ] = "auto",
    batch: Annotated[
        int | None, typer.Option(metavar="B", help="Samples per optimizer step, for `--batch-sizes auto`; default: 8.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            metavar="cpu|cuda|tpu|tpu:v2|estimate:h100",
            help="What to measure on; tpu:v2 (…v6e) compiles for a TPU that is not here, estimate:h100 estimates.",
        ),
    ] = "cpu",
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
    granularity: Annotated[
        str, typer.Option(metavar="coarse|fine", help="About one layer per block, or cuts inside blocks too.")
    ] = "coarse",
    repeat: Annotated[
        int, typer.Option(metavar="N", help="Timed repeats of every layer, at least; more while the plan is in doubt.")
    ] = 10,
    time_budget: Annotated[
        str, typer.Option(metavar="60s", help="Begin no repeats beyond `--repeat` after timing for so long; 0s: none.")
    ] = "60s",
    proof_budget: Annotated[
        str,
        typer.Option(
            metavar="30s",
            help="Hold stages against the model in one piece for about so long, on all cores; 0s: not at all.",
        ),
    ] = "30s",
    calibration: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Executor and link as `verify` measured them, instead of measuring them."),
    ] = None,
    format_: Format = "text",
    *,
    quiet: Quiet = False,
    debug: Debug = False,  # noqa: ARG001 - read by main
) -> None:
    """Measure time and memory of every layer, at several micro-batch sizes."""
    console = Console(quiet=quiet)
    as_json = check_format(format_)
    sizes = micro_batch_sizes(batch_sizes, batch)
    time_budget_s, proof_budget_s = parse_us(time_budget) / 1e6, parse_us(proof_budget) / 1e6
    precision = precision_asked(dtype)
    if threads < 1 or repeat < 2:
        raise UsageError(f"`--threads {threads} --repeat {repeat}`: at least 1 thread and 2 repeats are needed")

    # torch takes longer to import than everything else together: only this command pays for it.
    from planner import files  # noqa: PLC0415
    from planner.model import in_precision, load_model  # noqa: PLC0415
    from planner.profile import InterruptedProfileError, ProfileOptions, profile_model  # noqa: PLC0415
    from planner.show import profile_text  # noqa: PLC0415

    # What is no Python file is refused as such before anything is written.
    sources = [path for path in (model, model.rpartition(":")[0]) if path.endswith(".py")]
    files.check_outputs({"--output": output}, (*sources, calibration))
    files.check_writable(output)
    found = files.read_calibration(calibration) if calibration is not None else None
    if found is not None and device in ("cpu", "cuda"):
        calibrated_executor(found, device)  # before anything is measured
    options = ProfileOptions(
        micro_batch_sizes=sizes,
        device=device,
        threads=threads,
        repeats=repeat,
        time_budget_s=time_budget_s,
        until_memory_ends=batch_sizes == "auto",
    )
    unfinished = Path(f"{output}.partial")
    earlier = files.read_partial(str(unfinished)) if output != "-" and unfinished.exists() else None
    # What the user's code prints is not our answer.
    with contextlib.redirect_stdout(sys.stderr):
        loaded = load_model(
            model,
            settings=_pairs(settings or []),
            inputs=inputs or [],
            optimizer=optimizer,
            granularity=cast("Granularity", choice("--granularity", granularity, Granularity)),
        )
        loaded, proof = _proven(in_precision(loaded, precision), proof_budget_s, console)

        def note(text: str) -> None:
            console.note(f"note: {text}")

        # First, because an interrupt from here on loses nothing.
        executor = _executor(console) if device.startswith("cpu") and found is None else None
        if earlier is not None:
            note(f"going on from {unfinished}")
        try:
            with console.progress(f"profiling {model}") as progress:
                measured = profile_model(loaded, options, progress, warn=console.warning, note=note, earlier=earlier)
        except InterruptedProfileError as interrupt:
            if output != "-" and interrupt.partial.measurements:
                files.write(str(unfinished), interrupt.partial, header=_UNFINISHED.format(model=model))
                console.note(f"wrote {unfinished}: the same command goes on from there")
            raise
    if found is not None:
        executor = calibrated_executor(found, measured.device.kind)
    measured = replace(measured, proof=proof, device=replace(measured.device, executor=executor))
    measured = replace(measured, model=replace(measured.model, source=_relative(measured.model.source, output)))
    header = _HEADER.format(model=model, how=measured.device.how.capitalize())
    if output == "-":
        console.result(files.dump(measured, as_json=as_json, header=header))
        return
    files.write(output, measured, header=header)
    unfinished.unlink(missing_ok=True)
    console.result(files.dump(measured, as_json=True) if as_json else profile_text(measured, style_for_stdout()))
    console.note(f"wrote {output}")
    which = "" if output == "profile.yaml" else f" {output}"
    console.next(f"gpipe-plan solve{which} --devices 2{_cap(device, measured)}")


def _cap(device: str, measured: "Profile") -> str:
    """The option for a cap, where the profile does not say what the device has."""
    if device.startswith("tpu:"):
        return f" --mem {device}"
    return "" if measured.device.memory_bytes else " --mem 8GB"


_HEADER = (
    "{how} by `gpipe-plan profile {model}`; times in microseconds, sizes in bytes, one value per micro-batch size."
)
_UNFINISHED = (
    "What `gpipe-plan profile {model}` had measured when it was interrupted; the same command goes on from here.\n"
    "Delete this file to start over."
)


def _executor(console: Console) -> ExecutorCost | None:
    """What two neighbouring processes on this machine cost, measured once and remembered."""
    from planner.executor import executor_cost  # noqa: PLC0415 - torch

    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpipe-plan")
    try:
        return executor_cost(folder / "executor.json")
    except Exception as error:  # whatever it is, the profile that was just measured is worth more
        console.warning(f"two processes could not be run, so links are taken to cost nothing: {error}")
        return None


def _proven(loaded: "LoadedModel", budget_s: float, console: Console) -> "tuple[LoadedModel, Proof | None]":
    """The model without cuts that its stages do not come out right of, and what was found of the others."""
    from planner.executor import prove  # noqa: PLC0415 - torch

    if not budget_s:
        return loaded, None
    found = prove(loaded, budget_s=budget_s)
    for warning in found.warnings:
        console.warning(warning)
    if found.proof.differs_recomputed:
        console.warning(f"recomputation does not come out the same: {found.proof.differs_recomputed}")
    console.note(f"note: {found.proof}")
    return found.loaded, found.proof


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
