"""A layer as the programs that tell what it costs.

    forward     returns outputs and what backward will read     saved bytes: results beyond the outputs
    backward    reads that, adds to gradients                   transient: temporaries, gradients of outputs and inputs
    both        one after the other                             `peak_bytes` of `ProgramMemory`, likewise
    apart       both, and in between something so large that    `carried_bytes`: temporaries beyond that
                the program is at its fullest there

The first two are what a loop over micro-batches does, which puts into arrays what is kept. The last two are one
micro-batch from begin to end, of which the compiler keeps what it likes, in whatever precision the products take.

A TPU's products take factors of 16 bits unless the model asks for more. What nothing else reads the compiler holds in
16 bits from the start, in the arrays of loops, too (jax 0.10.2, libtpu 0.0.52). `readers_of` finds these arrays.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
from jax import numpy as jnp
from torch import Tensor

from planner.tpu.compiler import OutOfMemoryError
from planner.tpu.halves import Halves, LayerFunction, halves_of, random_key
from planner.tpu.optimizers import Rule
from planner.tpu.outcomes import CompiledLayer, CompiledStep
from planner.tpu.programs import (
    Program,
    bytes_in_loops,
    compile_program,
    filled_between,
    kinds_in_loops,
    kinds_of_arrays,
    loop_shape,
    num_bytes,
    padded_bytes,
)
from planner.tpu.torchax_adapter import shape_of

Timer = Callable[[Program, Any], float]
"""(program, shapes of its arguments) -> microseconds."""

_LEAST_FILLING_BYTES = 2**24
"""The compiler would not put this into the core's own memory."""


def compile_layer(function: LayerFunction, device: jax.Device, time_us: Timer) -> CompiledLayer:
    """Compiles a layer's four programs.

    Args:
        function: The layer.
        device: From `named_chips`, or of JAX.
        time_us: Tells how long a program takes.

    Raises:
        LacksOperatorError: torchax cannot translate the layer.
        OutOfMemoryError: The layer alone needs more memory than the device has.
    """
    halves = halves_of(function)
    state = (function.trained, function.fixed, list(function.inputs), random_key())
    pulled = [halves.outputs[n] for n in halves.differentiable]

    def backward(gradients: Any, pulled: Any, *arguments: Any) -> Any:
        of_trained, of_inputs = halves.backward(arguments[:4], *arguments[4:], pulled)
        return jax.tree.map(jnp.add, gradients, of_trained), of_inputs

    def both(gradients: Any, pulled: Any, *arguments: Any) -> Any:
        outputs, created = halves.forward(*arguments)
        # Whatever reads the outputs does so before their gradients are there.
        outputs, pulled = jax.lax.optimization_barrier((outputs, pulled))
        return backward(gradients, pulled, *arguments, outputs, created)

    def apart(gradients: Any, pulled: Any, *arguments: Any) -> Any:
        outputs, created = halves.forward(*arguments)
        return backward(gradients, filled_between(outputs, pulled, filling), *arguments, outputs, created)

    forward = compile_program(halves.forward, state, device)
    arguments = (function.trained, pulled, *state, halves.outputs, halves.made_shapes)
    if not function.trained and not any(function.needed):  # there is no backward
        return _layer_of(function, halves, [forward], [time_us(forward, state)])
    programs = [forward, compile_program(backward, arguments, device, donated=(0, 1))]
    times_us = [time_us(program, shapes) for program, shapes in zip(programs, (state, arguments), strict=True)]
    programs.append(compile_program(both, arguments[:-2], device, donated=(0, 1)))
    # More than the program could hold at any other time.
    filling = programs[2].temporary_bytes + _LEAST_FILLING_BYTES
    with suppress(OutOfMemoryError):  # near the end of the chip's memory only what a loop keeps is known
        full = compile_program(apart, arguments[:-2], device, donated=(0, 1))
        programs.append(replace(full, temporary_bytes=max(0, full.temporary_bytes - filling)))
    return _layer_of(function, halves, programs, times_us)


def compile_step(parameters: Sequence[Tensor], rule: Rule, device: jax.Device, time_us: Timer) -> CompiledStep:
    """Compiles the optimizer's step over some parameters, of which only shape and dtype count."""
    shapes = list(map(shape_of, parameters))

    def step(parameters: Any, states: Any, gradients: Any, number: Any) -> Any:
        updated = [rule.update(*of_one, number) for of_one in zip(parameters, gradients, states, strict=True)]
        # In the order of the arguments, so that each result takes the memory of what it replaces.
        return [parameter for parameter, _ in updated], [states for _, states in updated]

    states = [[shape] * rule.num_states for shape in shapes]
    arguments = (shapes, states, shapes, jax.ShapeDtypeStruct((), jnp.int32))
    program = compile_program(step, arguments, device, donated=(0, 1))
    return CompiledStep(
        step_us=time_us(program, arguments),
        peak_bytes=program.temporary_bytes + max(0, program.output_bytes - program.alias_bytes),
    )


def _layer_of(
    function: LayerFunction, halves: Halves, programs: Sequence[Program], times_us: Sequence[float]
) -> CompiledLayer:
    forward, readers, trained = programs[0], readers_of(function, halves), list(function.trained.values())
    inputs = tuple(map(padded_bytes, function.inputs))
    laid_out = forward.arguments[-1 - len(function.inputs) : -1]
    read = {(residual.kind, residual.index) for residual in halves.residuals}
    outputs, created = forward.outputs[: len(halves.outputs)], forward.outputs[len(halves.outputs) :]
    read_backward = [
        *zip(halves.made_shapes, created, strict=True),
        *(pair for n, pair in enumerate(zip(function.inputs, laid_out, strict=True)) if ("input", n) in read),
        *(pair for n, pair in enumerate(zip(halves.outputs, outputs, strict=True)) if ("output", n) in read),
    ]
    # Gradients lie like what they belong to.
    pulled = sum(outputs[n] for n in halves.differentiable)
    backward_bytes, peak_bytes = (
        (program.temporary_bytes + pulled + program.output_bytes - program.alias_bytes for program in programs[1:3])
        if len(programs) > 1
        else (0, forward.temporary_bytes)
    )
    carried = programs[3].temporary_bytes if len(programs) > 3 else sum(created)
    return CompiledLayer(
        inputs=inputs,
        laid_out=laid_out,
        wanted=tuple(map(bytes_in_loops, function.inputs, laid_out)),
        kept_inputs=tuple(("input", n) in read for n in range(len(function.inputs))),
        outputs=outputs,
        kept_outputs=tuple(("output", n) in read for n in range(len(outputs))),
        aliases=tuple(halves.passed),
        reshaped_bytes=sum(size for shape, size in read_backward if loop_shape(shape) is not shape),
        forward_us=times_us[0],
        backward_us=times_us[1] if len(times_us) > 1 else 0.0,
        forward_temporary_bytes=forward.temporary_bytes,
        backward_temporary_bytes=backward_bytes,
        peak_bytes=peak_bytes,
        # Outputs that backward reads are counted as such.
        carried_bytes=max(0, carried - sum(size for n, size in enumerate(outputs) if ("output", n) in read)),
        narrowed_bytes=sum(map(_narrowed_bytes, function.trained.values())),
        padding_bytes=sum(padded_bytes(shape) - num_bytes(shape) for shape in function.trained.values()),
        flops=forward.flops,
        narrowed_inputs_bytes=sum(padded_bytes(shape) // 2 for shape in function.inputs if _narrowed_bytes(shape)),
        trained_kinds=kinds_of_arrays(trained, list(map(padded_bytes, trained))),
        made_kinds=kinds_in_loops(halves.made_shapes, created, readers.made),
        input_kinds=kinds_in_loops(function.inputs, inputs, readers.received),
        output_kinds=kinds_in_loops(halves.outputs, outputs, readers.outputs),
        narrow_inputs=readers.inputs,
    )


def _narrowed_bytes(shape: Any) -> int:
    """Bytes of a weight as products take it: 16 bits each unless the model asks for more; vectors are no factors."""
    return int(2 * shape.size) if len(shape.shape) > 1 and shape.dtype == "float32" else 0


_PRODUCTS: Final = frozenset(("conv_general_dilated", "dot_general"))
_MOVING: Final = frozenset(("copy", "copy_p", "expand_dims", "reshape", "rev", "squeeze", "transpose"))
"""What hands numbers on as they are."""

_LOOPS: Final = frozenset(("cond", "scan", "while"))
"""What runs another function otherwise than once."""


@dataclass(frozen=True, kw_only=True)
class Readers:
    """Whether nothing but products reads each of a layer's arrays; of 32 bits alone it makes a difference."""

    received: tuple[bool, ...]
    """Per input, forward and backward."""
    inputs: tuple[bool, ...]
    """Per input, in the backward."""
    outputs: tuple[bool, ...]
    """Per output, in the backward."""
    made: tuple[bool, ...]
    """Per residual that is made."""


def readers_of(function: LayerFunction, halves: Halves) -> Readers:
    """Who reads what in a layer."""
    state = (function.trained, function.fixed, list(function.inputs), random_key())
    pulled = [halves.outputs[n] for n in halves.differentiable]
    forward = read_by_products(jax.make_jaxpr(halves.forward)(*state).jaxpr)
    backward = read_by_products(
        jax.make_jaxpr(halves.backward)(state, halves.outputs, halves.made_shapes, pulled).jaxpr
    )
    first = len(function.trained) + len(function.fixed)
    inputs = slice(first, first + len(function.inputs))
    outputs = slice(inputs.stop + 1, inputs.stop + 1 + len(halves.outputs))  # behind the random key
    made = slice(outputs.stop, outputs.stop + len(halves.made_shapes))
    both = zip(forward[inputs], backward[inputs], strict=True)
    return Readers(
        received=tuple(a and b for a, b in both),
        inputs=tuple(backward[inputs]),
        outputs=tuple(backward[outputs]),
        made=tuple(backward[made]),
    )


def read_by_products(jaxpr: jax.extend.core.Jaxpr, results: Sequence[bool] | None = None) -> list[bool]:
    """Whether nothing but products reads each argument.

    Args:
        jaxpr: The function.
        results: Of each result, whether that holds for it; without them for none.
    """
    narrow: dict[Any, bool] = {}

    def note(variables: Sequence[Any], kinds: Sequence[bool]) -> None:
        for variable, kind in zip(variables, kinds, strict=True):
            if not hasattr(variable, "val"):  # a literal is nobody's
                narrow[variable] = narrow.get(variable, True) and kind

    note(jaxpr.outvars, results or [False] * len(jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        note(eqn.invars, _read_in(eqn, [narrow.get(variable, True) for variable in eqn.outvars]))
    return [narrow.get(variable, True) for variable in jaxpr.invars]


def _read_in(eqn: Any, results: Sequence[bool]) -> list[bool]:
    """Whether nothing but products reads each argument of an equation, there and behind it."""
    name, num = eqn.primitive.name, len(eqn.invars)
    if name in _PRODUCTS:
        return [_takes_16_bits(eqn)] * num
    if name in _MOVING:
        return [all(results)] * num
    called = [body for body in eqn.params.values() if hasattr(body, "eqns") or hasattr(body, "jaxpr")]
    if len(called) == 1:
        body = getattr(called[0], "jaxpr", called[0])
        if (len(body.invars), len(body.outvars)) == (num, len(results)) and name not in _LOOPS:
            return read_by_products(body, results)
    return [False] * num


def _takes_16_bits(product: Any) -> bool:
    precision = product.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    return all(each in (None, jax.lax.Precision.DEFAULT) for each in asked)
