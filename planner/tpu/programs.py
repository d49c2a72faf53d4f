"""Compiled executables of JAX functions, and the layout of arrays in a TPU's memory."""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import jax
from jax import numpy as jnp
from jax.experimental.layout import Format, Layout

from planner.core.values.profile import ArrayKind
from planner.tpu.compiler import OutOfMemoryError

_ROW = 1024
"""Length of a row of the array with which `make_depend_on_array` occupies memory."""


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """Executable, and the costs that the compiler reports. Sizes are bytes of device memory, including padding."""

    arguments: tuple[int, ...]
    """Bytes of each argument."""
    output_bytes: int
    outputs: tuple[int, ...]
    """Bytes of each output."""
    alias_bytes: int
    """Bytes of outputs that reuse the memory of arguments."""
    temporary_bytes: int
    flops: float
    accessed_bytes: float
    seconds: float
    """Time that the compiler estimates; 0 if it does not estimate times."""
    executable: Any = None


def compiler_options_for(device: jax.Device) -> dict[str, str]:
    """Return the compiler options for a program that runs a training step on `device`; empty unless it is a TPU.

    With these options, the compiler tries several placements of arrays in memory, and takes the smallest.
    """
    # For 48 programs, this saved up to 14 % of the memory; one of them needed 1.2 % more (libtpu 0.0.52,
    # docs/measurements/tpu-composition.md).
    if device.platform != "tpu":
        return {}
    return {"xla_tpu_buffer_assignment_algorithm": "BEST_OF_SPATIAL_TEMPORAL"}


def compile_lowered(lowered: Any) -> Any:
    """Compile a lowered JAX program.

    Raises:
        OutOfMemoryError: The program alone needs more memory than the device has.
    """
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(str(error).splitlines()[0]) from error


def compile_program(
    function: Callable[..., Any], shapes: Sequence[Any], device: Any, donated: Sequence[int] = ()
) -> CompiledProgram:
    """Return a function compiled for a device. The compiler chooses the layouts of arguments and results.

    Args:
        function: Function of nested JAX arrays.
        shapes: Shapes of the function's arguments.
        device: Device from `chip_devices` or from JAX.
        donated: Indices of arguments whose memory the executable may reuse for results.

    Raises:
        OutOfMemoryError: The program alone needs more memory than the device has.
    """
    anyhow = Format(Layout.AUTO, jax.sharding.SingleDeviceSharding(device))
    jitted = jax.jit(function, donate_argnums=tuple(donated), in_shardings=anyhow, out_shardings=anyhow)
    with warnings.catch_warnings():
        # Donated memory that cannot be reused is harmless.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        executable = compile_lowered(jitted.lower(*shapes))
    memory, cost = executable.memory_analysis(), executable.cost_analysis() or {}
    return CompiledProgram(
        arguments=sizes_in_layouts(shapes, executable.input_formats[0]),
        output_bytes=memory.output_size_in_bytes,
        outputs=sizes_in_layouts(executable.out_info, executable.output_formats),
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        flops=cost.get("flops", 0.0),
        accessed_bytes=cost.get("bytes accessed", 0.0),
        seconds=cost.get("optimal_seconds", 0.0),
        executable=executable,
    )


def make_depend_on_array(outputs: Sequence[Any], gradients: Sequence[Any], num_bytes: int) -> list[Any]:
    """Return gradients that force a compiled program to hold a large array in memory between forward and backward.

    The array is computed from the outputs of the forward, and its sum is added to the gradients. The backward therefore
    cannot begin before the array exists.

    Args:
        outputs: Outputs of the forward.
        gradients: Gradients of the outputs.
        num_bytes: Size of the large array, in bytes.
    """
    seed = sum((jnp.sum(output.astype(jnp.float32)) for output in outputs), jnp.zeros(()))
    rows = num_bytes // (4 * _ROW)
    filling = jax.lax.optimization_barrier(jnp.broadcast_to(seed, (rows, _ROW)))
    return [gradient + jnp.sum(filling).astype(gradient.dtype) for gradient in gradients]


def measure_time_us(program: CompiledProgram, shapes: Any, repeats: int) -> float:
    """Return the median time of several runs of an executable on its device, in microseconds.

    Args:
        program: Executable to run.
        shapes: Shapes of the executable's arguments.
        repeats: Number of timed runs.
    """
    formats = program.executable.input_formats[0]
    times = []
    for _ in range(repeats + 1):
        # Donated arguments are consumed by each run.
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


_TILE = (8, 128)
"""Rows and columns of a tile of a TPU's memory."""

_WORTH, _WORTH_OF_32_BITS = 1.25, 2
"""Smallest ratio of padded to flattened bytes at which loops store an array flattened: for 16 bits, and for 32 bits."""


def num_bytes(shape: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of an array without padding."""
    return int(shape.size * shape.dtype.itemsize)


def padded_bytes(shape: jax.ShapeDtypeStruct) -> int:
    """Return an array's bytes on a TPU, with padding, in its smallest layout, the default of a program's arguments."""
    axes = range(len(shape.shape))
    orders = [[axis for axis in axes if axis not in pair] + list(pair) for pair in permutations(axes, 2)]
    return min((_padded_bytes(shape, order, _TILE) for order in orders), default=_padded_bytes(shape, axes, _TILE))


def tiled_shape(length: int) -> tuple[int, int]:
    """Return the smallest shape (rows, columns) of whole TPU tiles that has at least `length` elements."""
    rows, columns = _TILE
    return -(-length // (rows * columns)) * rows, columns


def shape_in_loops(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return an array's shape in loops over micro-batches: rows of 128 elements if this saves much padding."""
    rows = jax.ShapeDtypeStruct(tiled_shape(math.prod(shape.shape)), shape.dtype)
    worth = _WORTH_OF_32_BITS if shape.dtype == "float32" else _WORTH
    return rows if padded_bytes(shape) >= worth * num_bytes(rows) else shape


def bytes_in_loops(shape: jax.ShapeDtypeStruct, size: int) -> int:
    """Return the bytes of an array in a loop over micro-batches. In other code, the array takes `size` bytes."""
    held = shape_in_loops(shape)
    return size if held is shape else num_bytes(held)


def kinds_of_arrays(shapes: Sequence[jax.ShapeDtypeStruct], sizes: Sequence[int]) -> tuple[ArrayKind, ...]:
    """Return the kind (type, shape and bytes) of each array. `sizes` are the arrays' bytes in memory."""
    return tuple(_kind_of_array(shape, size, size) for shape, size in zip(shapes, sizes, strict=True))


def array_kinds_in_loops(
    shapes: Sequence[jax.ShapeDtypeStruct], sizes: Sequence[int], only_matmul_operands: Sequence[bool]
) -> tuple[ArrayKind, ...]:
    """Return the kind (type, shape and bytes) of each array, as a loop over micro-batches stores it.

    Arrays of 32-bit numbers take half their bytes if they are used only as matmul operands.

    Args:
        shapes: Shapes of the arrays.
        sizes: Bytes of the arrays in these shapes.
        only_matmul_operands: True for arrays that are used only as matmul operands.
    """
    kinds = []
    for shape, size, narrow in zip(shapes, sizes, only_matmul_operands, strict=True):
        held, held_bytes = shape_in_loops(shape), bytes_in_loops(shape, size)
        is_halved = narrow and held is shape and shape.dtype == "float32"
        kinds.append(_kind_of_array(held, held_bytes, held_bytes // 2 if is_halved else held_bytes))
    return tuple(kinds)


def _kind_of_array(shape: jax.ShapeDtypeStruct, size: int, loop_bytes: int) -> ArrayKind:
    kind = f"{shape.dtype}[{','.join(map(str, shape.shape))}]"
    return ArrayKind(kind=kind, bytes=size, plain_bytes=num_bytes(shape), loop_bytes=loop_bytes)


def sizes_in_layouts(shapes: Any, formats: Any) -> tuple[int, ...]:
    """Return the bytes of each array or random key in the nested value `shapes`. `formats` has each array's layout."""
    sizes = []
    for shape, place in zip(jax.tree.leaves(shapes), jax.tree.leaves(formats), strict=True):
        tiling = place.layout.tiling if place.layout is not None else None
        stored = _stored_shape(shape)
        sizes.append(_padded_bytes(stored, place.layout.major_to_minor, tiling[0]) if tiling else num_bytes(stored))
    return tuple(sizes)


def _stored_shape(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape.shape, shape.dtype))
    return shape


def _padded_bytes(shape: jax.ShapeDtypeStruct, major_to_minor: Sequence[int], tile: Sequence[int]) -> int:
    lengths = [shape.shape[axis] for axis in major_to_minor]
    for place, length in zip(range(len(lengths) - 1, -1, -1), reversed(tile), strict=False):
        # Arrays with few rows have tiles with fewer rows.
        tile_length = length if place == len(lengths) - 1 else min(length, 1 << (lengths[place] - 1).bit_length())
        lengths[place] = -(-lengths[place] // tile_length) * tile_length
    size: int = math.prod(lengths) * shape.dtype.itemsize
    return size
