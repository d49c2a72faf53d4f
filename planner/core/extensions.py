"""Registry of packages that extend the planner with functions, which are loaded by name.

The `__init__` of such a package lists its functions as `module:function`, in a table for each extension point:

    BACKENDS         profile backends    used with `--device <name>` or `--device <name>:…`
    FORMATS          emitters            `--format <name>`
    MEMORY_MODELS    memory models       used if the layers of a profile have values in their field <name>
"""

from importlib import import_module
from typing import Any, Final, Literal

_PACKAGES: Final = ("planner.tpu",)

ExtensionPoint = Literal["BACKENDS", "FORMATS", "MEMORY_MODELS"]


def registered_names(point: ExtensionPoint) -> tuple[str, ...]:
    """Return the names that extensions register at an extension point."""
    return tuple(_offered(point))


def load_extension(point: ExtensionPoint, name: str) -> Any:
    """Import and return the function that an extension registers as `name`."""
    module, _, function = _offered(point)[name].partition(":")
    return getattr(import_module(module), function)


def _offered(point: ExtensionPoint) -> dict[str, str]:
    tables = ((package, getattr(import_module(package), point)) for package in _PACKAGES)
    return {name: f"{package}.{place}" for package, table in tables for name, place in table.items()}
