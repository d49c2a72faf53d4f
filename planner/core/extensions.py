"""Packages that extend the planner; other packages load what these offer by name, and never import them.

The `__init__` of such a package lists its functions as `module:function`, in a table for each seam:

    BACKENDS    profile backends    `--device <name>`, up to the first colon
    FORMATS     emitters            `--format <name>`
    LAWS        memory laws         profiles whose layers have the field <name> of `LayerProfile`
"""

from importlib import import_module
from typing import Any, Final, Literal

_PACKAGES: Final = ("planner.tpu",)

Seam = Literal["BACKENDS", "FORMATS", "LAWS"]


def names_of(seam: Seam) -> tuple[str, ...]:
    """Return the names that extensions offer at a seam."""
    return tuple(_offered(seam))


def load(seam: Seam, name: str) -> Any:
    """Import and return what an extension offers under this name."""
    module, _, function = _offered(seam)[name].partition(":")
    return getattr(import_module(module), function)


def _offered(seam: Seam) -> dict[str, str]:
    tables = ((package, getattr(import_module(package), seam)) for package in _PACKAGES)
    return {name: f"{package}.{place}" for package, table in tables for name, place in table.items()}
