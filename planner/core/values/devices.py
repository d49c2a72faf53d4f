"""Accelerators by name, as in `gpipe-plan check --device h100`.

Memory is the vendor's figure, with "GB" read as 10^9 bytes. Boards often have a little more (an H100 of "80 GB" reports
85.0 GB), so results for a name are on the safe side; `--mem` takes exact sizes. For a TPU, memory is what programs can
use, because the compiler reserves a part.
"""

import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from planner.core.errors import UsageError

TORCH_KINDS: Final = ("cpu", "cuda")
"""Kinds of device that the bundled executor trains on; each has a class in `planner.device.kinds`."""

_GB = 10**9
_GIB = 2**30

ASSUMED_RESERVE_BYTES: Final = _GB
"""Reserve assumed for a device that is not present. It is not measured; `--reserve` overrides it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Kind of accelerator: a card, a chip, or a core of a chip, whichever runs one stage."""

    name: str
    memory_bytes: int
    called: tuple[str, ...]
    """Lower-case words that all occur in the name reported by such a device (`device.name` of a profile)."""

    def matches_name(self, reported: str) -> bool:
        """Return True if a device that reports the name `reported` may be this accelerator."""
        return set(self.called) <= set(re.split(r"[^a-z0-9]+", reported.lower()))


ACCELERATORS: Final = (
    # NVIDIA V100 datasheet (2020): 16 or 32 GB HBM2.
    Accelerator(name="v100", memory_bytes=16 * _GB, called=("v100",)),
    Accelerator(name="v100-32gb", memory_bytes=32 * _GB, called=("v100", "32gb")),
    # NVIDIA T4 datasheet: 16 GB GDDR6.
    Accelerator(name="t4", memory_bytes=16 * _GB, called=("t4",)),
    # NVIDIA A10 datasheet: 24 GB GDDR6.
    Accelerator(name="a10", memory_bytes=24 * _GB, called=("a10",)),
    # GeForce RTX 3090 and 4090 product pages: 24 GB GDDR6X.
    Accelerator(name="rtx3090", memory_bytes=24 * _GB, called=("rtx", "3090")),
    Accelerator(name="rtx4090", memory_bytes=24 * _GB, called=("rtx", "4090")),
    # NVIDIA A100 datasheet: 40 GB HBM2 or 80 GB HBM2e.
    Accelerator(name="a100-40gb", memory_bytes=40 * _GB, called=("a100", "40gb")),
    Accelerator(name="a100-80gb", memory_bytes=80 * _GB, called=("a100", "80gb")),
    # NVIDIA L40S datasheet: 48 GB GDDR6.
    Accelerator(name="l40s", memory_bytes=48 * _GB, called=("l40s",)),
    # NVIDIA H100 datasheet: 80 GB (SXM HBM3, PCIe HBM2e).
    Accelerator(name="h100", memory_bytes=80 * _GB, called=("h100",)),
    # NVIDIA H200 datasheet: 141 GB HBM3e.
    Accelerator(name="h200", memory_bytes=141 * _GB, called=("h200",)),
    # NVIDIA DGX B200 datasheet: 1,440 GB over 8 GPUs.
    Accelerator(name="b200", memory_bytes=180 * _GB, called=("b200",)),
    # NVIDIA GB200 NVL72 datasheet: 13.4 TB over 72 GPUs.
    Accelerator(name="gb200", memory_bytes=186 * _GB, called=("gb200",)),
    # AMD Instinct data sheets: MI250X 128 GB over two dies, which are two devices; MI300X 192 GB HBM3.
    Accelerator(name="mi250x", memory_bytes=64 * _GB, called=("mi250x",)),
    Accelerator(name="mi300x", memory_bytes=192 * _GB, called=("mi300x",)),
    # The TPU figures are what libtpu 0.0.52 reports as available in its error message ("exceeds available HBM"). That
    # is a little less than in Google Cloud's "TPU system architecture". v2 and v3 chips have two cores that are
    # separate devices. From v4 on, the two cores of a chip (v5e and v6e have one) are one device.
    Accelerator(name="tpu:v2", memory_bytes=int(7.48 * _GIB), called=("tpu", "v2")),
    Accelerator(name="tpu:v3", memory_bytes=int(15.48 * _GIB), called=("tpu", "v3")),
    Accelerator(name="tpu:v4", memory_bytes=int(30.75 * _GIB), called=("tpu", "v4")),
    Accelerator(name="tpu:v5e", memory_bytes=int(15.75 * _GIB), called=("tpu", "v5e")),
    Accelerator(name="tpu:v5p", memory_bytes=int(95.73 * _GIB), called=("tpu", "v5p")),
    Accelerator(name="tpu:v6e", memory_bytes=int(31.24 * _GIB), called=("tpu", "v6e")),
)


def accelerator(name: str) -> Accelerator:
    """Return the accelerator called `name`, in upper or lower case.

    Raises:
        UsageError: The name is unknown; the hint lists similar names.
    """
    by_name = {listed.name: listed for listed in ACCELERATORS}
    wanted = name.lower()
    if wanted in by_name:
        return by_name[wanted]
    near = [listed for listed in by_name if listed.startswith(wanted)] or get_close_matches(wanted, by_name, n=3)
    hint = f"did you mean {' or '.join(f'`{listed}`' for listed in near)}?" if near else f"one of {', '.join(by_name)}"
    raise UsageError(f"unknown device `{name}`", hint=f"{hint}; `--mem` takes any size")


def accelerators_with(need_bytes: int) -> tuple[Accelerator, ...]:
    """Return the accelerators with at least `need_bytes` of memory, the smallest first."""
    able = [listed for listed in ACCELERATORS if listed.memory_bytes >= need_bytes]
    return tuple(sorted(able, key=lambda listed: listed.memory_bytes))


def training_kind(profiled: str) -> str:
    """Return the kind of device to train on: `profiled`, or `cpu` if torch cannot train on this kind."""
    return profiled if profiled in TORCH_KINDS else "cpu"
