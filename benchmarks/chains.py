"""Chains of layers for benchmarks: synthetic ones of any length, two with published times, and random ones.

Times are affine in the micro-batch size, `fixed + size · per sample`, and sizes linear, so that interpolating between
profiled sizes is exact. The same name, length and seed always give the same chain.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.core.values.profile import BoundaryTensor, Device, LayerProfile, MemoryDetail, Profile

__all__ = ["CHAINS", "Chain", "amoebanet_d", "frozen_backbone", "launch_bound", "random_chain", "tight_cap", "vgg_16"]

FloatArray = NDArray[np.float64]
MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Costs of L layers per sample; arrays of shape (L,), times in microseconds, sizes in bytes."""

    name: str
    forward_us: FloatArray
    backward_us: FloatArray
    parameters: FloatArray
    saved: FloatArray
    output: FloatArray
    fixed_us: float = 0.0
    """Of every layer's forward and backward per micro-batch, whatever its size."""
    optimizer_share: float = 2.0
    """Optimizer state per byte of parameters: 2 for Adam."""
    trains: FloatArray | None = None
    """1 where a layer has gradients and optimizer state, 0 where it is frozen; None: everywhere 1."""

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.forward_us)

    @property
    def trained(self) -> FloatArray:
        """1 for each trained layer, 0 for each frozen one."""
        return np.ones(self.num_layers) if self.trains is None else self.trains

    @property
    def pair_us(self) -> FloatArray:
        """Forward + backward of one sample, which other planners balance."""
        pair: FloatArray = self.forward_us + self.backward_us
        return pair

    def profile(self, sizes: Sequence[int], *, exact: bool) -> Profile:
        """Return the chain as `gpipe-plan profile` would write it, with or without exact memory records."""
        device = Device(kind="cpu", name="synthetic")
        return Profile(device=device, micro_batch_sizes=tuple(sizes), layers=tuple(self._layers(sizes, exact=exact)))

    def _layers(self, sizes: Sequence[int], *, exact: bool) -> Iterator[LayerProfile]:
        trains = self.trained
        received = 0
        for n in range(self.num_layers):
            output, saved, parameters = int(self.output[n]), int(self.saved[n]), int(self.parameters[n])
            runs_backward = bool(self.backward_us[n] > 0)
            yield LayerProfile(
                name=f"layers.{n}",
                parameter_bytes=parameters,
                gradient_bytes=int(parameters * trains[n]),
                optimizer_bytes=int(parameters * trains[n] * self.optimizer_share),
                forward_us=tuple(self.fixed_us + size * float(self.forward_us[n]) for size in sizes),
                backward_us=tuple(self.fixed_us * runs_backward + size * float(self.backward_us[n]) for size in sizes),
                output_bytes=tuple(size * output for size in sizes),
                saved_bytes=tuple(size * saved for size in sizes),
                # A layer's temporary buffers: about its output in forward, and the input's gradient beside it after.
                forward_peak_bytes=tuple(size * output for size in sizes),
                backward_peak_bytes=tuple(size * (output + received) * runs_backward for size in sizes),
                detail=tuple(_record(size, received, output, saved, parameters) for size in sizes) if exact else (),
            )
            received = output


def _record(size: int, received: int, output: int, saved: int, parameters: int) -> MemoryDetail:
    internal, out = size * max(0, saved - output), size * output
    return MemoryDetail(
        internal_bytes=internal,
        inputs=(BoundaryTensor(bytes=size * received, kept=True),),
        outputs=(BoundaryTensor(bytes=out, kept=True),),
        forward_peak_bytes=internal + 2 * out,
        no_grad_peak_bytes=2 * out,
        first_backward_peak_bytes=internal + 2 * out + size * received + parameters,
        backward_peak_bytes=internal + 2 * out + size * received + parameters,
    )


def transformer(num_layers: int) -> Chain:
    """Return the GPipe paper's Transformer, with 83.9 B parameters at L = 1663; the last layer is the head.

    Width 2048, feed-forward 8192, 32,000 words, 1024 tokens per sample, float32. Times are those of 50 TFLOP/s.
    """
    boundary = 1024 * 2048 * 4
    words = np.zeros(num_layers)
    words[[0, -1]] = 131_108_096 / 2
    forward = np.full(num_layers, 2240.0)
    forward[-1] += 2680.0  # the head's matrix product
    return Chain(
        name="even",
        forward_us=forward,
        backward_us=2 * forward,
        parameters=4 * (50_358_272 + words),
        saved=np.full(num_layers, 16.0 * boundary),
        output=np.full(num_layers, float(boundary)),
        fixed_us=50.0,
    )


def uneven(num_layers: int) -> Chain:
    """Return log-normal times and sizes, with B/F between 1.2 and 2.8, as of a searched network."""
    rng = np.random.default_rng(num_layers)
    return _random(f"uneven, L = {num_layers}", num_layers, rng, fixed_us=20.0)


CHAINS = {"even": transformer, "uneven": uneven}


def random_chain(seed: int) -> Chain:
    """Return 24 to 48 layers like those of `uneven`."""
    rng = np.random.default_rng(seed)
    return _random(f"random {seed}", int(rng.integers(24, 49)), rng)


def _random(name: str, num_layers: int, rng: np.random.Generator, *, fixed_us: float = 0.0) -> Chain:
    forward = rng.lognormal(np.log(300.0), 0.6, num_layers)
    output = rng.lognormal(np.log(2.0 * MIB), 0.4, num_layers)
    return Chain(
        name=name,
        forward_us=forward,
        backward_us=forward * rng.uniform(1.2, 2.8, num_layers),
        parameters=rng.lognormal(np.log(40.0 * MIB), 0.8, num_layers),
        saved=output * rng.uniform(1.0, 8.0, num_layers),
        output=output,
        fixed_us=fixed_us,
    )


def vgg_16() -> Chain:
    """VGG-16 at 224 x 224, 64 samples a micro-batch: PipeDream's measured F+B; B/F = 2 and the batch are assumed.

    One "sample" of this chain is such a micro-batch. ReLU and pooling keep their output, which is the next layer's
    input, pooling its indices too, dropout its mask; so convolutions keep nothing more.
    """
    pair_ms = _numbers("""
        46.920 9.999 159.531 9.766 9.374 54.803 5.097 75.441 5.133 4.999 29.149 2.757 44.481 3.103 48.133 2.870 2.682
        23.823 1.722 37.259 1.527 40.445 1.523 1.583 12.989 1.050 11.466 .653 12.690 .630 .787 0 0 7.050 .407 0 1.443
        .309 0 .941""")
    sizes = np.array(list(_vgg_sizes()), dtype=float)
    return Chain(
        name="VGG-16",
        forward_us=pair_ms * 1e3 / 3,
        backward_us=pair_ms * 1e3 * 2 / 3,
        parameters=4 * sizes[:, 0],
        saved=64 * sizes[:, 1],
        output=64 * sizes[:, 2],
    )


def _vgg_sizes() -> Iterator[tuple[int, int, int]]:
    """Yield parameters, saved bytes and output bytes of a sample by layer."""
    channels, pixels = 3, 224 * 224
    for group, width in zip((2, 2, 3, 3, 3), (64, 128, 256, 512, 512), strict=True):
        for _ in range(group):
            out = 4 * width * pixels
            yield 9 * channels * width + width, 0, out
            yield 0, out, out
            channels = width
        pixels //= 4
        out = 4 * channels * pixels
        yield 0, 3 * out, out
    features = channels * pixels
    yield from ((0, 0, 4 * features),) * 2  # views
    for width in (4096, 4096):
        yield features * width + width, 0, 4 * width
        yield 0, 4 * width, 4 * width
        yield 0, 5 * width, 4 * width
        features = width
    yield features * 1000 + 1000, 0, 4 * 1000


def amoebanet_d() -> Chain:
    """AmoebaNet-D(18, 512), 8 samples a micro-batch: DAPPLE's measured F and B on a V100.

    One "sample" of this chain is such a micro-batch. Sizes, in MiB of one image, were measured by `gpipe-plan profile`
    on `sample_models/amoebanet_d.py` at 224 x 224; RMSProp keeps one value per parameter.
    """
    forward_ms = _numbers("""
        .63 4.90 4.54 7.78 8.30 8.89 8.35 8.61 8.28 9.31 7.79 7.63 7.74 7.92 7.75 7.99 10.15 9.95 13.89 13.28 13.84
        12.81 16.07 1.31""")
    backward_ms = _numbers("""
        .54 12.58 13.85 19.01 18.76 24.29 18.23 20.91 18.61 20.04 21.57 21.27 27.51 20.03 22.74 23.29 27.38 29.02 29.17
        25.40 33.02 28.95 33.11 .82""")
    parameters = _numbers("""
        .014 1.122 5.212 10.283 12.783 13.783 13.783 13.783 13.783 29.799 43.066 51.066 55.066 55.066 55.066 55.066
        119.098 172.133 204.133 220.133 220.133 220.133 220.133 31.254""")
    saved = _numbers("""
        6.126 128.637 79.649 55.158 42.908 44.439 44.439 44.439 44.439 41.393 30.691 21.504 22.270 22.270 22.270 22.270
        20.770 15.445 10.852 11.234 11.234 11.234 11.234 1.566""")
    output = _numbers("""
        6.125 15.312 13.781 10.719 12.250 12.250 12.250 12.250 12.250 8.422 5.359 6.125 6.125 6.125 6.125 6.125
        4.211 2.680 3.062 1.531 1.531 1.531 1.531 0""")
    return Chain(
        name="AmoebaNet-D(18, 512)",
        forward_us=forward_ms * 1e3,
        backward_us=backward_ms * 1e3,
        parameters=parameters * MIB,
        saved=8 * saved * MIB,
        output=8 * output * MIB,
        optimizer_share=1.0,
    )


def launch_bound(fixed_us: float) -> Chain:
    """Return 24 equal layers with a fixed cost per micro-batch, which makes small micro-batches expensive."""
    nothing = np.zeros(24)
    return Chain(
        name="launch-bound",
        forward_us=np.full(24, 200.0),
        backward_us=np.full(24, 400.0),
        parameters=nothing,
        saved=nothing,
        output=nothing,
        fixed_us=fixed_us,
    )


def frozen_backbone() -> Chain:
    """Return 64 equal layers, of which the first 40 are frozen: they have no backward and save nothing."""
    trains = np.repeat([0.0, 1.0], [40, 24])
    return Chain(
        name="frozen backbone",
        forward_us=np.full(64, 1000.0),
        backward_us=2000.0 * trains,
        parameters=np.full(64, 64.0 * MIB),
        saved=32.0 * MIB * trains,
        output=np.full(64, 4.0 * MIB),
        trains=trains,
    )


def tight_cap(chain: Chain, num_devices: int, batch: int) -> int:
    """Return a memory limit with which some stages must recompute and a plan exists, without the solver.

    The limit is 95 % of what an even stage holds without recomputation under GPipe. For uneven layers it is at least
    the largest need of a single recomputed layer.
    """
    weights = chain.parameters * (2 + chain.optimizer_share)
    even = float((weights + batch * chain.saved).sum()) / num_devices
    received = np.concatenate([[0.0], chain.output[:-1]])
    alone = weights + batch * (received + 2 * chain.output)
    return int(0.95 * even + alone.max())


def _numbers(text: str) -> FloatArray:
    return np.array(text.split(), dtype=float)
