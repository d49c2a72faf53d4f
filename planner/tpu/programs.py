"""A function of JAX arrays, compiled: what the compiler says of it."""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import numpy as jnp
from jax.experimental.layout import Format, Layout

from planner.tpu.compiling import OutOfMemoryError
from planner.tpu.tpu_layouts import laid_out_sizes

_ROW = 1024
"""Columns of what fills memory."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the compiler says of a program, in bytes of the device's memory, padding of its layouts included."""

    arguments: tuple[int, ...]
    """Bytes of each."""
    output_bytes: int
    outputs: tuple[int, ...]
    """Bytes of each."""
    alias_bytes: int
    """Bytes of outputs that lie where arguments were."""
    temporary_bytes: int
    flops: float
    accessed_bytes: float
    seconds: float
    """The compiler's own estimate; 0 where it makes none."""
    executable: Any = None


def options_for(device: jax.Device) -> dict[str, str]:
    """What the compiler is told about a whole step on devices of that kind.

    A TPU's is to try several ways of placing arrays, and to take the one that needs least: of 48 programs it saved up
    to 14 %, and cost one 1.2 % (docs/measurements/tpu-composition.md, libtpu 0.0.52). Others do not know the option.
    """
    if device.platform != "tpu":
        return {}
    return {"xla_tpu_buffer_assignment_algorithm": "BEST_OF_SPATIAL_TEMPORAL"}


def compiled(lowered: Any) -> Any:
    """A lowered program, compiled.

    Raises:
        OutOfMemoryError: It alone needs more than the device has.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(str(error).splitlines()[0]) from error


def compile_program(
    function: Callable[..., Any], shapes: Sequence[Any], device: Any, donated: Sequence[int] = ()
) -> Program:
    """Compiles a function for a device, which may lay out arguments and results as it likes.

    Args:
        function: Of nests of JAX arrays.
        shapes: Of its arguments.
        device: From `named_chips`, or of JAX.
        donated: Arguments whose memory it may use for its results.

    Raises:
        OutOfMemoryError: The program alone needs more than the device has.
    """
    anyhow = Format(Layout.AUTO, jax.sharding.SingleDeviceSharding(device))
    jitted = jax.jit(function, donate_argnums=tuple(donated), in_shardings=anyhow, out_shardings=anyhow)
    with warnings.catch_warnings():
        # What is donated and cannot be used again is no loss.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        executable = compiled(jitted.lower(*shapes))
    memory, cost = executable.memory_analysis(), executable.cost_analysis() or {}
    return Program(
        arguments=laid_out_sizes(shapes, executable.input_formats[0]),
        output_bytes=memory.output_size_in_bytes,
        outputs=laid_out_sizes(executable.out_info, executable.output_formats),
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        flops=cost.get("flops", 0.0),
        accessed_bytes=cost.get("bytes accessed", 0.0),
        seconds=cost.get("optimal_seconds", 0.0),
        executable=executable,
    )


def filled_between(outputs: Sequence[Any], gradients: Sequence[Any], num_bytes: int) -> list[Any]:
    """The gradients, known only after something of `num_bytes` was made from the outputs and read again."""
    seed = sum((jnp.sum(output.astype(jnp.float32)) for output in outputs), jnp.zeros(()))
    rows = num_bytes // (4 * _ROW)
    filling = jax.lax.optimization_barrier(jnp.broadcast_to(seed, (rows, _ROW)))
    return [gradient + jnp.sum(filling).astype(gradient.dtype) for gradient in gradients]


def measured_us(program: Program, shapes: Any, repeats: int) -> float:
    """The median time of so many runs of a program on the device that it was compiled for, in microseconds."""
    formats = program.executable.input_formats[0]
    times = []
    for _ in range(repeats + 1):
        # What is donated is gone after each run.
        arguments = jax.tree.map(lambda shape, place: jax.device_put(_zeros(shape), place), tuple(shapes), formats)
        jax.block_until_ready(arguments)
        begun = time.perf_counter()
        jax.block_until_ready(program.executable(*arguments))
        times.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(times[1:])


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jnp.zeros(shape.shape, shape.dtype)
