"""Settings that must be made before jax, libtpu and torchax are imported.

This module imports none of these packages. Other modules of `planner.tpu` import them at the top. Users of such modules
first call `planner.core.extras.check_installed` and, if no TPU is attached, `disable_tpu_search`.
"""

import importlib.metadata
import os
from typing import Final

from planner.core.values.devices import ACCELERATORS

_PLANE = ("2x2", "4x4", "8x8")
_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")

TOPOLOGIES: Final[dict[str, tuple[tuple[str, ...], dict[str, str]]]] = {
    "v2": (_PLANE, {}),
    "v3": (_PLANE, {}),
    # The two cores of a chip are one device, as they are by default on Google Cloud.
    "v4": (_CUBE, {"chip_config_name": "megacore"}),
    "v5e": (("2x2", "2x4", "4x4", "4x8", "8x8"), {}),
    "v5p": (_CUBE, {}),
    "v6e": (("2x2", "2x4", "4x4", "4x8", "8x8"), {}),
}
"""Topologies of each chip, smallest first, and the chip's compiler options."""

CHIPS: Final = tuple(TOPOLOGIES)
"""Kinds of TPU that programs can be compiled for."""

_SETTINGS = {
    # Without a TPU, libtpu queries Google's metadata server for minutes.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v2-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Only one process may use a TPU; several may compile for it.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


def chip_of_device(reported: str) -> str:
    """Return the chip, such as `v2`, of a device with the name `reported`; empty if no known chip has this name."""
    chips = (known for known in ACCELERATORS if known.name.startswith("tpu:") and known.matches_name(reported))
    return next((chip.name.removeprefix("tpu:") for chip in chips), "")


def disable_tpu_search() -> None:
    """Set environment variables that keep jax and libtpu from searching for a TPU. Call it before you import these."""
    for setting, value in _SETTINGS.items():
        os.environ.setdefault(setting, value)


def package_versions() -> dict[str, str]:
    """Return the versions of all packages on which the compiled executables depend."""
    return {name: importlib.metadata.version(name) for name in ("torch", "torchax", "jax", "jaxlib", "libtpu")}
