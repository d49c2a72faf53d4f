"""Hand-written profiles, for tests that need no model."""

from collections.abc import Sequence

from planner.core.values.cluster import Link
from planner.core.values.plan import Inputs, ProfileReference, RecomputePolicy
from planner.core.values.profile import Device, LayerProfile, Profile

UNLIMITED = 10**18


def profile_of(
    forward_us: Sequence[float],
    backward_us: Sequence[float] | None = None,
    *,
    parameter_bytes: int = 0,
    output_bytes: int = 0,
    saved_bytes: int = 0,
    size: int = 1,
) -> Profile:
    """Return a chain with these times, profiled at one micro-batch size."""
    backward = [0.0] * len(forward_us) if backward_us is None else backward_us
    layers = tuple(
        LayerProfile(
            name=f"layers.{n}",
            parameter_bytes=parameter_bytes,
            forward_us=(float(f),),
            backward_us=(float(b),),
            output_bytes=(output_bytes,),
            saved_bytes=(saved_bytes,),
        )
        for n, (f, b) in enumerate(zip(forward_us, backward, strict=True))
    )
    return Profile(device=Device(kind="cpu", name="by hand"), micro_batch_sizes=(size,), layers=layers)


def inputs_of(
    devices: int,
    batch: int,
    *,
    memory_bytes: int | tuple[int, ...] = UNLIMITED,
    link: Link | None = None,
    recompute: RecomputePolicy = "auto",
    reserve_bytes: int = 0,
    headroom: float = 0.0,
    overhead_us: float = 0.0,
    extrapolate: bool = False,
) -> Inputs:
    """Return the inputs that `gpipe-plan solve` would record for these options."""
    caps = memory_bytes if isinstance(memory_bytes, tuple) else (memory_bytes,) * devices
    return Inputs(
        profile=ProfileReference(path="profile.yaml", digest="sha256:0"),
        devices=devices,
        memory_bytes=caps,
        batch=batch,
        link=link or Link(),
        recompute=recompute,
        reserve_bytes=reserve_bytes,
        headroom=headroom,
        overhead_us=overhead_us,
        extrapolate=extrapolate,
    )
