"""A plan as one JAX program: every device of a mesh runs one stage, micro-batch by micro-batch, as GPipe does.

    forward     for tick t in 0..M+K-2: device k runs micro-batch t - k and hands its output to device k + 1
    backward    for tick t in 0..M+K-2: device k runs micro-batch t - (K-1-k) and hands a gradient to device k - 1

Both are `lax.scan`s inside `shard_map`; a `lax.switch` on the place in the mesh chooses the stage, or nothing while
there is no micro-batch for it. All devices run the same program, so what differs between stages (parameters, what
crosses a boundary, what is kept for backward) is packed into arrays of the same shapes everywhere (`_Packing`).

A stage is a list of layers, each in two halves (`planner.bridge.torchax_adapter`), so that it keeps what its profile
says. Layers that are planned to be recomputed keep their input alone. What a layer writes into its buffers (running
statistics) is dropped.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from planner.bridge.torchax_adapter import (
    Halves,
    LayerFunction,
    halves_of,
    jax_modules,
    layer_function,
    shape_of,
    torch_like,
)
from planner.core.errors import UsageError
from planner.core.values.balance import Balance
from planner.model.chain import Chain, Layer
from planner.model.load import LoadedModel

__all__ = ["Given", "JaxPipeline", "Packing", "Stage"]

_MOST_PADDING = 1.5
"""Arrays are kept apart by shape as long as that takes at most so much more memory than the largest stage needs."""


_State = tuple[dict[str, Any], dict[str, Any]]
"""Trained parameters, and all else that a layer or a stage has, by name."""


class Given(NamedTuple):
    """What a stage works on for one micro-batch."""

    inputs: Sequence[Any]
    targets: Sequence[Any]
    """Of the last stage."""
    key: Any
    """Of all chance in it."""


@dataclass(frozen=True)
class _LayerHalves:
    """A layer of a stage."""

    number: int
    """Along the chain."""
    names: dict[str, str]
    """Own name of each parameter and buffer to its name in the stage."""
    function: LayerFunction
    halves: Halves
    recomputed: bool

    def state(self, trained: dict[str, Any], fixed: dict[str, Any]) -> _State:
        """Its part of the stage's."""
        return (
            {own: trained[self.names[own]] for own in self.function.trained},
            {own: fixed[self.names[own]] for own in self.function.fixed},
        )


class Stage:
    """Layers that run one after the other on one device.

    Args:
        layers: The layers.
        num_inputs: How many tensors it receives; the targets of a loss are none of them.
        recompute: Whether none but the input is kept for backward.
    """

    def __init__(self, layers: Sequence[_LayerHalves], num_inputs: int, *, recompute: bool) -> None:
        jax, _ = jax_modules()
        self._jax, self._layers, self._recompute = jax, layers, recompute
        self.inputs = list(layers[0].function.inputs[:num_inputs])
        self.outputs = list(layers[-1].halves.outputs)
        self.trained = {layer.names[own]: s for layer in layers for own, s in layer.function.trained.items()}
        self.fixed = {layer.names[own]: s for layer in layers for own, s in layer.function.fixed.items()}
        self._needed = [] if recompute else self._needed_between()
        boundaries = [self._shape(place) for place in self._needed]
        made = [s for layer in layers if not (recompute or layer.recomputed) for s in layer.halves.made]
        self.kept: list[Any] = [*boundaries, *made]
        """Shapes of what forward keeps, beside the stage's inputs."""

    def forward(self, state: _State, given: "Given") -> tuple[list[Any], list[Any]]:
        """Outputs, and what backward needs beside what is given."""
        values, made = self._run(state, given)
        between = [values[place][n] for place, n in self._needed]
        if self._recompute:
            return values[-1], []
        kept = [
            array for layer, arrays in zip(self._layers, made, strict=True) if not layer.recomputed for array in arrays
        ]
        return values[-1], [*between, *kept]

    def backward(
        self, state: _State, given: "Given", kept: Sequence[Any], gradients: Sequence[Any]
    ) -> tuple[dict[str, Any], list[Any]]:
        """Gradients of what is trained, and of the inputs that carry one."""
        values, made = self._run(state, given) if self._recompute else self._unpacked(given.inputs, kept)
        of_trained: dict[str, Any] = {}
        flowing = list(gradients)
        for place in reversed(range(len(self._layers))):
            layer = self._layers[place]
            arguments = self._arguments(place, state, values[place], given)
            outputs, own = values[place + 1], made[place]
            if layer.recomputed and not self._recompute:
                outputs, own = layer.halves.forward(*arguments)
            pulled, flowing = layer.halves.backward(arguments, outputs, own, flowing)
            for name, gradient in pulled.items():
                known = of_trained.get(layer.names[name])
                of_trained[layer.names[name]] = gradient if known is None else known + gradient
        return of_trained, flowing

    # Private methods

    def _run(self, state: _State, given: "Given") -> tuple[list[Any], list[Any]]:
        values, made = [list(given.inputs)], []
        for place, layer in enumerate(self._layers):
            outputs, own = layer.halves.forward(*self._arguments(place, state, values[-1], given))
            values.append(list(outputs))
            made.append(list(own))
        return values, made

    def _arguments(self, place: int, state: _State, values: Sequence[Any], given: "Given") -> tuple[Any, ...]:
        layer = self._layers[place]
        # The targets of the loss are inputs of the last layer.
        more = len(layer.function.inputs) - len(values)
        key = self._jax.random.fold_in(given.key, layer.number)
        return (*layer.state(*state), [*values, *given.targets[:more]], key)

    def _needed_between(self) -> list[tuple[int, int]]:
        """Which tensors between layers some backward reads: (boundary, place), each storage once."""
        needed: dict[tuple[int, int], None] = {}
        for place, layer in enumerate(self._layers):
            tensors = range(len(self._between(place)))
            read: list[tuple[str, int | str]] = [("input", n) for n in tensors] if layer.recomputed else []
            read += [(r.kind, r.index) for r in layer.halves.residuals if not layer.recomputed]
            for kind, n in read:
                if kind in ("input", "output") and (kind == "output" or n in tensors):
                    needed[self._made_at(place + (kind == "output"), int(n))] = None
        return [found for found in needed if found[0] > 0]

    def _made_at(self, boundary: int, n: int) -> tuple[int, int]:
        """Where a tensor that layers only pass on comes from."""
        while boundary > 0 and self._layers[boundary - 1].halves.passed[n] >= 0:
            boundary, n = boundary - 1, self._layers[boundary - 1].halves.passed[n]
        return boundary, n

    def _between(self, boundary: int) -> list[Any]:
        return self.inputs if boundary == 0 else self._layers[boundary - 1].halves.outputs

    def _shape(self, place: tuple[int, int]) -> Any:
        return self._between(place[0])[place[1]]

    def _unpacked(self, inputs: Sequence[Any], kept: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        # What nobody reads may be anything.
        nothing = self._jax.numpy.zeros(())
        known = dict(zip(self._needed, kept, strict=False)) | {(0, n): value for n, value in enumerate(inputs)}
        values = [
            [known.get(self._made_at(b, n), nothing) for n in range(len(self._between(b)))]
            for b in range(len(self._layers) + 1)
        ]
        rest = iter(kept[len(self._needed) :])
        made = [[] if layer.recomputed else [next(rest) for _ in layer.halves.made] for layer in self._layers]
        return values, made


class Packing:
    """Lists of arrays, one list per stage, as arrays of the same shapes on every device.

    Arrays of the same shape take turns in one place as long as that wastes little; else all of a dtype lie behind each
    other in one vector, which the device has to take apart into other layouts.

    Args:
        stages: Shapes of each stage's arrays.
    """

    def __init__(self, stages: Sequence[Sequence[Any]]) -> None:
        jax, _ = jax_modules()
        self._jax, self._stages = jax, [list(stage) for stage in stages]
        counts: dict[tuple[tuple[int, ...], Any], int] = {}
        for stage in self._stages:
            own: dict[tuple[tuple[int, ...], Any], int] = {}
            for shape in stage:
                kind = (tuple(shape.shape), shape.dtype)
                own[kind] = own.get(kind, 0) + 1
            counts |= {kind: max(count, counts.get(kind, 0)) for kind, count in own.items()}
        apart = sum(_bytes(*kind) * count for kind, count in counts.items())
        self.needed_bytes = [sum(_bytes(s.shape, s.dtype) for s in stage) for stage in self._stages]
        most = max(self.needed_bytes, default=0)
        self._flat = apart > _MOST_PADDING * most
        if self._flat:
            dtypes = sorted({shape.dtype for stage in self._stages for shape in stage}, key=str)
            lengths = {dtype: max(self._length(stage, dtype) for stage in self._stages) for dtype in dtypes}
            self.shapes = [jax.ShapeDtypeStruct((lengths[dtype],), dtype) for dtype in dtypes]
        else:
            self.shapes = [jax.ShapeDtypeStruct(*kind) for kind, count in counts.items() for _ in range(count)]
        self.bytes = sum(_bytes(s.shape, s.dtype) for s in self.shapes)
        """On every device."""

    def pack(self, stage: int, arrays: Sequence[Any], numpy: Any = None) -> list[Any]:
        """A stage's arrays, padded with zeros."""
        numpy = self._jax.numpy if numpy is None else numpy
        if not self._flat:
            filled = dict(zip(self._places(stage), arrays, strict=True))
            return [filled.get(n, numpy.zeros(s.shape, s.dtype)) for n, s in enumerate(self.shapes)]
        packed = []
        for whole in self.shapes:
            own = [array.reshape(-1) for array in arrays if array.dtype == whole.dtype]
            padding = whole.shape[0] - sum(array.shape[0] for array in own)
            packed.append(numpy.concatenate([*own, numpy.zeros((padding,), whole.dtype)]))
        return packed

    def unpack(self, stage: int, packed: Sequence[Any]) -> list[Any]:
        """And back."""
        if not self._flat:
            return [packed[n] for n in self._places(stage)]
        wholes = {shape.dtype: array for shape, array in zip(self.shapes, packed, strict=True)}
        begin = dict.fromkeys(wholes, 0)
        arrays = []
        for shape in self._stages[stage]:
            first = begin[shape.dtype]
            begin[shape.dtype] = end = first + _size(shape.shape)
            arrays.append(wholes[shape.dtype][first:end].reshape(shape.shape))
        return arrays

    def add(self, stage: int, packed: Sequence[Any], arrays: Sequence[Any]) -> list[Any]:
        """Adds a stage's arrays to packed ones."""
        sums = list(packed)
        if not self._flat:
            for n, array in zip(self._places(stage), arrays, strict=True):
                sums[n] = sums[n] + array
            return sums
        return [whole + more for whole, more in zip(packed, self.pack(stage, arrays), strict=True)]

    def zeros(self, *front: int) -> list[Any]:
        """Nothing of any stage; `front`: dimensions in front of each array's own."""
        return [self._jax.numpy.zeros((*front, *s.shape), s.dtype) for s in self.shapes]

    def _places(self, stage: int) -> list[int]:
        free: dict[Any, list[int]] = {}
        for n, shape in enumerate(self.shapes):
            free.setdefault((tuple(shape.shape), shape.dtype), []).append(n)
        return [free[tuple(shape.shape), shape.dtype].pop(0) for shape in self._stages[stage]]

    @staticmethod
    def _length(stage: Sequence[Any], dtype: Any) -> int:
        return sum(_size(shape.shape) for shape in stage if shape.dtype == dtype)


class JaxPipeline:
    """A model's stages as one program over the devices of a mesh.

    Args:
        loaded: The model.
        chain: Its layers; parameters are read when they are asked for (`parameters`).
        balance: How it is cut.
        devices: One per stage, in order.

    Raises:
        UsageError: The plan is not one for such a program.
    """

    def __init__(self, loaded: LoadedModel, chain: Chain, balance: Balance, devices: Sequence[Any]) -> None:
        jax, _ = jax_modules()
        _check(loaded, balance)
        self._jax, self._loaded, self._chain, self._balance = jax, loaded, chain, balance
        self.micro_batches, self.num_stages = balance.micro_batches, len(balance.balance)
        self.mesh = jax.sharding.Mesh(list(devices), ("stage",))
        self._cuts = list(pairwise(accumulate(balance.balance, initial=0)))
        batch = loaded.example_batch(balance.batch // balance.micro_batches)
        self._targets = _tensor_shapes(batch.targets)
        self._inputs = _tensor_shapes(batch.inputs)
        self.stages = _stages(loaded, chain, balance, batch)
        self.trained = Packing([list(stage.trained.values()) for stage in self.stages])
        self.fixed = Packing([list(stage.fixed.values()) for stage in self.stages])
        self.kept = Packing([stage.kept for stage in self.stages])
        # The first stage reads the mini-batch itself, and what the last returns is the loss.
        self.edges = Packing([[], *(stage.inputs for stage in self.stages[1:])])
        self.gradient_edges = Packing([[], *(_floating(jax, stage.inputs) for stage in self.stages[1:])])

    def parameters(self) -> tuple[list[Any], list[Any]]:
        """Trained and fixed state of all stages, each packed array with the stage in front."""
        return tuple(  # type: ignore[return-value]
            self._placed(packing, [self._state(k, kind) for k in range(self.num_stages)])
            for packing, kind in ((self.trained, "trained"), (self.fixed, "fixed"))
        )

    def batch(self, inputs: Any, targets: Any) -> tuple[list[Any], list[Any]]:
        """A mini-batch as the program takes it: every tensor as (micro-batch, sample, …)."""
        return self._split(inputs), self._split(targets)

    def shapes(self) -> tuple[Any, ...]:
        """Of the arguments of `gradients`, with where they lie."""
        jax = self._jax
        apart, everywhere = self._sharding("stage"), self._sharding()

        def packed(packing: Packing) -> list[Any]:
            return [jax.ShapeDtypeStruct((self.num_stages, *s.shape), s.dtype, sharding=apart) for s in packing.shapes]

        def data(shapes: Sequence[Any]) -> list[Any]:
            return [jax.ShapeDtypeStruct((self.micro_batches, *s.shape), s.dtype, sharding=everywhere) for s in shapes]

        key = jax.eval_shape(lambda: jax.random.key(0))
        key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=everywhere)
        return packed(self.trained), packed(self.fixed), data(self._inputs), data(self._targets), key

    def gradients(self, trained: Any, fixed: Any, inputs: Any, targets: Any, key: Any) -> tuple[Any, list[Any]]:
        """Loss of a mini-batch (mean over the micro-batches), and gradients packed as `trained` is; to be jitted."""
        jax = self._jax
        one, apart = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("stage")
        mapped = jax.shard_map(
            self._on_one_device,
            mesh=self.mesh,
            in_specs=(apart, apart, one, one, one),
            out_specs=(one, apart),
            check_vma=False,
        )
        return mapped(trained, fixed, inputs, targets, key)  # type: ignore[no-any-return]

    def by_name(self, packed: Sequence[Any]) -> dict[str, Any]:
        """Trained parameters, or their gradients, by the names that they have in the model, as numpy arrays."""
        found: dict[str, Any] = {}
        for k, stage in enumerate(self.stages):
            own = self.trained.unpack(k, [self._jax.device_get(array)[k] for array in packed])
            found.update(zip(stage.trained, own, strict=True))
        return found

    # Private methods

    def _on_one_device(self, trained: Any, fixed: Any, inputs: Any, targets: Any, key: Any) -> tuple[Any, list[Any]]:
        loss, sums = _OneDevice(self, trained, fixed, Given(inputs, targets, key)).run()
        return self._jax.lax.psum(loss, "stage") / self.micro_batches, [array[None] for array in sums]

    def _state(self, k: int, kind: str) -> list[Any]:
        layers = self._chain.layers[slice(*self._cuts[k])]
        known = {name: tensor for layer in layers for name, tensor in _named(layer).items()}
        return [_as_numpy(known[name]) for name in getattr(self.stages[k], kind)]

    def _placed(self, packing: Packing, stages: Sequence[Sequence[Any]]) -> list[Any]:
        packed = [packing.pack(k, arrays, np) for k, arrays in enumerate(stages)]
        return [
            self._jax.device_put(np.stack([arrays[n] for arrays in packed]), self._sharding("stage"))
            for n in range(len(packing.shapes))
        ]

    def _split(self, value: Any) -> list[Any]:
        tensors = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
        micro = [tensor.reshape(self.micro_batches, -1, *tensor.shape[1:]) for tensor in tensors]
        return [self._jax.device_put(_as_numpy(tensor), self._sharding()) for tensor in micro]

    def _sharding(self, *axes: str) -> Any:
        return self._jax.sharding.NamedSharding(self.mesh, self._jax.sharding.PartitionSpec(*axes))


class _OneDevice:
    """The program as one device sees it, while it is traced.

    Args:
        pipeline: Its stages and packings.
        trained: This device's parameters, packed.
        fixed: Likewise.
        batch: Inputs and targets of the mini-batch, micro-batch by micro-batch, and its key.
    """

    def __init__(self, pipeline: JaxPipeline, trained: Any, fixed: Any, batch: Given) -> None:
        self._jax, _ = jax_modules()
        self._numpy = self._jax.numpy
        self._all, self._batch = pipeline, batch
        self._num, self._micro = pipeline.num_stages, pipeline.micro_batches
        self._place = self._jax.lax.axis_index("stage")
        self._trained, self._fixed = ([array[0] for array in arrays] for arrays in (trained, fixed))

    def run(self) -> tuple[Any, list[Any]]:
        """Sum of the losses that are computed here, and of the gradients of this device's parameters."""
        pipeline, scan = self._all, self._jax.lax.scan
        ticks = self._numpy.arange(self._micro + self._num - 1)
        edge, zero = pipeline.edges.zeros(), self._numpy.zeros((), self._numpy.float32)
        begin = (edge, pipeline.edges.zeros(self._micro), pipeline.kept.zeros(self._micro), zero)
        (_, edges, kept, loss), _ = scan(self._forward_tick, begin, ticks)
        tick = partial(self._backward_tick, edges, kept)
        (_, sums), _ = scan(tick, (pipeline.gradient_edges.zeros(), pipeline.trained.zeros()), ticks)
        return loss, sums

    # Private methods

    def _forward_tick(self, carry: Any, tick: Any) -> tuple[Any, None]:
        edge, edges, store, loss = carry
        m = tick - self._place
        nothing = (self._all.edges.zeros(), self._all.kept.zeros(), self._numpy.zeros((), self._numpy.float32))
        sent, kept, more = self._chosen(self._forward, lambda _given, _m: nothing, m, edge)
        return (self._moved(sent, 1), self._kept_at(edges, edge, m), self._kept_at(store, kept, m), loss + more), None

    def _backward_tick(self, edges: Any, store: Any, carry: Any, tick: Any) -> tuple[Any, None]:
        flowing, sums = carry
        m = tick - (self._num - 1 - self._place)
        slot = self._slot(m)
        edge, kept = ([array[slot] for array in arrays] for arrays in (edges, store))
        nothing = self._all.gradient_edges.zeros()
        given = (edge, kept, flowing, sums)
        sent, sums = self._chosen(self._backward, lambda given, _m: (nothing, given[3]), m, given)
        return (self._moved(sent, -1), sums), None

    def _forward(self, k: int, edge: Any, m: Any) -> tuple[Any, Any, Any]:
        pipeline, numpy = self._all, self._numpy
        outputs, kept = pipeline.stages[k].forward(self._state(k), self._given(k, edge, m))
        kept = pipeline.kept.pack(k, kept)
        if k == self._num - 1:
            return pipeline.edges.zeros(), kept, outputs[0].astype(numpy.float32).reshape(())
        return pipeline.edges.pack(k + 1, outputs), kept, numpy.zeros((), numpy.float32)

    def _backward(self, k: int, given: Any, m: Any) -> tuple[Any, Any]:
        pipeline, stage = self._all, self._all.stages[k]
        edge, kept, flowing, sums = given
        if k == self._num - 1:
            # The loss is the mean over the micro-batches.
            gradients = [self._numpy.full(stage.outputs[0].shape, 1 / self._micro, stage.outputs[0].dtype)]
        else:
            gradients = pipeline.gradient_edges.unpack(k + 1, flowing)
        own = pipeline.kept.unpack(k, kept)
        of_trained, of_inputs = stage.backward(self._state(k), self._given(k, edge, m), own, gradients)
        sums = pipeline.trained.add(k, sums, [of_trained[name] for name in stage.trained])
        return pipeline.gradient_edges.zeros() if k == 0 else pipeline.gradient_edges.pack(k, of_inputs), sums

    def _state(self, k: int) -> _State:
        stage = self._all.stages[k]
        return (
            dict(zip(stage.trained, self._all.trained.unpack(k, self._trained), strict=True)),
            dict(zip(stage.fixed, self._all.fixed.unpack(k, self._fixed), strict=True)),
        )

    def _given(self, k: int, edge: Any, m: Any) -> Given:
        inputs = [array[m] for array in self._batch.inputs] if k == 0 else self._all.edges.unpack(k, edge)
        targets = [array[m] for array in self._batch.targets] if k == self._num - 1 else []
        return Given(inputs, targets, self._jax.random.fold_in(self._batch.key, m))

    def _chosen(self, run: Any, idle: Any, m: Any, given: Any) -> Any:
        """The stage of this device, or `idle` where there is no micro-batch."""
        if self._num == 1:
            return run(0, given, m)
        branches = [*(partial(run, k) for k in range(self._num)), idle]
        choice = self._numpy.where(self._busy(m), self._place, self._num)
        return self._jax.lax.switch(choice, branches, given, self._slot(m))

    def _moved(self, arrays: Sequence[Any], step: int) -> list[Any]:
        ways = [(k, k + step) for k in range(self._num) if 0 <= k + step < self._num]
        return [self._jax.lax.ppermute(array, "stage", ways) for array in arrays] if ways else list(arrays)

    def _kept_at(self, buffers: Sequence[Any], arrays: Sequence[Any], m: Any) -> list[Any]:
        slot, busy = self._slot(m), self._busy(m)
        return [
            buffer.at[slot].set(array if self._num == 1 else self._numpy.where(busy, array, buffer[slot]))
            for buffer, array in zip(buffers, arrays, strict=True)
        ]

    def _busy(self, m: Any) -> Any:
        return (m >= 0) & (m < self._micro)

    def _slot(self, m: Any) -> Any:
        return self._numpy.clip(m, 0, self._micro - 1)


# Private functions


def _check(loaded: LoadedModel, balance: Balance) -> None:
    if loaded.loss_count is not None:
        raise UsageError(
            "the JAX program takes the mean of the micro-batches' losses, and the model's `loss_count` says otherwise",
            hint="emit for the bundled executor: `--format native`",
        )
    if balance.schedule != "gpipe":
        raise UsageError(
            f"the JAX program runs GPipe's schedule, the plan is for {balance.schedule}",
            hint="solve with `--schedule gpipe`",
        )


def _stages(loaded: LoadedModel, chain: Chain, balance: Balance, batch: Any) -> list[Stage]:
    leaves, nest = tree_flatten(batch.inputs)
    values = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    stages, number = [], 0
    owners: dict[int, tuple[int, str]] = {}
    for k, cut in enumerate(balance.stages):
        layers = []
        num_inputs = sum(isinstance(value, Tensor) for value in values)
        for layer in chain.layers[number : number + len(cut.layers)]:
            last = number == len(chain.layers) - 1
            function, after = _function(loaded, layer, values, nest, batch.targets if last else None, last=last)
            halves = halves_of(function)
            names = _stage_names(layer, k, owners)
            layers.append(_LayerHalves(number, names, function, halves, layer.name in cut.recomputed))
            nest, places = after()
            tensors = [torch_like(shape) for shape in halves.outputs]
            values = [tensors[n] if isinstance(n, int) else n[0] for n in places]
            number += 1
        # `except-last` would keep the last micro-batch's activations; the program is the same for all of them.
        stages.append(Stage(layers, num_inputs, recompute=cut.recompute in ("always", "except-last")))
    return stages


def _function(
    loaded: LoadedModel, layer: Layer, values: Sequence[Any], nest: TreeSpec, targets: Any, *, last: bool
) -> tuple[LayerFunction, Callable[[], tuple[TreeSpec, list[Any]]]]:
    """A layer's function, and what tells, once it was traced, the nest of its outputs and where its tensors are."""
    of_loss, loss_nest = tree_flatten(targets)
    seen: dict[str, Any] = {}

    def run(given: Sequence[Any]) -> Sequence[Any]:
        output = layer.module(tree_unflatten(list(given[: len(values)]), nest))
        if last:
            output = loaded.loss_fn(output, tree_unflatten(list(given[len(values) :]), loss_nest))
        outputs, seen["nest"] = tree_flatten(output)
        tensors = iter(range(len(outputs)))
        seen["places"] = [next(tensors) if isinstance(value, Tensor) else (value,) for value in outputs]
        return outputs

    function = layer_function(layer.module, run, [*values, *of_loss])
    return function, lambda: (seen["nest"], seen["places"])


def _stage_names(layer: Layer, stage: int, owners: dict[int, tuple[int, str]]) -> dict[str, str]:
    """Own names to names in the model; what is tied within a stage has one name there."""
    names = {}
    full = _named(layer)
    for (name, tensor), own in zip(full.items(), _own_names(layer), strict=True):
        if isinstance(tensor, torch.nn.Parameter):
            first, known = owners.setdefault(id(tensor), (stage, name))
            if first != stage:
                raise UsageError(
                    f'"{name}" is the same parameter as "{known}" in another stage: the JAX program does not sum these',
                    hint="build the model without sharing it, or emit for the bundled executor, which sums them",
                )
            names[own] = known
        else:
            names[own] = name
    return names


def _named(layer: Layer) -> dict[str, Tensor]:
    """Parameters and buffers by their names in the model."""
    buffers = dict(layer.module.named_buffers())
    prefix = "" if set(layer.parameter_names()) == set(dict(layer.module.named_parameters())) else f"{layer.name}."
    if not dict(layer.module.named_parameters()):
        prefix = f"{layer.name}."
    return {**layer.parameter_names(), **{f"{prefix}{name}": buffer for name, buffer in buffers.items()}}


def _own_names(layer: Layer) -> list[str]:
    return [*dict(layer.module.named_parameters()), *dict(layer.module.named_buffers())]


def _floating(jax: Any, shapes: Iterable[Any]) -> list[Any]:
    return [shape for shape in shapes if jax.numpy.issubdtype(shape.dtype, jax.numpy.floating)]


def _tensor_shapes(value: Any) -> list[Any]:
    return [shape_of(leaf) for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _as_numpy(tensor: Tensor) -> Any:
    # numpy itself has no bfloat16.
    held = tensor.detach().cpu()
    return np.asarray(held.float() if held.dtype == torch.bfloat16 else held, shape_of(tensor).dtype)


def _size(shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _bytes(shape: Sequence[int], dtype: Any) -> int:
    return _size(shape) * int(dtype.itemsize)
