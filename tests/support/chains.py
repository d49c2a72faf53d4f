"""Chains for tests of the cost model and of the solver: single layers, random chains, and two published ones."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from planner.core.values.profile import (
    ArrayKind,
    BoundaryTensor,
    Device,
    LayerProfile,
    MemoryDetail,
    Profile,
    ProgramMemory,
)

# AmoebaNet-D (18, 512) on a V100, batch 8, from DAPPLE's profile: forward and backward of 24 layers, in ms.
AMOEBANET_FORWARD_MS = (
    *(0.63, 4.90, 4.54, 7.78, 8.30, 8.89, 8.35, 8.61, 8.28, 9.31, 7.79, 7.63),
    *(7.74, 7.92, 7.75, 7.99, 10.15, 9.95, 13.89, 13.28, 13.84, 12.81, 16.07, 1.31),
)
AMOEBANET_BACKWARD_MS = (
    *(0.54, 12.58, 13.85, 19.01, 18.76, 24.29, 18.23, 20.91, 18.61, 20.04, 21.57, 21.27),
    *(27.51, 20.03, 22.74, 23.29, 27.38, 29.02, 29.17, 25.40, 33.02, 28.95, 33.11, 0.82),
)
# VGG-16 from PipeDream's profile: forward + backward of 40 layers, in ms.
VGG16_MS = (
    *(46.920, 9.999, 159.531, 9.766, 9.374, 54.803, 5.097, 75.441, 5.133, 4.999),
    *(29.149, 2.757, 44.481, 3.103, 48.133, 2.870, 2.682, 23.823, 1.722, 37.259),
    *(1.527, 40.445, 1.523, 1.583, 12.989, 1.050, 11.466, 0.653, 12.690, 0.630),
    *(0.787, 0.0, 0.0, 7.050, 0.407, 0.0, 1.443, 0.309, 0.0, 0.941),
)

_PER_SIZE = (
    *("forward_us", "backward_us", "output_bytes", "saved_bytes"),
    *("forward_peak_bytes", "backward_peak_bytes"),
)


def layer(name: str = "layer", **values: Any) -> LayerProfile:
    """Return a layer without costs other than `values`; a number is a list for one micro-batch size."""
    required: dict[str, Any] = {"forward_us": 0.0, "backward_us": 0.0, "output_bytes": 0, "saved_bytes": 0}
    given = {"parameter_bytes": 0, **required, **values}
    if "detail" in given and not isinstance(given["detail"], tuple):
        given["detail"] = (given["detail"],)
    lists = {key: (given[key] if isinstance(given[key], tuple) else (given[key],)) for key in _PER_SIZE if key in given}
    return LayerProfile(name=name, **{**given, **lists})


def chain(*layers: LayerProfile, sizes: Sequence[int] = (1,)) -> Profile:
    """Return the profile of `layers`."""
    return Profile(device=Device(kind="cpu"), micro_batch_sizes=tuple(sizes), layers=layers)


def record(
    *,
    internal: int = 0,
    given: Sequence[BoundaryTensor] = (),
    made: Sequence[BoundaryTensor] = (),
    forward: int = 0,
    no_grad: int = 0,
    first_backward: int = 0,
    backward: int = 0,
    target: int = 0,
    end_first: int | None = None,
    end_backward: int | None = None,
    writes_input: bool = False,
) -> MemoryDetail:
    """Return an exact memory record; arguments are short names of its fields."""
    return MemoryDetail(
        internal_bytes=internal,
        inputs=tuple(given),
        outputs=tuple(made),
        forward_peak_bytes=forward,
        no_grad_peak_bytes=no_grad,
        first_backward_peak_bytes=first_backward,
        backward_peak_bytes=backward,
        end_first_backward_peak_bytes=end_first,
        end_backward_peak_bytes=end_backward,
        target_bytes=target,
        writes_input=writes_input,
    )


def tensor(
    size: int, *, kept: bool = False, alias: int = -1, relayed: bool = False, carries: bool = True
) -> BoundaryTensor:
    """Return a tensor that crosses a boundary."""
    return BoundaryTensor(bytes=size, kept=kept, alias=alias, relayed=relayed, carries=carries)


def heavy_chain(seed: int, num_layers: int) -> Profile:
    """Return uneven layers that save much more than crosses their boundaries."""
    rng = random.Random(seed)
    return chain(
        *(
            layer(
                f"l{n}",
                forward_us=rng.uniform(10, 40),
                backward_us=rng.uniform(20, 90),
                saved_bytes=rng.randint(100, 900),
                output_bytes=rng.randint(1, 30),
                parameter_bytes=rng.randint(0, 60),
            )
            for n in range(num_layers)
        )
    )


def even_chain(parameters: Sequence[int], gradients: Sequence[int] | None = None, **more: Any) -> Profile:
    """Return layers `layers.0`, …: 8 bytes cross each boundary and are saved by the next layer; each saves 20 more.

    Args:
        parameters: Bytes by layer.
        gradients: Bytes by layer; by default those of the parameters.
        more: Values by field name, one for all layers or a tuple.
    """
    by_layer = [{name: v[n] if isinstance(v, tuple) else v for name, v in more.items()} for n in range(len(parameters))]
    layers = [
        layer(
            f"layers.{n}",
            parameter_bytes=parameters[n],
            gradient_bytes=(gradients or parameters)[n],
            detail=record(
                internal=20,
                given=[tensor(8, kept=True)],
                made=[tensor(8)],
                forward=40,
                no_grad=30,
                first_backward=60 + (gradients or parameters)[n],
                backward=70,
            ),
            **by_layer[n],
        )
        for n in range(len(parameters))
    ]
    return chain(*layers)


def random_profile(seed: int, num_layers: int, *, exact: bool = False, sizes: Sequence[int] = (1,)) -> Profile:
    """Return a chain with every cost that a profile has, affine in the micro-batch size."""
    rng = random.Random(seed)
    return chain(*_random_layers(rng, num_layers, sizes, exact=exact), sizes=sizes)


def with_programs(profile: Profile, seed: int) -> Profile:
    """Return the profile with compiler records instead of exact records."""
    rng = random.Random(seed)

    def programs() -> tuple[ProgramMemory, ...]:
        return tuple(
            ProgramMemory(
                carried_bytes=rng.randrange(100 * size),
                peak_bytes=rng.randrange(200 * size),
                narrowed_bytes=rng.randrange(50),
                padding_bytes=rng.randrange(10),
                reshaped_bytes=rng.choice([0, rng.randrange(40 * size)]),
            )
            for size in profile.micro_batch_sizes
        )

    return replace(profile, layers=tuple(replace(layer, program=programs()) for layer in profile.layers))


def compiled(profile: Profile) -> Profile:
    """Return the profile as of a compiler: a layer's trained and saved bytes are one array each."""

    def array(num_bytes: int) -> tuple[ArrayKind, ...]:
        kind = f"float32[{num_bytes // 4}]"
        return (ArrayKind(kind=kind, bytes=num_bytes, plain_bytes=num_bytes, loop_bytes=num_bytes),)

    def programs(layer: LayerProfile) -> tuple[ProgramMemory, ...]:
        trained = array(layer.parameter_bytes)
        return tuple(
            ProgramMemory(carried_bytes=s, peak_bytes=s, trained=trained, kept=array(s), received=array(o))
            for s, o in zip(layer.saved_bytes, layer.output_bytes, strict=True)
        )

    device = replace(profile.device, kind="tpu", name="TPU v2 core", how="compiled")
    layers = tuple(replace(layer, detail=(), program=programs(layer)) for layer in profile.layers)
    return replace(profile, device=device, layers=layers)


def _carries(size: int) -> bool:
    """Return True if a relayed tensor of this size per sample carries a gradient."""
    return size % 3 > 0


def _random_layers(rng: random.Random, num_layers: int, sizes: Sequence[int], *, exact: bool) -> Iterator[LayerProfile]:
    crossing = 20  # bytes per sample in front of the layer
    skip = None  # bytes per sample of a relayed tensor
    for n in range(num_layers):
        forward, backward = rng.choice([0.0, rng.uniform(1, 50)]), rng.uniform(1, 90)
        fixed, output, saved, peak = rng.uniform(0, 5), rng.randint(0, 60), rng.randint(0, 90), rng.randint(0, 50)
        parameters = rng.randint(0, 300)
        keeps_input, keeps_output, alias = rng.random() < 0.5, rng.random() < 0.5, rng.choice([-1, -1, 0])
        writes_input = alias == 0 and rng.random() < 0.5
        passing = None if skip is None or n == num_layers - 1 or rng.random() < 0.2 else skip
        reads, begins = rng.random() < 0.3, skip is None and n < num_layers - 1 and rng.random() < 0.6
        gradient, passing_gradient = rng.randint(0, output), passing if passing and _carries(passing) else 0
        details = tuple(
            record(
                internal=saved * s,
                given=[
                    tensor(crossing * s, kept=keeps_input),
                    *([] if skip is None else [tensor(skip * s, kept=reads, carries=_carries(skip))]),
                ],
                made=[
                    tensor(output * s, kept=keeps_output, alias=alias),
                    *(
                        []
                        if passing is None
                        else [tensor(passing * s, alias=1, relayed=not reads, carries=_carries(passing))]
                    ),
                    # What goes into this layer is what passes by the next ones.
                    *(
                        [tensor(crossing * s, alias=0, relayed=reads and alias < 0, carries=_carries(crossing))]
                        if begins
                        else []
                    ),
                ],
                forward=(saved + output + peak) * s,
                no_grad=(output + peak) * s,
                first_backward=(saved + 2 * peak) * s + parameters,
                backward=(saved + 2 * peak) * s,
                end_first=(saved + 2 * peak + gradient + passing_gradient) * s + parameters,
                end_backward=(saved + 2 * peak + gradient + passing_gradient) * s,
                target=3 * s if n == num_layers - 1 else 0,
                writes_input=writes_input,
            )
            for s in sizes
        )
        yield layer(
            f"layers.{n}",
            parameter_bytes=parameters,
            cast_bytes=parameters // 2 if n % 3 == 1 else 0,
            optimizer_bytes=2 * parameters,
            buffer_bytes=rng.randint(0, 9),
            rewritten_bytes=40 if n % 4 == 2 else 0,
            optimizer_us=rng.uniform(0, 20),
            optimizer_peak_bytes=rng.randint(0, 400),
            optimizer_boundary_peak_bytes=600 if n % 3 == 1 else 0,
            forward_us=tuple(fixed + forward * s for s in sizes),
            backward_us=tuple(fixed + backward * s for s in sizes),
            output_bytes=tuple(output * s for s in sizes),
            saved_bytes=tuple(saved * s for s in sizes),
            forward_peak_bytes=tuple(peak * s for s in sizes),
            backward_peak_bytes=tuple(2 * peak * s for s in sizes),
            detail=details if exact else (),
        )
        skip, crossing = crossing if begins else passing, output
