"""Executables of a layer. Their sizes and times are the costs of the layer.

    executable    computation                              result, a field of `CompiledLayer`
    forward       returns outputs and residuals            `made_kinds`: residuals that are no outputs
    backward      reads residuals, adds to gradients       `backward_temporary_bytes`
    both          forward, then backward                   `peak_bytes`
    apart         as `both`, with a large array between    `carried_bytes`: temporaries without the large array

`forward` and `backward` correspond to loops over micro-batches, which store residuals in arrays. `both` and `apart` run
forward and backward of one micro-batch together. The compiler then chooses which values to keep, and in which
precision. The large array in `apart` moves the peak of memory to the time between forward and backward. At this time,
all other temporaries are values kept for the backward.

Matmuls of a TPU take 16-bit operands unless the model sets a higher precision. The compiler stores arrays that are only
matmul operands in 16 bits, also in loops (jax 0.10.2, libtpu 0.0.52). `matmul_operands_of` finds these arrays.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import jax
from jax import numpy as jnp
from torch import Tensor

from planner.tpu.compiler import OutOfMemoryError
from planner.tpu.layer_functions import ForwardBackwardFunction, LayerFunction, random_key_shape, split_layer
from planner.tpu.optimizers import OptimizerRule
from planner.tpu.outcomes import CompiledLayer, CompiledOptimizerStep
from planner.tpu.programs import (
    CompiledProgram,
    array_kinds_in_loops,
    bytes_in_loops,
    compile_program,
    kinds_of_arrays,
    make_depend_on_array,
    num_bytes,
    padded_bytes,
    shape_in_loops,
)
from planner.tpu.torchax_adapter import jax_shape_of

Timer = Callable[[CompiledProgram, Any], float]
"""Function (executable, shapes of its arguments) -> microseconds."""

_LEAST_FILLING_BYTES = 2**24
"""Smallest size of the large array in the executable `apart`, in bytes.

An array of this size does not fit into the core's local memory. The module's docstring describes `apart`.
"""


def compile_layer(function: LayerFunction, device: jax.Device, time_us: Timer) -> CompiledLayer:
    """Compile a layer's forward and backward, separately and together; return sizes and times of the executables.

    The module's docstring lists the executables. A layer without a backward has only the executable of its forward.

    Args:
        function: Layer as a function of JAX arrays.
        device: Device from `chip_devices` or from JAX.
        time_us: Function that returns the run time of an executable.

    Raises:
        LacksOperatorError: torchax cannot translate the layer.
        OutOfMemoryError: The layer alone needs more memory than the device has.
    """
    split = split_layer(function)
    state = (function.trained, function.fixed, list(function.inputs), random_key_shape())
    pulled = [split.outputs[n] for n in split.differentiable]

    def backward(gradients: Any, pulled: Any, *arguments: Any) -> Any:
        of_trained, of_inputs = split.backward(arguments[:4], *arguments[4:], pulled)
        return jax.tree.map(jnp.add, gradients, of_trained), of_inputs

    def both(gradients: Any, pulled: Any, *arguments: Any) -> Any:
        outputs, created = split.forward(*arguments)
        # Operators that read the outputs must run before the gradients of the outputs exist.
        outputs, pulled = jax.lax.optimization_barrier((outputs, pulled))
        return backward(gradients, pulled, *arguments, outputs, created)

    def apart(gradients: Any, pulled: Any, *arguments: Any) -> Any:
        outputs, created = split.forward(*arguments)
        return backward(gradients, make_depend_on_array(outputs, pulled, filling), *arguments, outputs, created)

    forward = compile_program(split.forward, state, device)
    arguments = (function.trained, pulled, *state, split.outputs, split.made_residual_shapes)
    if not function.trained and not any(function.needed):  # there is no backward
        return _layer_of(function, split, [forward], [time_us(forward, state)])
    programs = [forward, compile_program(backward, arguments, device, donated=(0, 1))]
    times_us = [time_us(program, shapes) for program, shapes in zip(programs, (state, arguments), strict=True)]
    programs.append(compile_program(both, arguments[:-2], device, donated=(0, 1)))
    # An array larger than all other temporaries together: the peak is then reached while the array exists.
    filling = programs[2].temporary_bytes + _LEAST_FILLING_BYTES
    with suppress(OutOfMemoryError):  # if the array does not fit, `carried_bytes` are the residuals of a loop
        full = compile_program(apart, arguments[:-2], device, donated=(0, 1))
        programs.append(replace(full, temporary_bytes=max(0, full.temporary_bytes - filling)))
    return _layer_of(function, split, programs, times_us)


def compile_step(
    parameters: Sequence[Tensor], rule: OptimizerRule, device: jax.Device, time_us: Timer
) -> CompiledOptimizerStep:
    """Return time and temporary memory of the compiled optimizer step that updates some parameters.

    Args:
        parameters: Updated parameters. Only shapes and dtypes are read.
        rule: Update rule of the optimizer.
        device: Device from `chip_devices` or from JAX.
        time_us: Function that returns the run time of an executable.
    """
    shapes = list(map(jax_shape_of, parameters))

    def step(parameters: Any, states: Any, gradients: Any, number: Any) -> Any:
        updated = [rule.update(*of_one, number) for of_one in zip(parameters, gradients, states, strict=True)]
        # Keep the order of the arguments, so that each result reuses the memory of the value that it replaces.
        return [parameter for parameter, _ in updated], [states for _, states in updated]

    states = [[shape] * rule.num_states for shape in shapes]
    arguments = (shapes, states, shapes, jax.ShapeDtypeStruct((), jnp.int32))
    program = compile_program(step, arguments, device, donated=(0, 1))
    return CompiledOptimizerStep(
        step_us=time_us(program, arguments),
        peak_bytes=program.temporary_bytes + max(0, program.output_bytes - program.alias_bytes),
    )


def _layer_of(
    function: LayerFunction,
    split: ForwardBackwardFunction,
    programs: Sequence[CompiledProgram],
    times_us: Sequence[float],
) -> CompiledLayer:
    forward, readers, trained = programs[0], matmul_operands_of(function, split), list(function.trained.values())
    inputs = tuple(map(padded_bytes, function.inputs))
    laid_out = forward.arguments[-1 - len(function.inputs) : -1]
    residuals = {(residual.kind, residual.index) for residual in split.residuals}
    outputs, created = forward.outputs[: len(split.outputs)], forward.outputs[len(split.outputs) :]
    read_backward = [
        *zip(split.made_residual_shapes, created, strict=True),
        *(pair for n, pair in enumerate(zip(function.inputs, laid_out, strict=True)) if ("input", n) in residuals),
        *(pair for n, pair in enumerate(zip(split.outputs, outputs, strict=True)) if ("output", n) in residuals),
    ]
    # Gradients have the layout of their tensors.
    pulled = sum(outputs[n] for n in split.differentiable)
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
        kept_inputs=tuple(("input", n) in residuals for n in range(len(function.inputs))),
        outputs=outputs,
        kept_outputs=tuple(("output", n) in residuals for n in range(len(outputs))),
        aliases=tuple(split.passed),
        reshaped_bytes=sum(size for shape, size in read_backward if shape_in_loops(shape) is not shape),
        forward_us=times_us[0],
        backward_us=times_us[1] if len(times_us) > 1 else 0.0,
        forward_temporary_bytes=forward.temporary_bytes,
        backward_temporary_bytes=backward_bytes,
        peak_bytes=peak_bytes,
        # Outputs that the backward reads are counted as outputs.
        carried_bytes=max(0, carried - sum(size for n, size in enumerate(outputs) if ("output", n) in residuals)),
        narrowed_bytes=sum(map(_narrowed_bytes, function.trained.values())),
        padding_bytes=sum(padded_bytes(shape) - num_bytes(shape) for shape in function.trained.values()),
        flops=forward.flops,
        narrowed_inputs_bytes=sum(padded_bytes(shape) // 2 for shape in function.inputs if _narrowed_bytes(shape)),
        trained_kinds=kinds_of_arrays(trained, list(map(padded_bytes, trained))),
        made_kinds=array_kinds_in_loops(split.made_residual_shapes, created, readers.made),
        input_kinds=array_kinds_in_loops(function.inputs, inputs, readers.inputs),
        output_kinds=array_kinds_in_loops(split.outputs, outputs, readers.outputs),
        narrow_inputs=readers.inputs_in_backward,
    )


def _narrowed_bytes(shape: Any) -> int:
    return int(2 * shape.size) if len(shape.shape) > 1 and shape.dtype == "float32" else 0


_PRODUCTS: Final = frozenset(("conv_general_dilated", "dot_general"))
_MOVING: Final = frozenset(("copy", "copy_p", "expand_dims", "reshape", "rev", "squeeze", "transpose"))
"""JAX primitives that copy, reshape or reorder values and compute nothing."""

_LOOPS: Final = frozenset(("cond", "scan", "while"))
"""JAX primitives that may run a function several times, or not at all."""


@dataclass(frozen=True, kw_only=True)
class MatmulOperands:
    """Arrays of a layer that are used only as matmul operands. The compiler stores these arrays in 16 bits."""

    inputs: tuple[bool, ...]
    """True for inputs that forward and backward read only as matmul operands."""
    inputs_in_backward: tuple[bool, ...]
    """True for inputs that the backward reads only as matmul operands; the forward may use them in other ways."""
    outputs: tuple[bool, ...]
    """True for outputs that the backward reads only as matmul operands."""
    made: tuple[bool, ...]
    """True for new residuals (not inputs, parameters or outputs) that the backward reads only as matmul operands."""


def matmul_operands_of(function: LayerFunction, split: ForwardBackwardFunction) -> MatmulOperands:
    """Return which arrays of a layer are used only as matmul operands."""
    state = (function.trained, function.fixed, list(function.inputs), random_key_shape())
    pulled = [split.outputs[n] for n in split.differentiable]
    forward = find_matmul_operands(jax.make_jaxpr(split.forward)(*state).jaxpr)
    backward = find_matmul_operands(
        jax.make_jaxpr(split.backward)(state, split.outputs, split.made_residual_shapes, pulled).jaxpr
    )
    first = len(function.trained) + len(function.fixed)
    inputs = slice(first, first + len(function.inputs))
    outputs = slice(inputs.stop + 1, inputs.stop + 1 + len(split.outputs))  # after the random key
    made = slice(outputs.stop, outputs.stop + len(split.made_residual_shapes))
    both = zip(forward[inputs], backward[inputs], strict=True)
    return MatmulOperands(
        inputs=tuple(a and b for a, b in both),
        inputs_in_backward=tuple(backward[inputs]),
        outputs=tuple(backward[outputs]),
        made=tuple(backward[made]),
    )


def find_matmul_operands(jaxpr: jax.extend.core.Jaxpr, results: Sequence[bool] | None = None) -> list[bool]:
    """Return, for each argument of a traced function, True if it is used only as a matmul operand.

    `results` is True for each result that the caller uses only as a matmul operand; None means False for all.
    """
    narrow: dict[Any, bool] = {}

    def note(variables: Sequence[Any], kinds: Sequence[bool]) -> None:
        for variable, kind in zip(variables, kinds, strict=True):
            if not hasattr(variable, "val"):  # skip literals
                narrow[variable] = narrow.get(variable, True) and kind

    note(jaxpr.outvars, results or [False] * len(jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        note(eqn.invars, _operands_only_for_matmul(eqn, [narrow.get(variable, True) for variable in eqn.outvars]))
    return [narrow.get(variable, True) for variable in jaxpr.invars]


def _operands_only_for_matmul(eqn: Any, results: Sequence[bool]) -> list[bool]:
    """Return the result of `find_matmul_operands` for one equation."""
    name, num = eqn.primitive.name, len(eqn.invars)
    if name in _PRODUCTS:
        return [_takes_16_bits(eqn)] * num
    if name in _MOVING:
        return [all(results)] * num
    called = [body for body in eqn.params.values() if hasattr(body, "eqns") or hasattr(body, "jaxpr")]
    if len(called) == 1:
        body = getattr(called[0], "jaxpr", called[0])
        if (len(body.invars), len(body.outvars)) == (num, len(results)) and name not in _LOOPS:
            return find_matmul_operands(body, results)
    return [False] * num


def _takes_16_bits(product: Any) -> bool:
    precision = product.params.get("precision")
    requested = precision if isinstance(precision, tuple) else (precision,)
    return all(each in (None, jax.lax.Precision.DEFAULT) for each in requested)
