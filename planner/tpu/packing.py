"""Arrays that differ from stage to stage, as arrays of the same shapes on every device of a mesh."""

import math
from collections import Counter
from collections.abc import Sequence
from types import ModuleType

import jax
from jax import Array
from jax import numpy as jnp

from planner.tpu.places import are_vectors, places_for
from planner.tpu.tpu_layouts import in_rows, loop_shape, num_bytes

_Kind = tuple[tuple[int, ...], jnp.dtype]
"""Shape and dtype."""


class Packing:
    """Lists of arrays, one list per stage, as arrays of the same shapes on every device.

    Arrays of the same shape take turns in one place as long as that wastes little (`planner.tpu.places`); else
    all of a dtype lie behind each other in one vector, which the device has to take apart into other layouts.

    Args:
        stages: Each one's shapes.
        in_loops: Whether loops hold the arrays, with the micro-batch in front. Those that would be half padding lie in
            rows then (`planner.tpu.tpu_layouts.loop_shape`). Otherwise it is vectors that do: alone with the stage
            in front they would take twice as much, while in a loop rows of a vector take three times as much.
    """

    def __init__(self, stages: Sequence[Sequence[jax.ShapeDtypeStruct]], *, in_loops: bool = False) -> None:
        self._stages = [list(stage) for stage in stages]
        self._held = [list(map(loop_shape, stage)) if in_loops else list(stage) for stage in self._stages]
        counts = places_for(Counter[_Kind]((tuple(s.shape), s.dtype) for s in stage) for stage in self._held)
        self.shapes = [jax.ShapeDtypeStruct(*kind) for kind in counts.elements()]
        most_bytes = max((sum(map(num_bytes, stage)) for stage in self._held), default=0)
        self._flat = are_vectors(sum(map(num_bytes, self.shapes)), most_bytes)
        if self._flat:
            dtypes = sorted({shape.dtype for stage in self._stages for shape in stage}, key=str)
            lengths = {dtype: max(self._length(stage, dtype) for stage in self._stages) for dtype in dtypes}
            shaped = _vector if in_loops else in_rows
            self.shapes = [jax.ShapeDtypeStruct(shaped(lengths[dtype]), dtype) for dtype in dtypes]

    def pack(self, stage: int, arrays: Sequence[Array], numpy: ModuleType = jnp) -> list[Array]:
        """A stage's arrays, padded with zeros; `numpy` makes these: JAX's, or numpy itself for arrays of the host."""
        if not self._flat:
            filled = dict(zip(self._places(stage), arrays, strict=True))
            return [
                _filled(filled[n], s, numpy) if n in filled else numpy.zeros(s.shape, s.dtype)
                for n, s in enumerate(self.shapes)
            ]
        packed = []
        for whole in self.shapes:
            parts = [array.reshape(-1) for array in arrays if array.dtype == whole.dtype]
            packed.append(_filled(numpy.concatenate(parts) if parts else numpy.zeros(0, whole.dtype), whole, numpy))
        return packed

    def unpack(self, stage: int, packed: Sequence[Array]) -> list[Array]:
        """A stage's arrays from packed ones."""
        if not self._flat:
            return [_taken(packed[n], shape) for n, shape in zip(self._places(stage), self._stages[stage], strict=True)]
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
                sums[n] = sums[n] + _filled(array, self.shapes[n], jnp)
            return sums
        return [whole + more for whole, more in zip(packed, self.pack(stage, arrays), strict=True)]

    def zeros(self, *front: int) -> list[Array]:
        """Nothing of any stage; `front`: dimensions in front of each array's own."""
        return [jnp.zeros((*front, *s.shape), s.dtype) for s in self.shapes]

    def _places(self, stage: int) -> list[int]:
        free: dict[_Kind, list[int]] = {}
        for n, shape in enumerate(self.shapes):
            free.setdefault((tuple(shape.shape), shape.dtype), []).append(n)
        return [free[tuple(shape.shape), shape.dtype].pop(0) for shape in self._held[stage]]

    @staticmethod
    def _length(stage: Sequence[jax.ShapeDtypeStruct], dtype: jnp.dtype) -> int:
        return sum(math.prod(shape.shape) for shape in stage if shape.dtype == dtype)


def _vector(length: int) -> tuple[int, ...]:
    return (length,)


def _filled(array: Array, whole: jax.ShapeDtypeStruct, numpy: ModuleType) -> Array:
    """An array in a shape that has room for it, with zeros behind it."""
    if array.shape == whole.shape:
        return array
    padding = math.prod(whole.shape) - math.prod(array.shape)
    return numpy.pad(array.reshape(-1), (0, padding)).reshape(whole.shape)


def _taken(whole: Array, shape: jax.ShapeDtypeStruct) -> Array:
    """The array of that shape that `_filled` put there."""
    if whole.shape == shape.shape:
        return whole
    return whole.reshape(-1)[: math.prod(shape.shape)].reshape(shape.shape)
