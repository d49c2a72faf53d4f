"""`gpipe-plan profile`: measure every layer of a model."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Annotated

import typer

from planner.api.option import option_values
from planner.api.options.profiling import ProfileOptions
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import Format, Output, Quiet, check_format, with_options

if TYPE_CHECKING:
    from planner.core.values.profile import LayerProfile, Profile


@with_options(ProfileOptions)
def profile(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="model.py[:ENTRY], or a Hugging Face config.json; see docs/guide.md."),
    ] = None,
    output: Output = "profile.yaml",
    *,
    options: ProfileOptions,
    format_: Format = "text",
    quiet: Quiet = False,
) -> None:
    """Measure time and memory of every layer, at several micro-batch sizes."""
    from planner.api.profiling import profile_header
    from planner.files import dump, json_text
    from planner.show.terminal.profile import profile_text

    console = Console(quiet=quiet)
    as_json = check_format(format_)
    measured = _measured(console, model, replace(options, output=None if output == "-" else output))
    if output == "-":
        console.result(dump(measured, as_json=as_json, header=profile_header(model, measured)))
        return
    console.result(json_text(measured) if as_json else profile_text(measured, style_for_stdout()))
    console.note(f"wrote {output}")
    which = "" if output == "profile.yaml" else f" {output}"
    if large := _too_large(measured):
        console.note(f"note: {large}")
    console.note(f"next: gpipe-plan solve{which} {_devices(measured)}{_cap(options.device, measured)}")


def _measured(console: Console, model: str | None, options: ProfileOptions) -> "Profile":
    import planner
    from planner.api.profiling import partial_profile_path

    try:
        # Output of the user's code is not part of the result.
        with (
            contextlib.redirect_stdout(sys.stderr),
            console.progress(f"profiling {model or options.preset or options.from_formula}") as progress,
        ):
            reporting = replace(
                options, progress=progress, note=lambda text: console.note(f"note: {text}"), warn=console.warning
            )
            return planner.profile(model, **option_values(reporting))
    except KeyboardInterrupt as interrupt:
        unfinished = partial_profile_path(options.output)
        partial = getattr(interrupt, "partial", None)
        if partial is not None and partial.measurements and unfinished is not None:
            console.note(f"wrote {unfinished}; the same command continues from it")
        raise


def _devices(measured: "Profile") -> str:
    from planner.core.cost.width import layers_by_width

    widths = layers_by_width(measured)
    counts = [width * _stages(layers, 0.5 * measured.device.memory_bytes) for width, layers in widths.items()]
    need = max(2, min(filter(None, counts), default=len(measured.layers) * max(widths))) * measured.expert_parallel
    devices = f"--devices {need}" if need <= 8 else f"--nodes {ceil(need / 8)}x8"
    if measured.expert_parallel > 1:
        return f"{devices} --replicas auto --batch {measured.expert_parallel * max(measured.micro_batch_sizes)}"
    return devices if need <= 8 else f"{devices} --replicas auto"


def _stages(layers: Sequence["LayerProfile"], usable_bytes: float) -> int:
    if not usable_bytes:
        return 1
    stages, free_bytes = 1, usable_bytes
    for need in map(_state_bytes, layers):
        if need > usable_bytes:
            return 0
        stages, free_bytes = (stages + 1, usable_bytes) if need > free_bytes else (stages, free_bytes)
        free_bytes -= need
    return stages


def _state_bytes(layer: "LayerProfile") -> int:
    return layer.parameter_bytes + layer.created_gradient_bytes + layer.optimizer_bytes + layer.cast_bytes


def _too_large(measured: "Profile") -> str:
    from planner.core.cost.width import layers_by_width, tensor_parallel_widths
    from planner.core.values.units import format_bytes

    largest = max(layers_by_width(measured)[tensor_parallel_widths(measured)[-1]], key=_state_bytes)
    limit = measured.device.memory_bytes
    if "formula" not in measured.model.settings or not limit or _state_bytes(largest) < limit:
        return ""
    return (
        f"parameters and optimizer of `{largest.name}` alone take {format_bytes(_state_bytes(largest))}; "
        "divide layers with `--tensor-parallel`, and experts with `--expert-parallel`"
    )


def _cap(device: str, measured: "Profile") -> str:
    if device.startswith("tpu:"):
        return f" --mem {device}"
    return "" if measured.device.memory_bytes else " --mem 8GB"
