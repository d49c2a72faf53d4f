"""Links as they were measured between neighbouring processes, and latency and bandwidth fitted to them.

These are the values behind `links.yaml`; `docs/file-formats.md` describes every field.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from planner.core.values.cluster import Link
from planner.core.values.profile import Device, Environment, Generator

LINKS_SCHEMA: Final = "gpipe-plan/links/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """One boundary, between a process and the next."""

    link: Link
    """What the planner takes the boundary for."""
    sample_bytes: tuple[int, ...] = ()
    sample_us: tuple[float, ...] = ()
    """Median time of moving so many bytes once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Every boundary of a pipeline, in order."""

    schema: Literal["gpipe-plan/links/v1"] = LINKS_SCHEMA
    generator: Generator | None = None
    device: Device
    """What the first process runs on."""
    environment: Environment
    backend: str
    """The backend of `torch.distributed` that moved the samples."""
    boundaries: tuple[MeasuredLink, ...]


def fit_link(sizes_bytes: Sequence[int], times_us: Sequence[float], *, blocking: bool) -> Link:
    """Latency and bandwidth by least squares of the relative errors; neither is negative.

    Relative, because sizes spread over orders of magnitude: one per cent of the largest transfer would outweigh the
    latency that the small ones tell.
    """
    sizes, times = np.asarray(sizes_bytes, float), np.maximum(times_us, 0.1)
    relative = np.stack([1 / times, sizes / times], axis=1)
    latency_us, per_byte_us = np.linalg.lstsq(relative, np.ones_like(times))[0]
    if latency_us < 0:
        latency_us, per_byte_us = 0.0, _factor_of(relative[:, 1])
    elif per_byte_us <= 0:
        latency_us, per_byte_us = _factor_of(relative[:, 0]), 0.0
    return Link(
        latency_us=round(float(latency_us), 1),
        bytes_per_s=float(f"{1e6 / per_byte_us:.4g}") if per_byte_us else 0.0,
        blocking=blocking,
    )


def _factor_of(column: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    """The factor that brings a single column nearest to ones."""
    return float(column.sum() / (column @ column))
