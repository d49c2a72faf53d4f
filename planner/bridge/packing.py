"""Arrays that differ from stage to stage, as arrays of the same shapes on every device of a mesh."""

import math
from collections import Counter
from collections.abc import Sequence
from types import ModuleType

import jax
from jax import Array
from jax import numpy as jnp

from planner.bridge.tpu_layouts import num_bytes
from planner.core.cost.places import are_vectors, places_for

_ROW, _ROWS = 128, 8
"""Numbers in a row of a TPU's memory, and rows of a tile of it."""

_Kind = tuple[tuple[int, ...], jnp.dtype]
"""Shape and dtype."""


class Packing:
    """Lists of arrays, one list per stage, as arrays of the same shapes on every device.

    Arrays of the same shape take turns in one place as long as that wastes little (`planner.core.cost.places`); else
    all of a dtype lie behind each other in one vector, which the device has to take apart into other layouts.

    Args:
        stages: Each one's shapes.
        in_rows: Whether a vector lies in rows: alone with the stage in front it would take twice as much. In a loop,
            with the micro-batch in front, rows would take three times as much.
    """

    def __init__(self, stages: Sequence[Sequence[jax.ShapeDtypeStruct]], *, in_rows: bool = False) -> None:
        self._stages = [list(stage) for stage in stages]
        counts = places_for(Counter[_Kind]((tuple(s.shape), s.dtype) for s in stage) for stage in self._stages)
        self.shapes = [jax.ShapeDtypeStruct(*kind) for kind in counts.elements()]
        most_bytes = max((sum(map(num_bytes, stage)) for stage in self._stages), default=0)
        self._flat = are_vectors(sum(map(num_bytes, self.shapes)), most_bytes)
        if self._flat:
            dtypes = sorted({shape.dtype for stage in self._stages for shape in stage}, key=str)
            lengths = {dtype: max(self._length(stage, dtype) for stage in self._stages) for dtype in dtypes}
            shaped = _rows if in_rows else _vector
            self.shapes = [jax.ShapeDtypeStruct(shaped(lengths[dtype]), dtype) for dtype in dtypes]

    def pack(self, stage: int, arrays: Sequence[Array], numpy: ModuleType = jnp) -> list[Array]:
        """A stage's arrays, padded with zeros; `numpy` makes these: JAX's, or numpy itself for arrays of the host."""
        if not self._flat:
            filled = dict(zip(self._places(stage), arrays, strict=True))
            return [filled.get(n, numpy.zeros(s.shape, s.dtype)) for n, s in enumerate(self.shapes)]
        packed = []
        for whole in self.shapes:
            parts = [array.reshape(-1) for array in arrays if array.dtype == whole.dtype]
            padding = math.prod(whole.shape) - sum(array.shape[0] for array in parts)
            packed.append(numpy.concatenate([*parts, numpy.zeros((padding,), whole.dtype)]).reshape(whole.shape))
        return packed

    def unpack(self, stage: int, packed: Sequence[Array]) -> list[Array]:
        """A stage's arrays from packed ones."""
        if not self._flat:
            return [packed[n] for n in self._places(stage)]
        wholes = {shape.dtype: array.reshape(-1) for shape, array in zip(self.shapes, packed, strict=True)}
        begin = dict.fromkeys(wholes, 0)
        arrays = []
        for shape in self._stages[stage]:
            first = begin[shape.dtype]
            begin[shape.dtype] = end = first + math.prod(shape.shape)
            arrays.append(wholes[shape.dtype][first:end].reshape(shape.shape))
        return arrays

    def add(self, stage: int, packed: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
        """Adds a stage's arrays to packed ones."""
        sums = list(packed)
        if not self._flat:
            for n, array in zip(self._places(stage), arrays, strict=True):
                sums[n] = sums[n] + array
            return sums
        return [whole + more for whole, more in zip(packed, self.pack(stage, arrays), strict=True)]

    def zeros(self, *front: int) -> list[Array]:
        """Nothing of any stage; `front`: dimensions in front of each array's own."""
        return [jnp.zeros((*front, *s.shape), s.dtype) for s in self.shapes]

    def _places(self, stage: int) -> list[int]:
        free: dict[_Kind, list[int]] = {}
        for n, shape in enumerate(self.shapes):
            free.setdefault((tuple(shape.shape), shape.dtype), []).append(n)
        return [free[tuple(shape.shape), shape.dtype].pop(0) for shape in self._stages[stage]]

    @staticmethod
    def _length(stage: Sequence[jax.ShapeDtypeStruct], dtype: jnp.dtype) -> int:
        return sum(math.prod(shape.shape) for shape in stage if shape.dtype == dtype)


def _vector(length: int) -> tuple[int, ...]:
    return (length,)


def _rows(length: int) -> tuple[int, ...]:
    """The shape of at least so many numbers in rows, no tile of which is left half empty."""
    return -(-length // (_ROW * _ROWS)) * _ROWS, _ROW
