"""Stages as one JAX program over the devices of a mesh, with GPipe's schedule.

    forward     for tick t in 0..M+K-2: device k runs micro-batch t - k and sends its output to device k + 1
    backward    for tick t in 0..M+K-2: device k runs micro-batch t - (K-1-k) and sends a gradient to device k - 1

K is the number of devices, M the number of micro-batches. Forward and backward are `lax.scan`s inside `shard_map`. A
`lax.switch` on the device's index in the mesh selects the stage to run, or nothing if the device has no micro-batch in
this tick. All devices run the same program. Arrays that differ between stages (parameters, transferred tensors,
residuals) are therefore packed into arrays of equal shapes (`Packing`).
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax import numpy as jnp

from planner.tpu.layer_functions import random_key_shape
from planner.tpu.programs import num_bytes, shape_in_loops, tiled_shape
from planner.tpu.slots import count_slots, slots_waste_memory
from planner.tpu.stage import JaxStage, StageInput, State

_Kind = tuple[tuple[int, ...], jnp.dtype]
"""Kind of an array: shape and dtype."""


class Packing:
    """Packing of each stage's arrays into arrays whose shapes are equal on every device.

    Args:
        stages: Shapes of each stage's arrays.
        in_loops: True if the packed arrays get the micro-batch as additional first dimension.
    """

    def __init__(self, stages: Sequence[Sequence[jax.ShapeDtypeStruct]], *, in_loops: bool = False) -> None:
        self._stages = [list(stage) for stage in stages]
        self._held = [list(map(shape_in_loops, stage)) if in_loops else list(stage) for stage in self._stages]
        counts = count_slots(Counter[_Kind]((tuple(s.shape), s.dtype) for s in stage) for stage in self._held)
        self.shapes = [jax.ShapeDtypeStruct(*kind) for kind in counts.elements()]
        most_bytes = max((sum(map(num_bytes, stage)) for stage in self._held), default=0)
        self._flat = slots_waste_memory(sum(map(num_bytes, self.shapes)), most_bytes)
        if self._flat:
            dtypes = sorted({shape.dtype for stage in self._stages for shape in stage}, key=str)
            self.shapes = []
            for dtype in dtypes:
                length = max(sum(math.prod(s.shape) for s in stage if s.dtype == dtype) for stage in self._stages)
                self.shapes.append(jax.ShapeDtypeStruct((length,) if in_loops else tiled_shape(length), dtype))

    def pack(self, stage: int, arrays: Sequence[Array], numpy: ModuleType = jnp) -> list[Array]:
        """Return packed arrays with the arrays of a stage, padded with zeros.

        Args:
            stage: Index of the stage.
            arrays: Arrays of the stage.
            numpy: Module that makes the packed arrays: `jax.numpy`, or `numpy` for arrays on the host.
        """
        if not self._flat:
            filled = dict(zip(self._slots_of(stage), arrays, strict=True))
            return [
                _padded(filled[n], s, numpy) if n in filled else numpy.zeros(s.shape, s.dtype)
                for n, s in enumerate(self.shapes)
            ]
        packed = []
        for whole in self.shapes:
            parts = [array.reshape(-1) for array in arrays if array.dtype == whole.dtype]
            packed.append(_padded(numpy.concatenate(parts) if parts else numpy.zeros(0, whole.dtype), whole, numpy))
        return packed

    def unpack(self, stage: int, packed: Sequence[Array]) -> list[Array]:
        """Return the arrays of a stage, in their original shapes, from packed arrays."""
        if not self._flat:
            return [
                _unpadded(packed[n], shape) for n, shape in zip(self._slots_of(stage), self._stages[stage], strict=True)
            ]
        wholes = {shape.dtype: array.reshape(-1) for shape, array in zip(self.shapes, packed, strict=True)}
        begin = dict.fromkeys(wholes, 0)
        arrays = []
        for shape in self._stages[stage]:
            first = begin[shape.dtype]
            begin[shape.dtype] = end = first + math.prod(shape.shape)
            arrays.append(wholes[shape.dtype][first:end].reshape(shape.shape))
        return arrays

    def sum_arrays(self, stage: int, packed: Sequence[Array], arrays: Sequence[Array]) -> list[Array]:
        """Pack `arrays`, add them to `packed` array by array, and return the packed sums.

        Args:
            stage: Index of the stage.
            packed: Packed arrays of the stage.
            arrays: Arrays of the stage, in their original shapes.
        """
        sums = list(packed)
        if not self._flat:
            for n, array in zip(self._slots_of(stage), arrays, strict=True):
                sums[n] = sums[n] + _padded(array, self.shapes[n], jnp)
            return sums
        return [whole + more for whole, more in zip(packed, self.pack(stage, arrays), strict=True)]

    def packed_zeros(self, *front: int) -> list[Array]:
        """Return packed arrays of zeros, with additional first dimensions `front`."""
        return [jnp.zeros((*front, *s.shape), s.dtype) for s in self.shapes]

    def _slots_of(self, stage: int) -> list[int]:
        free: dict[_Kind, list[int]] = {}
        for n, shape in enumerate(self.shapes):
            free.setdefault((tuple(shape.shape), shape.dtype), []).append(n)
        return [free[tuple(shape.shape), shape.dtype].pop(0) for shape in self._held[stage]]


def _padded(array: Array, whole: jax.ShapeDtypeStruct, numpy: ModuleType) -> Array:
    if array.shape == whole.shape:
        return array
    padding = math.prod(whole.shape) - math.prod(array.shape)
    return numpy.pad(array.reshape(-1), (0, padding)).reshape(whole.shape)


def _unpadded(whole: Array, shape: jax.ShapeDtypeStruct) -> Array:
    if whole.shape == shape.shape:
        return whole
    return whole.reshape(-1)[: math.prod(shape.shape)].reshape(shape.shape)


Arrays = Sequence[Array]
Shapes = Sequence[jax.ShapeDtypeStruct]
_Forward = tuple[Arrays, Arrays, Arrays, Array]
"""State between two ticks of the forward: tensors to send, all received tensors, all residuals, sum of losses."""


class MeshProgram:
    """JAX program that computes the loss and the gradients of a mini-batch, with one stage per device."""

    def __init__(self, stages: Sequence[JaxStage], devices: Sequence[jax.Device], micro_batches: int) -> None:
        self.stages, self.micro_batches, self.num_stages = stages, micro_batches, len(stages)
        self.mesh = jax.sharding.Mesh(list(devices), ("stage",))
        self.trained = Packing([list(stage.trained.values()) for stage in stages])
        self.fixed = Packing([list(stage.fixed.values()) for stage in stages])
        self.kept = Packing([stage.kept for stage in stages], in_loops=True)
        # Only tensors between stages: the first stage reads the mini-batch, and the last stage returns the loss.
        self.edges = Packing([[], *(stage.inputs for stage in stages[1:])], in_loops=True)
        self.gradient_edges = Packing([[], *(_floating(stage.inputs) for stage in stages[1:])], in_loops=True)

    def place_on_devices(self, packing: Packing, stages: Sequence[Sequence[Any]]) -> list[Array]:
        """Copy the numpy arrays of every stage to the stage's device, in packed arrays of shape (stages, …)."""
        packed = [packing.pack(k, arrays, np) for k, arrays in enumerate(stages)]
        return [
            jax.device_put(np.stack([arrays[n] for arrays in packed]), self._sharding("stage"))
            for n in range(len(packing.shapes))
        ]

    def copy_to_all_devices(self, arrays: Iterable[Any]) -> list[Array]:
        """Copy numpy arrays to every device."""
        return [jax.device_put(array, self._sharding()) for array in arrays]

    def copy_to_host(self, packing: Packing, packed: Arrays) -> list[list[Any]]:
        """Copy packed arrays to the host, and return the arrays of every stage in their original shapes."""
        arrays = [jax.device_get(array) for array in packed]
        return [packing.unpack(k, [array[k] for array in arrays]) for k in range(self.num_stages)]

    def argument_shapes(self, inputs: Shapes, targets: Shapes) -> tuple[Shapes, Shapes, StageInput]:
        """Return shapes and shardings of the arguments of `loss_and_gradients`, from shapes of one micro-batch."""
        apart, everywhere = self._sharding("stage"), self._sharding()

        def packed(packing: Packing) -> list[jax.ShapeDtypeStruct]:
            return [jax.ShapeDtypeStruct((self.num_stages, *s.shape), s.dtype, sharding=apart) for s in packing.shapes]

        def data(shapes: Shapes) -> list[jax.ShapeDtypeStruct]:
            return [jax.ShapeDtypeStruct((self.micro_batches, *s.shape), s.dtype, sharding=everywhere) for s in shapes]

        key = jax.ShapeDtypeStruct(random_key_shape().shape, random_key_shape().dtype, sharding=everywhere)
        return packed(self.trained), packed(self.fixed), StageInput(data(inputs), data(targets), key)

    def loss_and_gradients(self, trained: Arrays, fixed: Arrays, batch: StageInput) -> tuple[Array, list[Array]]:
        """Return the mean loss of the micro-batches, and gradients packed like `trained`; to be compiled by `jax.jit`.

        Args:
            trained: Packed trained parameters.
            fixed: Packed frozen parameters and buffers.
            batch: Mini-batch; each array has shape (micro-batches, …).
        """
        one, apart = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("stage")
        mapped = jax.shard_map(
            self._on_one_device,
            mesh=self.mesh,
            in_specs=(apart, apart, one),
            out_specs=(one, apart),
            check_vma=False,
        )
        return mapped(trained, fixed, batch)  # type: ignore[no-any-return]

    def _on_one_device(self, trained: Arrays, fixed: Arrays, batch: StageInput) -> tuple[Array, list[Array]]:
        loss, sums = _OneDevice(self, trained, fixed, batch).run()
        return lax.psum(loss, "stage") / self.micro_batches, [array[None] for array in sums]

    def _sharding(self, *axes: str) -> jax.sharding.NamedSharding:
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*axes))


class _OneDevice:
    def __init__(self, program: MeshProgram, trained: Arrays, fixed: Arrays, batch: StageInput) -> None:
        self._all, self._batch = program, batch
        self._num, self._micro = program.num_stages, program.micro_batches
        self._place = lax.axis_index("stage")
        self._trained, self._fixed = ([array[0] for array in arrays] for arrays in (trained, fixed))

    def run(self) -> tuple[Array, list[Array]]:
        program, scan = self._all, lax.scan
        ticks = jnp.arange(self._micro + self._num - 1)
        edge, zero = program.edges.packed_zeros(), jnp.zeros((), jnp.float32)
        begin = (edge, program.edges.packed_zeros(self._micro), program.kept.packed_zeros(self._micro), zero)
        (_, edges, kept, loss), _ = scan(self._forward_tick, begin, ticks)
        tick = partial(self._backward_tick, edges, kept)
        (_, sums), _ = scan(tick, (program.gradient_edges.packed_zeros(), program.trained.packed_zeros()), ticks)
        return loss, sums

    def _forward_tick(self, carry: _Forward, tick: Array) -> tuple[_Forward, None]:
        edge, edges, store, loss = carry
        m = tick - self._place
        nothing = (self._all.edges.packed_zeros(), self._all.kept.packed_zeros(), jnp.zeros((), jnp.float32))
        sent, kept, more = self._run_stage_or_idle(self._forward, lambda _work, _m: nothing, m, edge)
        return (self._moved(sent, 1), self._kept_at(edges, edge, m), self._kept_at(store, kept, m), loss + more), None

    def _backward_tick(
        self, edges: Arrays, store: Arrays, carry: tuple[Arrays, Arrays], tick: Array
    ) -> tuple[tuple[Arrays, Arrays], None]:
        flowing, sums = carry
        m = tick - (self._num - 1 - self._place)
        slot = self._slot(m)
        edge, kept = ([array[slot] for array in arrays] for arrays in (edges, store))
        nothing = self._all.gradient_edges.packed_zeros()
        work = (edge, kept, flowing, sums)
        sent, sums = self._run_stage_or_idle(self._backward, lambda work, _m: (nothing, work[3]), m, work)
        return (self._moved(sent, -1), sums), None

    def _forward(self, k: int, edge: Arrays, m: Array) -> tuple[list[Array], list[Array], Array]:
        program = self._all
        outputs, kept = program.stages[k].forward(self._state(k), self._stage_input(k, edge, m))
        kept = program.kept.pack(k, kept)
        if k == self._num - 1:
            return program.edges.packed_zeros(), kept, outputs[0].astype(jnp.float32).reshape(())
        return program.edges.pack(k + 1, outputs), kept, jnp.zeros((), jnp.float32)

    def _backward(
        self, k: int, work: tuple[Arrays, Arrays, Arrays, Arrays], m: Array
    ) -> tuple[list[Array], list[Array]]:
        program, stage = self._all, self._all.stages[k]
        edge, kept, flowing, sums = work
        if k == self._num - 1:
            # The loss is the mean over the micro-batches.
            gradients = [jnp.full(stage.outputs[0].shape, 1 / self._micro, stage.outputs[0].dtype)]
        else:
            gradients = program.gradient_edges.unpack(k + 1, flowing)
        kept_here = program.kept.unpack(k, kept)
        of_trained, of_inputs = stage.backward(self._state(k), self._stage_input(k, edge, m), kept_here, gradients)
        sums = program.trained.sum_arrays(k, sums, [of_trained[name] for name in stage.trained])
        return program.gradient_edges.packed_zeros() if k == 0 else program.gradient_edges.pack(k, of_inputs), sums

    def _state(self, k: int) -> State:
        stage = self._all.stages[k]
        return (
            dict(zip(stage.trained, self._all.trained.unpack(k, self._trained), strict=True)),
            dict(zip(stage.fixed, self._all.fixed.unpack(k, self._fixed), strict=True)),
        )

    def _stage_input(self, k: int, edge: Arrays, m: Array) -> StageInput:
        inputs = [array[m] for array in self._batch.inputs] if k == 0 else self._all.edges.unpack(k, edge)
        targets = [array[m] for array in self._batch.targets] if k == self._num - 1 else []
        return StageInput(inputs, targets, jax.random.fold_in(self._batch.key, m))

    def _run_stage_or_idle(self, run: Any, idle: Any, m: Array, work: Any) -> Any:
        if self._num == 1:
            return run(0, work, m)
        branches = [*(partial(run, k) for k in range(self._num)), idle]
        choice = jnp.where(self._busy(m), self._place, self._num)
        return lax.switch(choice, branches, work, self._slot(m))

    def _moved(self, arrays: Arrays, step: int) -> list[Array]:
        ways = [(k, k + step) for k in range(self._num) if 0 <= k + step < self._num]
        return [lax.ppermute(array, "stage", ways) for array in arrays] if ways else list(arrays)

    def _kept_at(self, buffers: Arrays, arrays: Arrays, m: Array) -> list[Array]:
        slot, busy = self._slot(m), self._busy(m)
        return [
            buffer.at[slot].set(array if self._num == 1 else jnp.where(busy, array, buffer[slot]))
            for buffer, array in zip(buffers, arrays, strict=True)
        ]

    def _busy(self, m: Array) -> Array:
        return (m >= 0) & (m < self._micro)

    def _slot(self, m: Array) -> Array:
        return jnp.clip(m, 0, self._micro - 1)


def _floating(shapes: Shapes) -> list[jax.ShapeDtypeStruct]:
    return [shape for shape in shapes if jnp.issubdtype(shape.dtype, jnp.floating)]
