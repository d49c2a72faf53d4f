"""Links measured between neighboring processes, with latency and bandwidth fitted to the measurements."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from planner.core.values.cluster import Link
from planner.core.values.profile import Device, Environment, WritingTool

LINKS_SCHEMA: Final = "gpipe-plan/links/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """Link measured between two neighboring processes."""

    link: Link
    """Latency and bandwidth that the planner uses."""
    sample_bytes: tuple[int, ...] = ()
    sample_us: tuple[float, ...] = ()
    """Median time of a transfer, for each size in `sample_bytes`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Links between all neighboring processes of a pipeline, in order (`links.yaml`)."""

    schema: Literal["gpipe-plan/links/v1"] = LINKS_SCHEMA
    generator: WritingTool | None = None
    device: Device
    """Device that rank 0 used in the measurement."""
    environment: Environment
    backend: str
    """Backend of `torch.distributed` in the measurement."""
    boundaries: tuple[MeasuredLink, ...]


def fit_link(sizes_bytes: Sequence[int], times_us: Sequence[float], *, blocking: bool) -> Link:
    """Return the link whose latency and bandwidth fit measured times best.

    The fit minimizes the sum of squared relative errors, because sizes differ by orders of magnitude.

    Args:
        sizes_bytes: Sizes of the transfers.
        times_us: Measured times in microseconds, one per size.
        blocking: True if the receiver is busy during a transfer.
    """
    sizes, times = np.asarray(sizes_bytes, float), np.maximum(times_us, 0.1)
    relative = np.stack([1 / times, sizes / times], axis=1)
    latency_us, per_byte_us = np.linalg.lstsq(relative, np.ones_like(times))[0]
    if latency_us < 0:
        latency_us, per_byte_us = 0.0, _factor_to_ones(relative[:, 1])
    elif per_byte_us <= 0:
        latency_us, per_byte_us = _factor_to_ones(relative[:, 0]), 0.0
    return Link(
        latency_us=round(float(latency_us), 1),
        bytes_per_s=float(f"{1e6 / per_byte_us:.4g}") if per_byte_us else 0.0,
        blocking=blocking,
    )


def _factor_to_ones(column: "np.ndarray[tuple[int], np.dtype[np.float64]]") -> float:
    return float(column.sum() / (column @ column))
