"""Parts of every emitted `train_jax.py`: command line, start of the training (`jax_training`), and memory report.

This module does not import jax at the top: a script that compiles for a TPU that is not attached must set options of
jax before the import.
"""

import argparse
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from planner.core.errors import ExitCode, PlannerError
from planner.core.extras import check_installed
from planner.core.values.devices import Accelerator
from planner.core.values.units import format_bytes
from planner.executor.watch.failure import print_error
from planner.tpu.extra import CHIPS, disable_tpu_search

if TYPE_CHECKING:
    from collections.abc import Iterator

    from planner.tpu.trainer import JaxTraining

__all__ = ["CompiledMemory", "JaxArguments", "fit_report", "jax_arguments", "jax_training"]


@dataclass(frozen=True, kw_only=True)
class JaxArguments:
    """Command-line arguments of an emitted `train_jax.py`."""

    steps: int
    seed: int
    device: str | None
    compile: str | None
    weights: str | None = None
    save: str | None = None


class CompiledMemory(NamedTuple):
    """Memory that a compiled program needs on every device, in bytes."""

    argument_bytes: int
    """Parameters, optimizer state, and the mini-batch."""
    temporary_bytes: int
    """Arrays that exist only during a step."""


def fit_report(
    needed: CompiledMemory, predicted_bytes: int, *, plan_bytes: int, chip: Accelerator
) -> tuple[str, ExitCode]:
    """Compare the memory of a compiled program with the plan's memory limit and with the chip's memory.

    Args:
        needed: Memory of every device, as the compiler reports it.
        predicted_bytes: Predicted memory of every device, for the text only.
        plan_bytes: Memory limit of the plan.
        chip: Chip for which the program was compiled.

    Returns:
        The report as text, and `OK` if the compiled program fits both limits, otherwise `NO`.
    """
    total = needed.argument_bytes + needed.temporary_bytes
    limit_bytes, whose = chip.memory_bytes, f"the memory that programs can use on a {chip.name}"
    if plan_bytes <= limit_bytes:
        limit_bytes, whose = plan_bytes, "the plan's limit"
    fits = total <= limit_bytes
    text = (
        f"every device: {format_bytes(total)} (parameters, optimizer and data {format_bytes(needed.argument_bytes)}, "
        f"temporaries {format_bytes(needed.temporary_bytes)})\n"
        f"predicted: {format_bytes(predicted_bytes)}, {predicted_bytes / total:.2f} times the compiled memory\n"
        f"{'fits' if fits else 'does not fit'}: {whose} is {format_bytes(limit_bytes)}"
    )
    return text, ExitCode.OK if fits else ExitCode.NO


def jax_arguments(description: str | None, *, steps: int, seed: int) -> JaxArguments:
    """Return the options in the command line of an emitted `train_jax.py`.

    Args:
        description: Description for `--help`.
        steps: Default of `--steps`.
        seed: Default of `--seed`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=steps, help=f"optimizer steps (default {steps})")
    parser.add_argument("--seed", type=int, default=seed, help=f"seed of parameters, data and dropout (default {seed})")
    parser.add_argument("--device", choices=("cpu", "tpu", "gpu"), help="platform of JAX; default: chosen by JAX")
    parser.add_argument(
        "--compile",
        metavar="v2",
        choices=CHIPS,
        help="only compile for this TPU, which need not be attached, and report whether the program fits",
    )
    parser.add_argument("--weights", metavar="FILE", help="start from a state dict of the whole model")
    parser.add_argument("--save", metavar="FILE", help="write the trained weights; .pt or .safetensors")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps must be at least 1, got {given.steps}")
    return JaxArguments(**vars(given))


@contextmanager
def jax_training(balance_path: str | Path, options: JaxArguments) -> "Iterator[JaxTraining]":
    """Provide the training of the plan in `balance_path` as one JAX program, for the body of a `with` statement.

    A `PlannerError` ends the process with its message and exit code 2. This happens if the model or the plan cannot run
    as one JAX program, or the extra `tpu` is not installed. `options` is the result of `jax_arguments`.
    """
    try:
        check_installed("tpu")
        if options.compile:
            disable_tpu_search()
        from planner.tpu.trainer import JaxTraining  # noqa: PLC0415 - jax

        yield JaxTraining(balance_path, options)
    except PlannerError as error:
        print_error(error)
        sys.exit(ExitCode.ERROR)
