"""Extras: the packages that `pip install gpipe-plan` does not bring, and what to type where one of them is missing.

    without an extra    numpy, pydantic, pyyaml, rich, typer     solve, check, show, emit, compare, sweep, verify --run
    train               torch, fvcore, networkx, safetensors     profile, verify, check --model, train.py
    milp                pulp, highspy                            solve --solver milp, bounds for several chunks
    tpu                 jax, libtpu, torchax, and train          profile --device tpu:v2, train_jax.py

Rooms that cannot be imported without an extra import what they hand on within `importing`; what is imported later asks
`check_installed` first.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Final, Literal, NamedTuple

from planner.core.errors import MissingPackageError

Extra = Literal["train", "milp", "tpu"]


class _Packages(NamedTuple):
    names: tuple[str, ...]
    """Of the modules, which are those of the packages as well."""
    purpose: str


_EXTRAS: Final[Mapping[Extra, _Packages]] = {
    "train": _Packages(("torch", "fvcore", "networkx", "safetensors"), "measuring and training need"),
    "milp": _Packages(("pulp", "highspy"), "integer programs need"),
    "tpu": _Packages(("jax", "libtpu", "torchax"), "TPUs need"),
}


def is_installed(package: str) -> bool:
    """Whether there is such a package; it is not imported."""
    return find_spec(package) is not None


def packages_of(extra: Extra) -> tuple[str, ...]:
    """The packages of an extra; those of other extras that it brings along are left out."""
    return _EXTRAS[extra].names


def absent_from(extra: Extra) -> tuple[str, ...]:
    """The packages of an extra that are not installed."""
    return tuple(name for name in packages_of(extra) if not is_installed(name))


def command_for(extra: Extra) -> str:
    """What to type to have an extra's packages.

    Where torch is installed, the rest of `train` is named: the extra would have pip replace a torch of another release.
    """
    absent = absent_from(extra)
    if extra == "train" and absent and "torch" not in absent:
        return f"pip install {' '.join(absent)}"
    return f"pip install 'gpipe-plan[{extra}]'"


def check_installed(extra: Extra) -> None:
    """Imports nothing.

    Raises:
        MissingPackageError: A package of the extra is not installed.
    """
    if absent := absent_from(extra):
        raise _missing(extra, absent)


@contextmanager
def importing(extra: Extra) -> Iterator[None]:
    """Says of what is imported within, where a package of an extra is missing, how to install it.

    Raises:
        MissingPackageError: In place of the `ModuleNotFoundError` for such a package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        absent = absent_from(extra)
        if error.name is None or error.name.partition(".")[0] not in absent:
            raise
        raise _missing(extra, absent) from error


def _missing(extra: Extra, absent: tuple[str, ...]) -> MissingPackageError:
    *others, last = absent
    names = f"{', '.join(others)} and {last}" if others else last
    hint = command_for(extra)
    error = MissingPackageError(
        f"{names} {'are' if others else 'is'} not installed, which {_EXTRAS[extra].purpose}", hint=hint
    )
    # A script ends in a traceback where a command of ours would print the hint: there it stands behind the message.
    error.add_note(f"hint: {hint}")
    return error


@contextmanager
def without_output() -> Iterator[None]:
    """Drop what the block writes to file descriptor 1: HiGHS 1.16 prints a banner whatever its options say."""
    try:
        kept = os.dup(1)
    except OSError:  # it is closed
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
        ctypes.CDLL(None).fflush(None)  # what C's `printf` holds back
        os.dup2(kept, 1)
        os.close(kept)
