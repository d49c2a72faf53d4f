"""Layers as functions of JAX arrays, with separate forward and backward.

The forward returns the outputs and the residuals. Residuals are the values that the backward reads: results of matmuls,
convolutions, reductions and other expensive operators. Cheap operators (additions, activations, masks, reshapes) are
recomputed in the backward, because the TPU's compiler fuses them into the operators that read their results. A profile
and the training program have the same residuals.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend
from jax import Array
from jax import numpy as jnp
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from planner.model.stage import ModelStage
from planner.tpu.compiler import LacksOperatorError
from planner.tpu.torchax_adapter import OperatorNotFound, ignore_64_bit_warnings, jax_shape_of, torchax_environment

Arrays = Mapping[str, Array]
"""JAX arrays, or their shapes, by parameter name."""

# fmt: off
_CHEAP = frozenset((
    "abs", "add", "add_any", "and", "atan2", "broadcast_in_dim", "cbrt", "ceil", "clamp", "convert_element_type",
    "copy", "copy_p", "cos", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expand_dims", "expm1", "floor",
    "ge", "gt", "imag", "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min",
    "mul", "ne", "neg", "nextafter", "not", "or", "pad", "pow", "random_bits", "random_fold_in", "random_seed",
    "random_split", "random_unwrap", "random_wrap", "real", "reduce_precision", "reduce_window", "reduce_window_max",
    "reduce_window_sum", "rem", "reshape", "rev", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "slice", "split", "sqrt", "square", "squeeze",
    "stop_gradient", "sub", "tan", "tanh", "threefry2x32", "transpose", "xor",
))
# fmt: on
"""JAX primitives that the compiler fuses into other operators, and pooling, which is nearly as cheap."""


def random_key_shape() -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a JAX random key."""
    return jax.eval_shape(lambda: jax.random.key(0))


@dataclass(frozen=True)
class LayerFunction:
    """Module as a pure function of JAX arrays.

    The function takes and returns only the tensors among the module's flattened inputs and outputs. Other inputs are
    constants. Values that the module writes into its buffers are lost.
    """

    call: Callable[[Arrays, Sequence[Array], Array], list[Array]]
    """Function (parameters and buffers by name, inputs, random key) -> outputs."""
    trained: dict[str, jax.ShapeDtypeStruct]
    """Shapes of the trained parameters, by name."""
    fixed: dict[str, jax.ShapeDtypeStruct]
    """Shapes of frozen parameters and of buffers, by name."""
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    """Shapes of the inputs."""
    needed: tuple[bool, ...]
    """True for inputs that need a gradient."""


def layer_function(
    module: nn.Module, run: Callable[[Sequence[Any]], Sequence[Any]], values: Sequence[Any]
) -> LayerFunction:
    """Return `run`, which runs a module on torch tensors, as a function of JAX arrays.

    Args:
        module: Module whose parameters and buffers become arguments. Other tensors become constants.
        run: Function from flattened inputs to flattened outputs.
        values: Inputs of `run`. Only shapes and dtypes of tensors are read.
    """
    env = torchax_environment()
    # A `ModelStage` runs the forward of the whole model, so its parameters belong to the model.
    owner = module._part.model if isinstance(module, ModelStage) else module
    places = [n for n, value in enumerate(values) if isinstance(value, Tensor)]
    tensors = [values[n] for n in places]
    constants = [None if isinstance(value, Tensor) else value for value in values]

    def call(state: Arrays, inputs: Sequence[Array], key: Array) -> list[Array]:
        with (
            ignore_64_bit_warnings(),
            env.override_property(prng=key),
            env,
            _reparametrize_module(owner, env.j2t_iso(dict(state)), tie_weights=True),
        ):
            arguments = list(constants)
            for n, value in zip(places, env.j2t_iso(list(inputs)), strict=True):
                arguments[n] = value
            try:
                outputs = run(arguments)
            except OperatorNotFound as error:
                raise LacksOperatorError(str(error).removeprefix("Operator with name ").split()[0]) from error
            return [env.t2j_iso(output) for output in outputs if isinstance(output, Tensor)]

    named = dict(module.named_parameters())
    trained = {name: jax_shape_of(p) for name, p in named.items() if p.requires_grad}
    frozen = {name: jax_shape_of(p) for name, p in named.items() if not p.requires_grad}
    return LayerFunction(
        call=call,
        trained=trained,
        fixed={**frozen, **{name: jax_shape_of(buffer) for name, buffer in module.named_buffers()}},
        inputs=tuple(map(jax_shape_of, tensors)),
        needed=tuple(tensor.requires_grad for tensor in tensors),
    )


@dataclass(frozen=True)
class Residual:
    """Shape and origin of a value that the backward reads."""

    kind: str
    """Origin: `output`, `input`, `state` (parameter or buffer), `key` (random key), or `made`.

    A `made` value is computed by the forward, but is no output.
    """
    index: int | str = 0
    """Index among the outputs, inputs or `made` residuals; for `state`, the name of the parameter or buffer."""
    shape: jax.ShapeDtypeStruct = None


@dataclass(frozen=True)
class ForwardBackwardFunction:
    """Forward and backward of a layer as functions of JAX arrays. Residuals are the values that the backward reads."""

    forward: Callable[..., tuple[list[Array], list[Array]]]
    """Function (trained, fixed, inputs, key) -> (outputs, other residuals)."""
    backward: Callable[..., tuple[Arrays, list[Array]]]
    """Function ((trained, fixed, inputs, key), outputs, other residuals, gradients of outputs) -> (gradients of trained
    parameters, gradients of inputs)."""
    outputs: list[jax.ShapeDtypeStruct]
    """Shapes of the outputs."""
    differentiable: tuple[int, ...]
    """Indices of the outputs that have a gradient."""
    passed: tuple[int, ...]
    """For each output, the index of the input that it returns unchanged; else -1."""
    residuals: tuple[Residual, ...]
    """Residuals, without duplicates."""

    @property
    def made_residual_shapes(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes of the residuals that the forward computes in addition to its outputs."""
        return [residual.shape for residual in self.residuals if residual.kind == "made"]


def split_layer(function: LayerFunction) -> ForwardBackwardFunction:
    """Split a layer's function into a forward and a backward."""
    trained, fixed, inputs, needed = function.trained, function.fixed, function.inputs, function.needed
    wanted = [n for n, need in enumerate(needed) if need]
    traced: dict[str, Any] = {}

    def forward(trained: Arrays, fixed: Arrays, inputs: Sequence[Array], key: Array) -> tuple[list[Array], list[Array]]:
        def primal(trained: Arrays, moving: Sequence[Array]) -> tuple[list[Array], list[Array]]:
            arguments = list(inputs)
            for n, value in zip(wanted, moving, strict=True):
                arguments[n] = value
            outputs = function.call({**fixed, **trained}, arguments, key)
            floating = [n for n, output in enumerate(outputs) if jnp.issubdtype(output.dtype, jnp.floating)]
            traced["floating"] = floating
            return [outputs[n] for n in floating], outputs

        checkpointed = jax.checkpoint(primal, policy=_is_expensive, prevent_cse=False)
        _, pull, outputs = jax.vjp(checkpointed, dict(trained), [inputs[n] for n in wanted], has_aux=True)
        leaves, traced["tree"] = jax.tree.flatten(pull)
        return outputs, leaves

    arguments = (trained, fixed, list(inputs), random_key_shape())
    jaxpr, shapes = jax.make_jaxpr(forward, return_shape=True)(*arguments)
    plan = _residual_plan(jaxpr.jaxpr, len(shapes[0]), [*sorted(trained), *sorted(fixed)], len(inputs))

    def kept_forward(*arguments: Any) -> tuple[list[Array], list[Array]]:
        outputs, leaves = forward(*arguments)
        return outputs, [leaves[n] for n in plan.created]

    def backward(
        arguments: tuple[Any, ...], outputs: Sequence[Array], created: Sequence[Array], gradients: Sequence[Array]
    ) -> tuple[Arrays, list[Array]]:
        leaves = plan.rebuilt(const=jaxpr.consts, argument=jax.tree.leaves(arguments), output=outputs, made=created)
        pull = jax.tree.unflatten(traced["tree"], leaves)
        of_trained, of_inputs = pull(list(gradients))
        return of_trained, of_inputs

    return ForwardBackwardFunction(
        kept_forward, backward, list(shapes[0]), tuple(traced["floating"]), plan.passed, plan.residuals
    )


@dataclass(frozen=True, kw_only=True)
class _ResidualPlan:
    """Origin of each value that a traced forward passes to its backward."""

    sources: tuple[tuple[str, Any], ...]
    """Origin of each value: (`argument`, `const`, `output` or `made`; index in this kind), or (`literal`, value)."""
    created: tuple[int, ...]
    """Index, among all values, of each `made` value: one that is not an argument, constant, output or literal."""
    passed: tuple[int, ...]
    residuals: tuple[Residual, ...]

    def rebuilt(self, **lists: Sequence[Array]) -> list[Array]:
        return [place if kind == "literal" else lists[kind][place] for kind, place in self.sources]


def _residual_plan(
    jaxpr: jax.extend.core.Jaxpr, num_outputs: int, state: Sequence[str], num_inputs: int
) -> _ResidualPlan:
    """Find the origin of each value that a traced forward passes to its backward.

    The traced forward is a function (state, inputs, key) -> (outputs, values for the backward). `state` has the names
    of the arrays of its first argument.
    """
    outputs, values = jaxpr.outvars[:num_outputs], jaxpr.outvars[num_outputs:]
    sources: dict[Any, tuple[str, int]] = {var: ("argument", n) for n, var in enumerate(jaxpr.invars)}
    sources |= {var: ("const", n) for n, var in enumerate(jaxpr.constvars)}
    for n, var in enumerate(outputs):
        if not _is_literal(var):
            sources.setdefault(var, ("output", n))

    places: list[tuple[str, int | str]] = [
        *(("state", name) for name in state),
        *(("input", n) for n in range(num_inputs)),
        ("key", 0),
    ]

    def residual(var: Any) -> Residual:
        kind, place = sources[var]
        return Residual(
            *(places[place] if kind == "argument" else (kind, place)),
            jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype),
        )

    def passed(var: Any) -> int:
        kind, place = ("literal", 0) if _is_literal(var) else sources[var]
        return place - len(state) if kind == "argument" and 0 <= place - len(state) < num_inputs else -1

    created: list[int] = []
    for n, var in enumerate(values):
        if not _is_literal(var) and var not in sources:
            sources[var] = ("made", len(created))
            created.append(n)
    arrays = dict.fromkeys(var for var in values if not _is_literal(var))
    return _ResidualPlan(
        sources=tuple(("literal", var.val) if _is_literal(var) else sources[var] for var in values),
        created=tuple(created),
        passed=tuple(map(passed, outputs)),
        residuals=tuple(residual(var) for var in arrays if sources[var][0] != "const"),
    )


def _is_literal(var: Any) -> bool:
    return hasattr(var, "val")


def _is_expensive(primitive: Any, *_: Any, **parameters: Any) -> bool:
    called = [value for value in parameters.values() if hasattr(value, "jaxpr") and hasattr(value, "consts")]
    if called:
        # An activation with a custom derivative, such as `relu`, is as cheap as its operators.
        return any(_is_expensive(eqn.primitive, **eqn.params) for body in called for eqn in body.jaxpr.eqns)
    return str(primitive) not in _CHEAP
