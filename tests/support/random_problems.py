"""Small random planning problems for hypothesis, from just infeasible to unconstrained.

Times are often small integers, so that many plans are equally fast. Memory limits are near the needs of plans that
the oracle finds.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hypothesis import strategies as st

from planner.core.values.cluster import Link
from planner.core.values.plan import Inputs, RecomputePolicy, ScheduleName
from planner.core.values.profile import BoundaryTensor, Device, LayerProfile, MemoryDetail, Profile
from tests.support.brute_force import Space
from tests.support.profiles import UNLIMITED, inputs_of

LINKS = (
    Link(),
    Link(latency_us=2.0, bytes_per_s=1e8),
    Link(latency_us=50.0, bytes_per_s=1e7),
    Link(latency_us=2.0, bytes_per_s=5e7, blocking=True),
)

POLICIES: tuple[RecomputePolicy, ...] = ("auto", "auto", "auto", "never", "except-last", "always")

TIGHT = (1.0, 1.0, 1.05, 1.3, 2.0, 0.98)
"""Caps as multiples of what a plan needs."""


@dataclass(frozen=True)
class Problem:
    """A profile and a request, with all possible plans."""

    profile: Profile
    inputs: Inputs
    micro_batches: int | None
    space: Space = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class Features:
    """Optional features of drawn problems."""

    schedules: tuple[ScheduleName, ...] = ("gpipe",)
    chunks: tuple[int, ...] = (1,)
    unlike: bool = False
    """Caps and speeds that differ between devices, and links between nodes."""
    links: bool = False
    """Every link by itself."""
    replicas: tuple[int, ...] = (1,)
    rules: bool = False
    """Layers that must, or must not, be in one stage."""
    tied: bool = False
    policies: tuple[RecomputePolicy, ...] = POLICIES
    most_layers: int = 6
    most_devices: int = 4
    caps: tuple[float, ...] = TIGHT


@st.composite
def problems(draw: st.DrawFn, features: Features = Features()) -> Problem:
    """Draw L up to 6, K up to 4, batch up to 8, micro-batch sizes, limits, links, overheads and exact records."""
    batch = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 8, 8]))
    sizes = draw(st.sampled_from([(batch,), (1,), (1, batch), (1, 2, batch)]))
    profile = draw(profiles(tuple(sorted({s for s in sizes if s <= batch})), features))
    num_layers = len(profile.layers)
    most = min(features.most_devices, num_layers) if features.replicas == (1,) else features.most_devices
    devices = draw(_often_large(most))
    replicas = draw(st.sampled_from([r for r in features.replicas if r <= devices and not (r and batch % r)] or [1]))
    schedule = draw(st.sampled_from(features.schedules))
    chunks = [v for v in features.chunks if 2 * v <= num_layers and devices >= 2]
    if schedule == "interleaved" and not chunks:
        schedule = "1f1b"
    # What every replica gets must be covered, whichever number of micro-batches it is split into.
    if replicas > 1 and batch // replicas < min(profile.micro_batch_sizes):
        replicas = 1
    inputs = replace(
        inputs_of(
            min(devices, num_layers) if replicas == 1 else devices,
            batch,
            link=draw(st.sampled_from(LINKS)),
            recompute=draw(st.sampled_from(features.policies)),
            reserve_bytes=draw(st.sampled_from([0, 100])),
            overhead_us=draw(st.sampled_from([0.0, 4.0])),
        ),
        schedule=schedule,
        chunks=draw(st.sampled_from(chunks)) if schedule in ("interleaved", "auto") and chunks else 1,
        replicas=replicas,
        allreduce=draw(st.sampled_from([None, *LINKS[1:3]])) if replicas != 1 else None,
    )
    if features.unlike or replicas != 1:
        inputs = draw(_nodes(inputs))
    if features.unlike:
        inputs = replace(inputs, speeds=draw(st.sampled_from([(), _drawn_speeds(draw, inputs.devices)])))
    if features.links:
        links = draw(st.lists(st.sampled_from(LINKS), min_size=max(1, inputs.devices - 1), max_size=inputs.devices))
        inputs = replace(inputs, link=Link(), inter_link=None, node_devices=0, links=tuple(links))
    if features.rules:
        inputs = draw(_rules(inputs, [layer.name for layer in profile.layers]))
    space = Space(profile, inputs)
    counts = sorted({block.micro_batches for block in space.blocks})
    micro_batches = draw(st.sampled_from([None, None, None, *counts[-1:], *counts[:1]]))
    space = space.only(micro_batches=micro_batches)
    space = space.under(_caps(draw, space, features))
    return Problem(profile, space.inputs, micro_batches, space)


def num_examples(count: int) -> int:
    """Return `count` in `make nightly`, else a fifth of it."""
    return count if os.environ.get("TIMED") else count // 5


def _often_large(most: int) -> st.SearchStrategy[int]:
    """Draw from 1 to `most`, half of the time `most` or one less."""
    return st.sampled_from([*range(1, most + 1), *range(max(1, most - 1), most + 1), *[most] * (most - 2)])


def _drawn_speeds(draw: st.DrawFn, devices: int) -> tuple[float, ...]:
    return tuple(draw(st.lists(st.sampled_from([1.0, 2.0, 0.5]), min_size=devices, max_size=devices)))


def _caps(draw: st.DrawFn, space: Space, features: Features) -> tuple[int, ...]:
    """Draw memory limits near the equal need of all devices, near the needs of some plan, or none."""
    devices = space.inputs.devices
    plans = sum(len(block.cuts) for block in space.blocks)
    kinds = ["none", "alike", "alike", "alike"] + ["plan"] * 3 * (features.unlike and space.inputs.replicas == 1)
    kind = draw(st.sampled_from(kinds)) if plans else "none"
    if kind == "none":
        return (UNLIMITED,) * devices
    scale = draw(st.sampled_from(features.caps))
    if kind == "alike":
        return (int(space.smallest_cap_bytes() * scale),) * devices
    number = draw(st.integers(0, plans - 1))
    for block in space.blocks:
        if number < len(block.cuts):
            needs = dict(enumerate(block.peaks[number]))
            break
        number -= len(block.cuts)
    others = draw(st.integers(0, 4000))
    return tuple(int(needs.get(d, others) * scale) for d in range(devices))


@st.composite
def _nodes(draw: st.DrawFn, inputs: Inputs) -> Inputs:
    """Draw nodes of one or two devices with another link between them, or none."""
    inter_link = draw(st.sampled_from([None, *LINKS]))
    return replace(inputs, inter_link=inter_link, node_devices=draw(st.sampled_from([0, 1, 2])) if inter_link else 0)


@st.composite
def _rules(draw: st.DrawFn, inputs: Inputs, names: Sequence[str]) -> Inputs:
    """Draw one or two groups of layers that must be together, and groups that must be apart."""
    group = st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True).map(tuple)
    groups = st.sampled_from([0, 0, 1, 2]).flatmap(lambda most: st.lists(group, max_size=most)).map(tuple)
    return replace(inputs, together=draw(groups), apart=draw(groups))


# ---- profiles


@st.composite
def profiles(draw: st.DrawFn, sizes: tuple[int, ...], features: Features) -> Profile:
    """Draw chains of equal layers, of independent layers, with one huge layer, or with a frozen beginning."""
    num_layers = draw(_often_large(features.most_layers))
    exact = draw(st.booleans())
    alike = draw(st.sampled_from([True, False, False]))
    fine = draw(st.booleans())
    one = layers(sizes, exact=exact, fine=fine)
    chosen = [draw(one)] * num_layers if alike else [draw(one) for _ in range(num_layers)]
    frozen = draw(st.sampled_from([0, 0, 0, 1, num_layers // 2]))
    huge = draw(st.sampled_from([None, None, None, 0, num_layers // 2, num_layers - 1]))
    tied = draw(st.sampled_from([(0, num_layers - 1), (num_layers // 2, num_layers - 1)])) if features.tied else ()
    made = []
    for n, layer in enumerate(chosen):
        named = replace(layer, name=f"layers.{n}")
        if n < frozen:
            # Who writes a profile by hand may say no more than that.
            named = _frozen(named) if exact or draw(st.booleans()) else replace(named, gradient_bytes=0)
        if n == huge:
            named = _scaled(named, 10)
        if n == num_layers - 1:
            named = _last(named)
        made.append(_connected(made[-1], named) if made else named)
    if exact and draw(st.booleans()):
        _skip(draw, made, sizes)
    if tied and tied[0] != tied[1]:
        _tie(draw, made, *tied)
    peaks: tuple[Literal["largest", "sum"], ...] = ("largest", "sum")
    peak = draw(st.sampled_from(peaks))
    return Profile(device=Device(kind="cpu"), micro_batch_sizes=sizes, layers=tuple(made), optimizer_peak=peak)


@st.composite
def layers(draw: st.DrawFn, sizes: tuple[int, ...], *, exact: bool, fine: bool) -> LayerProfile:
    """Draw a layer whose costs are affine in the micro-batch size."""
    whole = st.sampled_from([0.0, 10.0, 10.0, 20.0, 30.0, 50.0])
    time = st.floats(0.1, 80.0).map(lambda x: round(x, 1)) if fine else whole
    forward, backward = draw(time), draw(time)
    fixed = draw(st.sampled_from([0.0, 0.0, 20.0]))
    output, saved, peak = (draw(st.integers(0, 60)) for _ in range(3))
    kept, alias = draw(st.booleans()), draw(st.sampled_from([-1, -1, 0]))
    held = draw(st.integers(0, 2 * output))
    details = tuple(
        MemoryDetail(
            internal_bytes=saved * s,
            inputs=(BoundaryTensor(bytes=1, kept=kept),),
            outputs=(BoundaryTensor(bytes=output * s, kept=not kept, alias=alias),),
            forward_peak_bytes=(saved + output + peak) * s,
            no_grad_peak_bytes=(output + peak) * s,
            first_backward_peak_bytes=(saved + 2 * peak) * s + 40,
            backward_peak_bytes=(saved + 2 * peak) * s,
            end_first_backward_peak_bytes=(saved + 2 * peak + held) * s + 40,
            end_backward_peak_bytes=(saved + 2 * peak + held) * s,
        )
        for s in sizes
    )
    parameters = draw(st.integers(0, 200))
    entry_us = draw(st.sampled_from([(), (), (5.0,) * len(sizes), (70.0,) * len(sizes)]))
    return LayerProfile(
        name="layer",
        parameter_bytes=parameters,
        idle_bytes=draw(st.sampled_from([0, 0, 0, 60])),
        cast_bytes=draw(st.sampled_from([0, 0, parameters // 2])),
        rewritten_bytes=draw(st.sampled_from([0, 0, 0, 40])),
        optimizer_bytes=draw(st.sampled_from([0, parameters, 2 * parameters])),
        optimizer_us=draw(st.sampled_from([0.0, 0.0, 5.0, 200.0])),
        optimizer_peak_bytes=draw(st.sampled_from([0, 50])),
        optimizer_boundary_peak_bytes=draw(st.sampled_from([0, 0, 70])),
        forward_us=tuple(fixed + forward * s for s in sizes),
        backward_us=tuple(backward * s for s in sizes),
        entry_us=entry_us,
        output_bytes=tuple(output * s for s in sizes),
        saved_bytes=tuple(saved * s for s in sizes),
        forward_peak_bytes=tuple(peak * s for s in sizes),
        backward_peak_bytes=tuple(2 * peak * s for s in sizes),
        detail=details if exact else (),
    )


def _frozen(layer: LayerProfile) -> LayerProfile:
    """Return the layer without backward, gradients and optimizer."""
    details = tuple(
        replace(
            detail,
            internal_bytes=0,
            forward_peak_bytes=detail.no_grad_peak_bytes,
            first_backward_peak_bytes=0,
            backward_peak_bytes=0,
            end_first_backward_peak_bytes=None,
            end_backward_peak_bytes=None,
        )
        for detail in layer.detail
    )
    nothing = (0,) * len(layer.saved_bytes)
    return replace(
        layer,
        gradient_bytes=0,
        cast_bytes=0,
        optimizer_bytes=0,
        optimizer_us=0.0,
        optimizer_peak_bytes=0,
        optimizer_boundary_peak_bytes=0,
        backward_us=tuple(0.0 for _ in layer.backward_us),
        saved_bytes=nothing,
        backward_peak_bytes=nothing,
        detail=details,
    )


def _skip(draw: st.DrawFn, made: list[LayerProfile], sizes: tuple[int, ...]) -> None:
    """Add a tensor that passes some layers, which read or only relay it."""
    first, last = sorted(draw(st.tuples(*[st.integers(0, len(made) - 1)] * 2)))
    size, kept = draw(st.integers(0, 60)), draw(st.booleans())
    for n in range(first, last + 1):
        relayed = draw(st.booleans())
        tensors = [BoundaryTensor(bytes=size * s, kept=kept and not relayed) for s in sizes]
        given = tensors if n > first else []
        sent = [replace(t, alias=1, relayed=relayed) if n > first else t for t in tensors] if n < last else []
        details = [
            replace(detail, inputs=(*detail.inputs, *given[i : i + 1]), outputs=(*detail.outputs, *sent[i : i + 1]))
            for i, detail in enumerate(made[n].detail)
        ]
        made[n] = replace(made[n], detail=tuple(details))


def _connected(before: LayerProfile, layer: LayerProfile) -> LayerProfile:
    """Return the layer with as many bytes of input as the layer before has of output."""
    details = tuple(
        replace(detail, inputs=(replace(detail.inputs[0], bytes=earlier.outputs[0].bytes),))
        for earlier, detail in zip(before.detail, layer.detail, strict=True)
    )
    return replace(layer, detail=details)


def _scaled(layer: LayerProfile, factor: int) -> LayerProfile:
    return replace(
        layer,
        parameter_bytes=layer.parameter_bytes * factor,
        forward_us=tuple(t * factor for t in layer.forward_us),
        backward_us=tuple(t * factor for t in layer.backward_us),
    )


def _last(layer: LayerProfile) -> LayerProfile:
    """Return the layer with a loss, which crosses no boundary."""
    details = tuple(
        replace(detail, outputs=(BoundaryTensor(bytes=0, kept=False),), target_bytes=3) for detail in layer.detail
    )
    return replace(layer, output_bytes=(0,) * len(layer.output_bytes), detail=details)


def _tie(draw: st.DrawFn, made: list[LayerProfile], first: int, second: int) -> None:
    """Let both layers share parameters, or a part of them."""
    shared = draw(st.integers(1, 150))
    views = draw(st.sampled_from([0, shared]))
    for at, other in ((first, second), (second, first)):
        layer = made[at]
        made[at] = replace(
            layer,
            parameter_bytes=layer.parameter_bytes + shared,
            tied_bytes=shared,
            tied_view_bytes=views * (at == second),
            tied=(f"{made[other].name}.weight",),
        )
