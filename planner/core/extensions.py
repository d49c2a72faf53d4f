"""Registry of packages that extend the planner, whose functions the planner loads by name.

The `__init__` of such a package lists its functions as `module:function`, in a table for each extension point:

    BACKENDS    profile backends    `--device <name>`, up to the first colon
    FORMATS     emitters            `--format <name>`
    LAWS        memory laws         profiles whose layers have the field <name> of `LayerProfile`
"""

from importlib import import_module
from typing import Any, Final, Literal

_PACKAGES: Final = ("planner.tpu",)

Seam = Literal["BACKENDS", "FORMATS", "LAWS"]


def names_of(seam: Seam) -> tuple[str, ...]:
    """Return the names that extensions register at an extension point."""
    return tuple(_offered(seam))


def load(seam: Seam, name: str) -> Any:
    """Import and return the function that an extension registers under this name."""
    module, _, function = _offered(seam)[name].partition(":")
    return getattr(import_module(module), function)


def _offered(seam: Seam) -> dict[str, str]:
    tables = ((package, getattr(import_module(package), seam)) for package in _PACKAGES)
    return {name: f"{package}.{place}" for package, table in tables for name, place in table.items()}
