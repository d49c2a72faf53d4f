"""Extras: packages that `pip install gpipe-plan` does not install, and commands to install them.

    without an extra    numpy, pydantic, pyyaml, rich, typer     solve, check, show, emit, compare, sweep, verify --run
    train               torch, fvcore, networkx, safetensors     profile, verify, check --model, train.py
    milp                pulp, highspy                            solve --solver milp, lower bounds for several chunks
    tpu                 extra `train`, jax, libtpu, torchax      profile --device tpu:v2, train_jax.py

Code imports the packages of an extra within `importing`. `check_installed` reports missing packages without an import.
The model of a config.json also needs transformers, which is in no extra.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Final, Literal, NamedTuple

from planner.core.errors import MissingPackageError

Extra = Literal["train", "milp", "tpu"]


class _Packages(NamedTuple):
    """Packages of an extra, and the text of error messages about them."""

    names: tuple[str, ...]
    """Names of the modules, which are also the names of the packages."""
    purpose: str


_EXTRAS: Final[Mapping[Extra, _Packages]] = {
    "train": _Packages(("torch", "fvcore", "networkx", "safetensors"), "measuring and training need"),
    "milp": _Packages(("pulp", "highspy"), "integer programs need"),
    "tpu": _Packages(("jax", "libtpu", "torchax"), "TPUs need"),
}


def is_installed(package: str) -> bool:
    """Return True if a package is installed, without importing it."""
    return find_spec(package) is not None


def packages_of(extra: Extra) -> tuple[str, ...]:
    """Return the packages of an extra, without those of included extras."""
    return _EXTRAS[extra].names


def missing_packages(extra: Extra) -> tuple[str, ...]:
    """Return the packages of an extra that are not installed."""
    return tuple(name for name in packages_of(extra) if not is_installed(name))


def install_command(extra: Extra) -> str:
    """Return the command that installs the packages of an extra.

    If torch is installed, only the missing packages of `train` are named, because the whole extra could replace torch.
    """
    absent = missing_packages(extra)
    if extra == "train" and absent and "torch" not in absent:
        return f"pip install {' '.join(absent)}"
    return f"pip install 'gpipe-plan[{extra}]'"


def check_installed(extra: Extra) -> None:
    """Check that the packages of an extra are installed, without importing them.

    Raises:
        MissingPackageError: A package of the extra is not installed.
    """
    if absent := missing_packages(extra):
        raise _missing(absent, _EXTRAS[extra].purpose, install_command(extra))


def check_configuration_packages(*, alternative: str = "") -> None:
    """Check that the packages that are needed to build the model of a config.json are installed.

    Args:
        alternative: Last part of the error's hint: an option that does not need the packages; empty for none.

    Raises:
        MissingPackageError: A package is not installed.
    """
    if absent := (*missing_packages("train"), *(() if is_installed("transformers") else ("transformers",))):
        command = install_command("train") if missing_packages("train") else "pip install"
        hint = command + " transformers" * ("transformers" in absent) + (f"; {alternative}" if alternative else "")
        raise _missing(absent, "building the model of a config.json needs", hint)


@contextmanager
def importing(extra: Extra) -> Iterator[None]:
    """Convert import errors in the block to `MissingPackageError`, with the command to install the package.

    Raises:
        MissingPackageError: A package of the extra is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        absent = missing_packages(extra)
        if error.name is None or error.name.partition(".")[0] not in absent:
            raise
        raise _missing(absent, _EXTRAS[extra].purpose, install_command(extra)) from error


def _missing(absent: tuple[str, ...], purpose: str, hint: str) -> MissingPackageError:
    *others, last = absent
    names = f"{', '.join(others)} and {last}" if others else last
    error = MissingPackageError(f"{names} {'are' if others else 'is'} not installed, which {purpose}", hint=hint)
    # Commands print the hint. The traceback of a script shows this note instead.
    error.add_note(f"hint: {hint}")
    return error


@contextmanager
def discarding_stdout() -> Iterator[None]:
    """Discard the block's output to file descriptor 1, because HiGHS 1.16 always prints a banner."""
    try:
        kept = os.dup(1)
    except OSError:  # standard output is closed
        yield
        return
    if sys.stdout is not None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    try:
        yield
    finally:
        import ctypes  # noqa: PLC0415 - only searches with HiGHS need it

        ctypes.CDLL(None).fflush(None)  # writes C's output buffers
        os.dup2(kept, 1)
        os.close(kept)
