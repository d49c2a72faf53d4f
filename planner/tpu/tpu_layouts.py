"""Bytes of arrays as they lie in a TPU's memory, which comes in tiles."""

import math
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import jax

from planner.core.values.profile import ArrayKind

_TILE = (8, 128)
"""Rows and columns that a TPU's memory comes in."""

_WORTH, _WORTH_OF_32_BITS = 1.25, 2
"""How many times its bytes in rows an array must take to lie in rows in loops. Of 32 bits only half may be kept."""


def num_bytes(shape: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array, without padding."""
    return int(shape.size * shape.dtype.itemsize)


def padded_bytes(shape: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on a TPU that lies as tightly as it can, as the arguments of a program do by default."""
    axes = range(len(shape.shape))
    orders = [[axis for axis in axes if axis not in pair] + list(pair) for pair in permutations(axes, 2)]
    return min((_padded_bytes(shape, order, _TILE) for order in orders), default=_padded_bytes(shape, axes, _TILE))


def in_rows(length: int) -> tuple[int, int]:
    """The shape of at least so many numbers in rows of a TPU's memory, no tile of which is left half empty."""
    rows, columns = _TILE
    return -(-length // (rows * columns)) * rows, columns


def loop_shape(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """An array as loops over micro-batches hold it: in its own shape, or in rows where that leaves much less empty.

    Images with few channels and columns take several times their bytes in any order of their axes.
    """
    rows = jax.ShapeDtypeStruct(in_rows(math.prod(shape.shape)), shape.dtype)
    worth = _WORTH_OF_32_BITS if shape.dtype == "float32" else _WORTH
    return rows if padded_bytes(shape) >= worth * num_bytes(rows) else shape


def bytes_in_loops(shape: jax.ShapeDtypeStruct, size: int) -> int:
    """Bytes of an array as loops hold it (`loop_shape`), which takes so many in its own shape."""
    held = loop_shape(shape)
    return size if held is shape else num_bytes(held)


def kinds_of_arrays(shapes: Sequence[jax.ShapeDtypeStruct], sizes: Sequence[int]) -> tuple[ArrayKind, ...]:
    """The kinds of arrays that take so many bytes where they lie."""
    return tuple(_kind_of_array(shape, size, size) for shape, size in zip(shapes, sizes, strict=True))


def kinds_in_loops(
    shapes: Sequence[jax.ShapeDtypeStruct], sizes: Sequence[int], read_by_products: Sequence[bool]
) -> tuple[ArrayKind, ...]:
    """The same of arrays that loops hold (`loop_shape`), so large in their own shapes.

    In these, what nothing but products reads takes half.
    """
    kinds = []
    for shape, size, narrow in zip(shapes, sizes, read_by_products, strict=True):
        held, held_bytes = loop_shape(shape), bytes_in_loops(shape, size)
        is_halved = narrow and held is shape and shape.dtype == "float32"
        kinds.append(_kind_of_array(held, held_bytes, held_bytes // 2 if is_halved else held_bytes))
    return tuple(kinds)


def _kind_of_array(shape: jax.ShapeDtypeStruct, size: int, loop_bytes: int) -> ArrayKind:
    kind = f"{shape.dtype}[{','.join(map(str, shape.shape))}]"
    return ArrayKind(kind=kind, bytes=size, plain_bytes=num_bytes(shape), loop_bytes=loop_bytes)


def laid_out_sizes(shapes: Any, formats: Any) -> tuple[int, ...]:
    """Bytes of a nest of arrays, random keys among them, that lie in the formats of a compiled program."""
    sizes = []
    for shape, place in zip(jax.tree.leaves(shapes), jax.tree.leaves(formats), strict=True):
        tiling = place.layout.tiling if place.layout is not None else None
        stored = _stored(shape)
        sizes.append(_padded_bytes(stored, place.layout.major_to_minor, tiling[0]) if tiling else num_bytes(stored))
    return tuple(sizes)


def _stored(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """What is in memory for an array: a random key of no dimensions is a vector of integers, whose layout is told."""
    if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape.shape, shape.dtype))
    return shape


def _padded_bytes(shape: jax.ShapeDtypeStruct, major_to_minor: Sequence[int], tile: Sequence[int]) -> int:
    lengths = [shape.shape[axis] for axis in major_to_minor]
    for place, length in zip(range(len(lengths) - 1, -1, -1), reversed(tile), strict=False):
        # Few rows have tiles of fewer.
        tile_length = length if place == len(lengths) - 1 else min(length, 1 << (lengths[place] - 1).bit_length())
        lengths[place] = -(-lengths[place] // tile_length) * tile_length
    size: int = math.prod(lengths) * shape.dtype.itemsize
    return size
