"""What layers cost on a TPU that need not be here, by what the TPU's own compiler says.

Each distinct layer becomes four programs (`planner.bridge.torchax_adapter`). The compiler tells of each how many bytes
it takes in, gives back and needs meanwhile, padding included, and how long it should take.

    forward     returns outputs and what backward will read     saved bytes: results beyond the outputs
    backward    reads that, adds to gradients                   transient: temporaries, gradients of outputs and inputs
    both        one after the other                             `peak_bytes` of `ProgramMemory`, likewise
    apart       both, and in between something so large that    `carried_bytes`: temporaries beyond that
                the program is at its fullest there

The first two are what a loop over micro-batches does, which puts into arrays what is kept. The last two are one
micro-batch from begin to end, of which the compiler keeps what it likes, in whatever precision the products take.
Times are the compiler's estimates; where it makes none, operations at the peak rate or bytes at the peak bandwidth,
whichever takes longer.

The optimizer's step over a layer's parameters is a program, too (`planner.bridge.torchax_optimizer`).

With a TPU attached the same programs are run and timed instead. Compiled layers are remembered on disk, one file each,
so that an interrupted profile goes on where it was.
"""

import hashlib
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from planner.bridge.compiling import Problem, found_by, raise_problems
from planner.bridge.torchax_adapter import (
    Halves,
    LayerFunction,
    OutOfMemoryError,
    Program,
    compile_program,
    filled_between,
    halves_of,
    jax_modules,
    layer_function,
    named_chip,
    random_key,
    versions,
)
from planner.bridge.torchax_optimizer import Builder, optimizer_description, step_function
from planner.bridge.tpu_layouts import padded_bytes
from planner.core.values.profile import BoundaryTensor, MemoryDetail, ProgramMemory
from planner.profile.backends.rates import Rates
from planner.profile.units import Unit, UnitInput

__all__ = ["CompiledLayer", "CompiledStep", "Compiler", "unit_function"]

_REVISION = 2
"""Of what is remembered of a layer or a step, and of how it is compiled."""

_LEAST_FILLING_BYTES = 2**24
"""The compiler would not put this into the core's own memory."""


@dataclass(frozen=True, kw_only=True)
class CompiledLayer:
    """One layer at one micro-batch size; bytes of the device's memory."""

    inputs: tuple[int, ...]
    """Per input tensor."""
    laid_out_bytes: int
    """Of all of them, as the layer wants them to lie."""
    kept_inputs: tuple[bool, ...]
    """Whether backward reads it."""
    outputs: tuple[int, ...]
    kept_outputs: tuple[bool, ...]
    aliases: tuple[int, ...]
    """Per output: which input it is as it came, or -1."""
    made_bytes: int
    """Kept for backward, and neither input nor output nor parameter."""
    forward_us: float
    backward_us: float
    forward_temporary_bytes: int
    backward_temporary_bytes: int
    """With the gradients of outputs and inputs."""
    peak_bytes: int
    """Likewise, of both in one program."""
    carried_bytes: int
    """From one to the other there, inputs, outputs and parameters not counted."""
    narrowed_bytes: int
    """Of weights as products take them."""
    padding_bytes: int
    """Of the parameters that are trained."""
    flops: float
    """Of the forward."""
    narrowed_inputs_bytes: int = 0
    """Of inputs as products take them."""

    def detail(self) -> MemoryDetail:
        """As a memory record."""
        tensors = zip(self.outputs, self.kept_outputs, self.aliases, strict=True)
        outputs = tuple(BoundaryTensor(bytes=size, kept=kept, alias=alias) for size, kept, alias in tensors)
        made = sum(size for size, alias in zip(self.outputs, self.aliases, strict=True) if alias < 0)
        inputs = zip(self.inputs, self.kept_inputs, strict=True)
        return MemoryDetail(
            internal_bytes=self.made_bytes,
            inputs=tuple(BoundaryTensor(bytes=size, kept=kept) for size, kept in inputs),
            outputs=outputs,
            forward_peak_bytes=self.forward_temporary_bytes + self.made_bytes + made,
            no_grad_peak_bytes=self.forward_temporary_bytes + self.made_bytes + made,
            first_backward_peak_bytes=self.backward_temporary_bytes + self.made_bytes,
            backward_peak_bytes=self.backward_temporary_bytes + self.made_bytes,
        )

    def program(self, kept_bytes: int) -> ProgramMemory:
        """As a record of a layer within one program.

        Args:
            kept_bytes: Of its outputs, what is kept for some backward.
        """
        return ProgramMemory(
            carried_bytes=self.carried_bytes + kept_bytes,
            peak_bytes=self.peak_bytes,
            narrowed_bytes=self.narrowed_bytes,
            padding_bytes=self.padding_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """The optimizer's step over the parameters of one layer."""

    step_us: float
    peak_bytes: int
    """Beside parameters, gradients and state."""


def unit_function(unit: Unit, given: UnitInput) -> LayerFunction:
    """A unit, its loss included where it is the last, as a function of JAX arrays: inputs, then targets."""
    targets, nest = tree_flatten(given.targets)
    num = len(given.values)

    def run(values: Sequence[Any]) -> Sequence[Any]:
        return unit.run(values[:num], replace(given, targets=tree_unflatten(values[num:], nest)))

    return layer_function(unit.module, run, [*given.values, *targets])


class Compiler:
    """Compiles layers for one kind of chip, or for the device that is attached, and remembers what came of it.

    Args:
        chip: `v2`, say; empty for an attached device.
        rates: The chip's.
        folder: Where it is remembered; None: nowhere.
        repeats: Timed runs of each program on an attached device.
    """

    def __init__(self, chip: str, rates: Rates, folder: Path | None, repeats: int = 10) -> None:
        self._chip, self._rates, self._folder, self._repeats = chip, rates, folder, repeats

    def compile(self, jobs: Sequence[tuple[Unit, UnitInput, int]]) -> Iterator[tuple[int, CompiledLayer]]:
        """Each job's place and outcome as they come, those that are remembered first.

        Args:
            jobs: Unit, its input, and how many samples that is.

        Raises:
            ModelError: torchax lacks an operator of a layer, or a layer cannot be compiled; all such layers are named.
            MemoryError: A layer alone needs more memory than the chip has.
        """
        paths = [self._path(self._known_of(unit, given)) for unit, given, _ in jobs]
        works = [partial(self._of_unit, unit, given) for unit, given, _ in jobs]
        problems: dict[str, dict[str, Problem]] = {}
        for n, found in found_by(CompiledLayer, paths, works, several=bool(self._chip)):
            if isinstance(found, CompiledLayer):
                yield n, found
            else:
                problems.setdefault(found.kind, {})[jobs[n][0].name] = found
        raise_problems(problems)

    def steps(self, parameters: Sequence[Sequence[Tensor]], build: Builder) -> Iterator[tuple[int, CompiledStep | str]]:
        """The optimizer's step over the parameters of several layers: place and outcome, as they come.

        Args:
            parameters: Of each layer, those that are trained; of tensors only shape and dtype count.
            build: Makes the optimizer.

        Returns:
            The outcome is a line that says why, where the compiler cannot be asked: torchax cannot trace the optimizer.
        """
        paths = [self._path(self._known_of_step(trained, build)) for trained in parameters]
        works = [partial(self._step, trained, build) for trained in parameters]
        for n, found in found_by(CompiledStep, paths, works, several=bool(self._chip)):
            yield n, found if isinstance(found, CompiledStep) else found.what

    # Private methods

    def _of_unit(self, unit: Unit, given: UnitInput) -> CompiledLayer:
        return self._layer(unit_function(unit, given))

    def _step(self, parameters: Sequence[Tensor], build: Builder) -> CompiledStep:
        function = step_function(parameters, build)
        given = (function.parameters, function.states, function.parameters)
        program = compile_program(function.call, given, self._device(), donated=(0, 1))
        return CompiledStep(
            step_us=self._time_us(program, given),
            peak_bytes=program.temporary_bytes + max(0, program.output_bytes - program.alias_bytes),
        )

    def _device(self) -> Any:
        jax, _ = jax_modules()
        return named_chip(self._chip) if self._chip else jax.devices()[0]

    def _layer(self, function: LayerFunction) -> CompiledLayer:
        jax, _ = jax_modules()
        device = self._device()
        halves = halves_of(function)
        state = (function.trained, function.fixed, list(function.inputs), random_key())
        pulled = [halves.outputs[n] for n in halves.differentiable]

        def backward(gradients: Any, pulled: Any, *given: Any) -> Any:
            of_trained, of_inputs = halves.backward(given[:4], *given[4:], pulled)
            return jax.tree.map(jax.numpy.add, gradients, of_trained), of_inputs

        def both(gradients: Any, pulled: Any, *given: Any) -> Any:
            outputs, made = halves.forward(*given)
            # Whatever reads the outputs does so before their gradients are there.
            outputs, pulled = jax.lax.optimization_barrier((outputs, pulled))
            return backward(gradients, pulled, *given, outputs, made)

        def apart(gradients: Any, pulled: Any, *given: Any) -> Any:
            outputs, made = halves.forward(*given)
            return backward(gradients, filled_between(outputs, pulled, filling), *given, outputs, made)

        forward = compile_program(halves.forward, state, device)
        given = (function.trained, pulled, *state, halves.outputs, halves.made)
        if not function.trained and not any(function.needed):  # there is no backward
            return _layer_of(function, halves, [forward], [self._time_us(forward, state)])
        programs = [forward, compile_program(backward, given, device, donated=(0, 1))]
        times_us = [self._time_us(program, shapes) for program, shapes in zip(programs, (state, given), strict=True)]
        programs.append(compile_program(both, given[:-2], device, donated=(0, 1)))
        # More than the program could hold at any other time.
        filling = programs[2].temporary_bytes + _LEAST_FILLING_BYTES
        with suppress(OutOfMemoryError):  # near the end of the chip's memory only what a loop keeps is known
            full = compile_program(apart, given[:-2], device, donated=(0, 1))
            programs.append(replace(full, temporary_bytes=max(0, full.temporary_bytes - filling)))
        return _layer_of(function, halves, programs, times_us)

    def _time_us(self, program: Program, shapes: Any) -> float:
        return self._estimated_us(program) if self._chip else _measured_us(program, shapes, self._repeats)

    def _estimated_us(self, program: Program) -> float:
        if program.seconds > 0:
            return 1e6 * program.seconds
        # Products are of bfloat16 numbers unless the model asks for another precision.
        return 1e6 * max(program.flops / self._rates.half_flops_per_s, program.accessed_bytes / self._rates.bytes_per_s)

    def _path(self, known: list[Any] | None) -> Path | None:
        """Where an outcome is remembered, by what decides it."""
        if known is None or self._folder is None or not self._chip:
            return None
        digest = hashlib.sha256(json.dumps([_REVISION, self._chip, *known, versions()], sort_keys=True).encode())
        return self._folder / f"{digest.hexdigest()[:32]}.json"

    @staticmethod
    def _known_of(unit: Unit, given: UnitInput) -> list[Any]:
        shapes = [[str(v.dtype), list(v.shape)] if isinstance(v, Tensor) else repr(v) for v in given.values]
        parameters = [
            [name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in unit.module.named_parameters()
        ]
        return [unit.digest, shapes, str(given.spec), parameters, unit.precision]

    @staticmethod
    def _known_of_step(parameters: Sequence[Tensor], build: Builder) -> list[Any] | None:
        described = optimizer_description(parameters, build)
        return None if described is None else ["step", described, [[list(p.shape), str(p.dtype)] for p in parameters]]


# Private functions


def _layer_of(
    function: LayerFunction, halves: Halves, programs: Sequence[Program], times_us: Sequence[float]
) -> CompiledLayer:
    forward = programs[0]
    read = {(residual.kind, residual.index) for residual in halves.residuals}
    outputs, made = forward.outputs[: len(halves.outputs)], forward.outputs[len(halves.outputs) :]
    # Gradients lie like what they belong to.
    pulled = sum(outputs[n] for n in halves.differentiable)
    backward_bytes, peak_bytes = (
        (program.temporary_bytes + pulled + program.output_bytes - program.alias_bytes for program in programs[1:3])
        if len(programs) > 1
        else (0, forward.temporary_bytes)
    )
    carried = programs[3].temporary_bytes if len(programs) > 3 else sum(made)
    return CompiledLayer(
        inputs=tuple(map(padded_bytes, function.inputs)),
        laid_out_bytes=sum(forward.arguments[-1 - len(function.inputs) : -1]),
        kept_inputs=tuple(("input", n) in read for n in range(len(function.inputs))),
        outputs=outputs,
        kept_outputs=tuple(("output", n) in read for n in range(len(outputs))),
        aliases=tuple(halves.passed),
        made_bytes=sum(made),
        forward_us=times_us[0],
        backward_us=times_us[1] if len(times_us) > 1 else 0.0,
        forward_temporary_bytes=forward.temporary_bytes,
        backward_temporary_bytes=backward_bytes,
        peak_bytes=peak_bytes,
        # Outputs that backward reads are counted as such.
        carried_bytes=max(0, carried - sum(size for n, size in enumerate(outputs) if ("output", n) in read)),
        narrowed_bytes=sum(map(_narrowed_bytes, function.trained.values())),
        padding_bytes=sum(padded_bytes(shape) - _bytes(shape) for shape in function.trained.values()),
        flops=forward.flops,
        narrowed_inputs_bytes=sum(padded_bytes(shape) // 2 for shape in function.inputs if _narrowed_bytes(shape)),
    )


def _narrowed_bytes(shape: Any) -> int:
    """Of a weight as products take it, which is in 16 bits unless the model asks for more; vectors are no factors."""
    return int(2 * shape.size) if len(shape.shape) > 1 and shape.dtype == "float32" else 0


def _bytes(shape: Any) -> int:
    return int(shape.size * shape.dtype.itemsize)


def _measured_us(program: Program, shapes: Any, repeats: int) -> float:
    jax, _ = jax_modules()
    formats = program.executable.input_formats[0]
    times = []
    for _ in range(repeats + 1):
        # What is donated is gone after each run.
        given = jax.tree.map(lambda shape, place: jax.device_put(_zeros(jax, shape), place), tuple(shapes), formats)
        jax.block_until_ready(given)
        begun = time.perf_counter()
        jax.block_until_ready(program.executable(*given))
        times.append(time.perf_counter() - begun)
    return 1e6 * statistics.median(times[1:])


def _zeros(jax: Any, shape: Any) -> Any:
    if jax.dtypes.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jax.numpy.zeros(shape.shape, shape.dtype)
