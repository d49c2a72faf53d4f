"""Small random planning problems for hypothesis, from just infeasible to loose."""

from dataclasses import dataclass

from hypothesis import strategies as st

from planner.core.cluster import Link
from planner.core.plan import Inputs
from planner.core.profile import BoundaryTensor, Device, LayerProfile, MemoryDetail, Profile
from tests.support.profiles import inputs_of


@dataclass(frozen=True)
class Problem:
    """A profile and what is asked of it."""

    profile: Profile
    inputs: Inputs


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """L up to 6, K up to 4, batch up to 8, one or several micro-batch sizes, caps, links, overheads, exact records."""
    num_layers = draw(st.integers(1, 6))
    batch = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    sizes = draw(st.sampled_from([(batch,), (1,), (1, batch), (1, 2, batch)]))
    sizes = tuple(sorted({s for s in sizes if s <= batch}))
    exact = draw(st.booleans())
    layers = tuple(draw(_layers(n, sizes, exact=exact, last=n == num_layers - 1)) for n in range(num_layers))
    devices = draw(st.integers(1, min(4, num_layers)))
    cap = st.integers(50, 4000)
    caps = draw(st.one_of(cap.map(lambda c: (c,) * devices), st.tuples(*([cap] * devices))))
    link = draw(
        st.sampled_from(
            [
                Link(),
                Link(latency_us=3.0, bytes_per_s=2e7),
                Link(latency_us=0.5, bytes_per_s=1e6),
                Link(latency_us=2.0, bytes_per_s=5e6, blocking=True),
            ]
        )
    )
    return Problem(
        profile=Profile(device=Device(kind="cpu"), micro_batch_sizes=sizes, layers=layers),
        inputs=inputs_of(
            devices,
            batch,
            memory_bytes=caps,
            link=link,
            recompute=draw(st.sampled_from(["auto", "auto", "never", "except-last", "always"])),
            reserve_bytes=draw(st.sampled_from([0, 100])),
            overhead_us=draw(st.sampled_from([0.0, 1.5])),
        ),
    )


@st.composite
def _layers(draw: st.DrawFn, n: int, sizes: tuple[int, ...], *, exact: bool, last: bool) -> LayerProfile:
    time = st.one_of(st.just(0.0), st.sampled_from([1.0, 2.0, 5.0]), st.floats(0.1, 40.0).map(lambda x: round(x, 1)))
    forward, backward = draw(time), draw(time)
    fixed = draw(st.sampled_from([0.0, 2.0]))
    output, saved, peak = (draw(st.integers(0, 60)) for _ in range(3))
    if last:
        output = 0
    kept = draw(st.booleans())
    details = tuple(
        MemoryDetail(
            internal_bytes=saved * s,
            inputs=(BoundaryTensor(bytes=1, kept=draw(st.booleans())),),
            outputs=(BoundaryTensor(bytes=output * s, kept=kept, alias=draw(st.sampled_from([-1, -1, 0]))),),
            forward_peak_bytes=(saved + output + peak) * s,
            no_grad_peak_bytes=(output + peak) * s,
            first_backward_peak_bytes=(saved + 2 * peak) * s + 40,
            backward_peak_bytes=(saved + 2 * peak) * s,
        )
        for s in sizes
    )
    return LayerProfile(
        name=f"layers.{n}",
        parameter_bytes=draw(st.integers(0, 200)),
        optimizer_bytes=draw(st.integers(0, 200)),
        optimizer_us=draw(st.sampled_from([0.0, 3.0])),
        forward_us=tuple(fixed + forward * s for s in sizes),
        backward_us=tuple(backward * s for s in sizes),
        output_bytes=tuple(output * s for s in sizes),
        saved_bytes=tuple(saved * s for s in sizes),
        forward_peak_bytes=tuple(peak * s for s in sizes),
        backward_peak_bytes=tuple(2 * peak * s for s in sizes),
        detail=details if exact else (),
    )
