"""The one module that touches torchax and jax: a layer of a chain as a function of JAX arrays, cut into two halves.

The forward half returns the outputs and what the backward half reads: the residuals. Which values these are is decided
here, alike for a profile and for a program that trains: results of products, convolutions, reductions and of all else
that is work are kept, while what costs next to nothing to compute again from them (additions, activations, masks,
reshapes) is computed again. That is what the TPU's compiler does anyway within one program, where it fuses such
operators into whatever reads their results.
"""

import importlib.metadata
import importlib.util
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._ops import OpOverloadPacket
from torch.nn.utils.stateless import _reparametrize_module

from planner.bridge.tpu_layouts import laid_out_sizes
from planner.core.errors import UsageError
from planner.model.stage import ModelStage

__all__ = [
    "CHIPS",
    "Arrays",
    "Halves",
    "LacksOperatorError",
    "LayerFunction",
    "OutOfMemoryError",
    "Program",
    "Residual",
    "attached_tpu",
    "check_installed",
    "compile_program",
    "compiled",
    "environment",
    "expect_no_tpu",
    "filled_between",
    "halves_of",
    "in_32_bits",
    "jax_modules",
    "layer_function",
    "named_chip",
    "named_chips",
    "random_key",
    "shape_of",
    "torch_like",
    "versions",
]

Arrays = Mapping[str, Any]
"""JAX arrays, or their shapes, by parameter name."""

_PACKAGES = ("jax", "libtpu", "torchax")

_PLANE = ("2x2", "4x4", "8x8")
_CUBE = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4")

_TOPOLOGIES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "v2": (_PLANE, {}),
    "v3": (_PLANE, {}),
    # The two cores of a chip are one device, as they are by default on Google Cloud.
    "v4": (_CUBE, {"chip_config_name": "megacore"}),
    "v5e": (("2x2", "2x4", "4x4", "4x8", "8x8"), {}),
    "v5p": (_CUBE, {}),
    "v6e": (("2x2", "2x4", "4x4", "4x8", "8x8"), {}),
}
"""By chip: topologies, the smallest first, and options."""

CHIPS: Final = tuple(_TOPOLOGIES)
"""Kinds of TPU that programs can be compiled for."""

_SETTINGS = {
    # Without a TPU libtpu asks Google's metadata server where it is, for minutes.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v2-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Only one process may use a TPU; several may compile for it.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

_GONE = re.compile("dimname|names", re.IGNORECASE)
"""In the names of overloads for named tensors: `aten.prod.dim_Dimname`, `aten.norm.names_ScalarOpt_dim`."""

# fmt: off
_CHEAP = frozenset(
    (
        "abs",
        "add",
        "add_any",
        "and",
        "atan2",
        "broadcast_in_dim",
        "cbrt",
        "ceil",
        "clamp",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expand_dims",
        "expm1",
        "floor",
        "ge",
        "gt",
        "imag",
        "integer_pow",
        "iota",
        "is_finite",
        "le",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "nextafter",
        "not",
        "or",
        "pad",
        "pow",
        "random_bits",
        "random_fold_in",
        "random_seed",
        "random_split",
        "random_unwrap",
        "random_wrap",
        "real",
        "reduce_precision",
        "reduce_window",
        "reduce_window_max",
        "reduce_window_sum",
        "rem",
        "reshape",
        "rev",
        "round",
        "rsqrt",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sign",
        "sin",
        "slice",
        "split",
        "sqrt",
        "square",
        "squeeze",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "threefry2x32",
        "transpose",
        "xor",
    )
)
# fmt: on
"""Primitives of JAX that the compiler computes while it reads or writes for another one; and pooling, almost one."""


class LacksOperatorError(Exception):
    """torchax has no translation of an operator."""


def check_installed() -> None:
    """Raises `UsageError` where jax or torchax is not installed; imports nothing."""
    absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise UsageError(
            f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed, which TPUs need",
            hint="pip install 'gpipe-plan[tpu]'",
        )


def jax_modules() -> tuple[Any, Any]:
    """`jax` and `torchax`, imported at the first call.

    Raises:
        UsageError: They are not installed.
    """
    check_installed()
    import jax  # noqa: PLC0415

    return jax, _torchax()


def expect_no_tpu() -> None:
    """Tells jax and libtpu, before they are imported, that no TPU is to be looked for."""
    for setting, value in _SETTINGS.items():
        os.environ.setdefault(setting, value)


def attached_tpu() -> tuple[str, int]:
    """Name and memory of the TPU of this machine.

    Raises:
        UsageError: There is none.
    """
    jax, _ = jax_modules()
    try:
        device = jax.devices("tpu")[0]
    except RuntimeError as error:
        raise UsageError(
            "no TPU here for `--device tpu`",
            hint="profile on the machine that has it, or compile for one that is not here: `--device tpu:v2`",
        ) from error
    return device.device_kind, (device.memory_stats() or {}).get("bytes_limit", 0)


def random_key() -> Any:
    """The shape of a random key."""
    jax, _ = jax_modules()
    return jax.eval_shape(lambda: jax.random.key(0))


def shape_of(tensor: Tensor) -> Any:
    """A tensor's shape and dtype, as JAX has it: 64-bit integers have 32 there."""
    jax, _ = jax_modules()
    from torchax.ops import mappings  # noqa: PLC0415

    return jax.ShapeDtypeStruct(tuple(tensor.shape), jax.dtypes.canonicalize_dtype(mappings.t2j_dtype(tensor.dtype)))


def torch_like(shape: Any) -> Tensor:
    """A tensor without values of a JAX shape and dtype; one that can carries a gradient."""
    jax_modules()
    from torchax.ops import mappings  # noqa: PLC0415

    dtype = mappings.j2t_dtype(shape.dtype)
    return torch.empty(shape.shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


@dataclass(frozen=True)
class LayerFunction:
    """What a module computes, as a pure function of JAX arrays: of parameters and buffers, inputs, and a random key.

    Inputs and outputs are the tensors among the flat ones. What the module writes into its buffers is dropped.
    """

    call: Callable[[Arrays, Sequence[Any], Any], list[Any]]
    trained: dict[str, Any]
    """Shapes of the parameters that are trained, by name."""
    fixed: dict[str, Any]
    """Of the other ones, and of buffers."""
    inputs: tuple[Any, ...]
    needed: tuple[bool, ...]
    """Of which inputs a gradient is wanted."""


def layer_function(
    module: nn.Module, run: Callable[[Sequence[Any]], Sequence[Any]], values: Sequence[Any]
) -> LayerFunction:
    """`run` as a function of JAX arrays.

    Args:
        module: Whose parameters and buffers are arguments; tensors found elsewhere are taken as they are.
        run: From flat inputs to flat outputs.
        values: Inputs as they are given to `run`; of tensors only shape and dtype count.
    """
    _, torchax = jax_modules()
    env = environment()
    # A stage runs the whole model's forward; its own parameters are the model's.
    owner = module._part.model if isinstance(module, ModelStage) else module
    places = [n for n, value in enumerate(values) if isinstance(value, Tensor)]
    tensors = [values[n] for n in places]
    others = [None if isinstance(value, Tensor) else value for value in values]

    def call(state: Arrays, inputs: Sequence[Any], key: Any) -> list[Any]:
        with (
            in_32_bits(),
            env.override_property(prng=key),
            env,
            _reparametrize_module(owner, env.j2t_iso(dict(state)), tie_weights=True),
        ):
            given = list(others)
            for n, value in zip(places, env.j2t_iso(list(inputs)), strict=True):
                given[n] = value
            try:
                outputs = run(given)
            except torchax.tensor.OperatorNotFound as error:
                raise LacksOperatorError(str(error).removeprefix("Operator with name ").split()[0]) from error
            return [env.t2j_iso(output) for output in outputs if isinstance(output, Tensor)]

    named = dict(module.named_parameters())
    trained = {name: shape_of(p) for name, p in named.items() if p.requires_grad}
    frozen = {name: shape_of(p) for name, p in named.items() if not p.requires_grad}
    return LayerFunction(
        call=call,
        trained=trained,
        fixed={**frozen, **{name: shape_of(buffer) for name, buffer in module.named_buffers()}},
        inputs=tuple(map(shape_of, tensors)),
        needed=tuple(tensor.requires_grad for tensor in tensors),
    )


@dataclass(frozen=True)
class Residual:
    """Something that the backward half reads."""

    kind: str
    """`output` or `input` for one of these, `state` for a parameter or buffer; else `made`."""
    index: int | str = 0
    shape: Any = None


@dataclass(frozen=True)
class Halves:
    """A function's forward, and its backward, which reads what forward kept."""

    forward: Callable[..., tuple[list[Any], list[Any]]]
    """(trained, fixed, inputs, key) -> (outputs, residuals made)."""
    backward: Callable[..., tuple[Any, list[Any]]]
    """((trained, fixed, inputs, key), outputs, residuals made, gradients of outputs) -> (gradients of what is trained,
    gradients of inputs); inputs and outputs that are no residuals may be anything."""
    outputs: list[Any]
    """Shapes."""
    differentiable: tuple[int, ...]
    """Which outputs carry a gradient."""
    passed: tuple[int, ...]
    """Per output: which input it is, as it came; or -1."""
    residuals: tuple[Residual, ...]
    """What is kept, each value once."""

    @property
    def made(self) -> list[Any]:
        """Shapes of the residuals that are neither state nor input nor output."""
        return [residual.shape for residual in self.residuals if residual.kind == "made"]


def halves_of(function: LayerFunction) -> Halves:
    """The halves of a layer's function, whose inputs have the shapes that it was made with."""
    jax, _ = jax_modules()
    trained, fixed, inputs, needed = function.trained, function.fixed, function.inputs, function.needed
    wanted = [n for n, need in enumerate(needed) if need]
    known: dict[str, Any] = {}

    def forward(trained: Arrays, fixed: Arrays, inputs: Sequence[Any], key: Any) -> tuple[list[Any], list[Any]]:
        def primal(trained: Arrays, moving: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            given = list(inputs)
            for n, value in zip(wanted, moving, strict=True):
                given[n] = value
            outputs = function.call({**fixed, **trained}, given, key)
            floating = [n for n, output in enumerate(outputs) if jax.numpy.issubdtype(output.dtype, jax.numpy.floating)]
            known["floating"] = floating
            return [outputs[n] for n in floating], outputs

        checkpointed = jax.checkpoint(primal, policy=_worth_keeping, prevent_cse=False)
        _, pull, outputs = jax.vjp(checkpointed, dict(trained), [inputs[n] for n in wanted], has_aux=True)
        leaves, known["tree"] = jax.tree.flatten(pull)
        return outputs, leaves

    given = (trained, fixed, list(inputs), random_key())
    jaxpr, shapes = jax.make_jaxpr(forward, return_shape=True)(*given)
    plan = _Plan(jax, jaxpr.jaxpr, len(shapes[0]), given)

    def kept_forward(*given: Any) -> tuple[list[Any], list[Any]]:
        outputs, leaves = forward(*given)
        return outputs, [leaves[n] for n in plan.made]

    def backward(
        arguments: tuple[Any, ...], outputs: Sequence[Any], made: Sequence[Any], gradients: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        given = jax.tree.leaves(arguments)
        leaves = plan.rebuilt(jaxpr.consts, given, list(outputs), list(made))
        pull = jax.tree.unflatten(known["tree"], leaves)
        of_trained, of_inputs = pull(list(gradients))
        return of_trained, of_inputs

    return Halves(kept_forward, backward, list(shapes[0]), tuple(known["floating"]), plan.passed, plan.residuals)


class OutOfMemoryError(Exception):
    """A program needs more memory than the chip has."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What the compiler says of a program, in bytes of the device's memory, padding of its layouts included."""

    argument_bytes: int
    arguments: tuple[int, ...]
    """Bytes of each."""
    output_bytes: int
    outputs: tuple[int, ...]
    """Bytes of each."""
    alias_bytes: int
    """Of outputs that lie where arguments were."""
    temporary_bytes: int
    flops: float
    accessed_bytes: float
    seconds: float
    """The compiler's own estimate; 0 where it makes none."""
    executable: Any = None


def filled_between(outputs: Sequence[Any], gradients: Sequence[Any], num_bytes: int) -> list[Any]:
    """The gradients, known only after something of `num_bytes` was made from the outputs and read again."""
    jax, _ = jax_modules()
    numpy = jax.numpy
    seed = sum((numpy.sum(output.astype(numpy.float32)) for output in outputs), numpy.zeros(()))
    rows = num_bytes // (4 * _ROW)
    filling = jax.lax.optimization_barrier(numpy.broadcast_to(seed, (rows, _ROW)))
    return [gradient + numpy.sum(filling).astype(gradient.dtype) for gradient in gradients]


def named_chip(name: str) -> Any:
    """A device of a kind that need not be here, `v2` say, as the compiler knows it; one of `CHIPS`."""
    return named_chips(name, 1)[0]


def named_chips(name: str, num: int) -> list[Any]:
    """Several of them, neighbours.

    Raises:
        UsageError: More than a topology of the compiler has.
    """
    jax, _ = jax_modules()
    from jax.experimental import topologies  # noqa: PLC0415

    if not jax._src.xla_bridge._backends:
        # There is no TPU to be found, and looking for one takes its time.
        jax.config.update("jax_platforms", "cpu")
    shapes, options = _TOPOLOGIES[name]
    for shape in shapes:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape}", **options).devices
        if len(devices) >= num:
            return list(devices[:num])
    raise UsageError(f"no topology of TPU {name} with {num} devices is known here")


def versions() -> dict[str, str]:
    """Of all that decides what a program becomes."""
    return {name: importlib.metadata.version(name) for name in ("torch", "torchax", "jax", "jaxlib", "libtpu")}


def compiled(lowered: Any) -> Any:
    """A lowered program, compiled.

    Raises:
        OutOfMemoryError: It alone needs more than the device has.
    """
    jax, _ = jax_modules()
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemoryError(str(error).splitlines()[0]) from error


def compile_program(
    function: Callable[..., Any], shapes: Sequence[Any], device: Any, donated: Sequence[int] = ()
) -> Program:
    """Compiles a function for a device, which may lay out arguments and results as it likes.

    Args:
        function: Of nests of JAX arrays.
        shapes: Of its arguments.
        device: From `named_chip`, or of JAX.
        donated: Arguments whose memory it may use for its results.

    Raises:
        OutOfMemoryError: The program alone needs more than the device has.
    """
    jax, _ = jax_modules()
    from jax.experimental.layout import Format, Layout  # noqa: PLC0415

    anyhow = Format(Layout.AUTO, jax.sharding.SingleDeviceSharding(device))
    jitted = jax.jit(function, donate_argnums=tuple(donated), in_shardings=anyhow, out_shardings=anyhow)
    with warnings.catch_warnings():
        # What is donated and cannot be used again is no loss.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        executable = compiled(jitted.lower(*shapes))
    memory, cost = executable.memory_analysis(), executable.cost_analysis() or {}
    return Program(
        argument_bytes=memory.argument_size_in_bytes,
        arguments=laid_out_sizes(jax, shapes, executable.input_formats[0]),
        output_bytes=memory.output_size_in_bytes,
        outputs=laid_out_sizes(jax, executable.out_info, executable.output_formats),
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        flops=cost.get("flops", 0.0),
        accessed_bytes=cost.get("bytes accessed", 0.0),
        seconds=cost.get("optimal_seconds", 0.0),
        executable=executable,
    )


# Private functions and classes

_ROW = 1024
"""Columns of what fills memory."""


class _Plan:
    """Which of the values that a forward hands to its backward are new, and where the others come from."""

    def __init__(self, jax: Any, jaxpr: Any, num_outputs: int, given: Any) -> None:
        self._literals: list[Any] = []
        _, fixed, inputs, _ = given
        trained = given[0]
        names = [*sorted(trained), *sorted(fixed)]
        places: dict[Any, tuple[str, int | str]] = {}
        for var, place in zip(jaxpr.invars, range(len(jaxpr.invars)), strict=True):
            of_input = place - len(names)
            known: tuple[str, int | str]
            if of_input < 0:
                known = ("state", names[place])
            else:
                known = ("input", of_input) if of_input < len(inputs) else ("key", 0)
            places[var] = known
        self._given = {var: n for n, var in enumerate(jaxpr.invars)}
        self._consts = {var: n for n, var in enumerate(jaxpr.constvars)}
        self._outputs: dict[Any, int] = {}
        for n, var in enumerate(jaxpr.outvars[:num_outputs]):
            if not _is_literal(var) and var not in places:
                places[var] = ("output", n)
                self._outputs[var] = n
        self.passed = tuple(_input_index(places.get(var)) for var in map(_hashable, jaxpr.outvars[:num_outputs]))
        self.made: list[int] = []
        self._place: dict[Any, int] = {}
        self._leaves = jaxpr.outvars[num_outputs:]
        found: dict[Any, Residual] = {}
        for n, var in enumerate(self._leaves):
            if _is_literal(var) or var in self._consts or var in found:
                continue
            shape = jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
            if var in places:
                found[var] = Residual(*places[var], shape)
            else:
                self._place[var] = len(self.made)
                self.made.append(n)
                found[var] = Residual("made", len(self.made) - 1, shape)
        self.residuals = tuple(found.values())

    def rebuilt(self, consts: Sequence[Any], given: Sequence[Any], outputs: Sequence[Any], made: Sequence[Any]) -> Any:
        """All leaves of what backward reads."""

        def value(var: Any) -> Any:
            if _is_literal(var):
                return var.val
            for known, values in (
                (self._given, given),
                (self._consts, consts),
                (self._outputs, outputs),
                (self._place, made),
            ):
                if var in known:
                    return values[known[var]]
            raise AssertionError(var)

        return [value(var) for var in self._leaves]


def _is_literal(var: Any) -> bool:
    return hasattr(var, "val")


def _hashable(var: Any) -> Any:
    return None if _is_literal(var) else var


def _input_index(place: tuple[str, int | str] | None) -> int:
    return int(place[1]) if place is not None and place[0] == "input" else -1


def _worth_keeping(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """Whether the result of an operator is kept for backward, rather than computed again."""
    called = [value for value in parameters.values() if hasattr(value, "jaxpr") and hasattr(value, "consts")]
    if called:
        # An activation with a derivative of its own (`relu`) is as cheap as what it consists of.
        return any(_worth_keeping(eqn.primitive, **eqn.params) for body in called for eqn in body.jaxpr.eqns)
    return str(primitive) not in _CHEAP


@contextmanager
def in_32_bits() -> Iterator[None]:
    """Torch's integers have 64 bits, and JAX says each time that its own have 32."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Explicitly requested dtype")
        yield


@cache
def _torchax() -> Any:
    with _without_named_tensors():
        import torchax  # noqa: PLC0415
        import torchax.decompositions  # noqa: PLC0415
        import torchax.device_module  # noqa: PLC0415
        import torchax.tensor  # noqa: PLC0415
    # torchax 0.0.13 has no state for a device, for which torch's `fork_rng` asks; JAX's keys are ours to hand on.
    torchax.device_module.get_rng_state = lambda *_: torch.empty(0)
    # Nor has it streams, for which torch's checkpoints ask whatever device there is, also those of other models.
    torchax.device_module.current_stream = lambda *_: _STREAM
    torchax.device_module.stream = nullcontext
    return torchax


class _Stream:
    """Work is done when it has been asked for."""

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


_STREAM = _Stream()


@contextmanager
def _without_named_tensors() -> Iterator[None]:
    """Torchax 0.0.13 lists overloads for named tensors, which torch 2.13 no longer has (pytorch/pytorch#173895).

    Meanwhile they resolve to placeholders, which nobody ever looks up.
    """
    look_up = OpOverloadPacket.__getattr__

    def look_up_or_name(packet: OpOverloadPacket, name: str) -> Any:
        try:
            return look_up(packet, name)
        except AttributeError:
            if _GONE.search(name) is None:
                raise
            return f"{packet}.{name}"

    OpOverloadPacket.__getattr__ = look_up_or_name  # type: ignore[method-assign]
    try:
        yield
    finally:
        OpOverloadPacket.__getattr__ = look_up  # type: ignore[method-assign]


@cache
def environment() -> Any:
    """Where torch's operators are JAX's."""
    jax, torchax = jax_modules()

    base: Any = torchax.tensor.Environment

    class Environment(base):  # type: ignore[misc]
        """Takes tensors that are no parameters (a mask that is a plain attribute, say) as constants."""

        def t2j_iso(self, torchtensors: Any) -> Any:
            def known(tensor: Tensor) -> Any:
                if hasattr(tensor, "jax"):
                    return tensor
                return torchax.tensor.Tensor(_constant(jax, self, tensor), self)

            mapped = torch.utils._pytree.tree_map_only(Tensor, known, torchtensors)
            return super().t2j_iso(mapped)

    return Environment()


def _constant(jax: Any, env: Any, tensor: Tensor) -> Any:
    if tensor.numel() and not any(tensor.stride()):
        # Zeros that take no memory need not take any there.
        return jax.numpy.broadcast_to(env.t2j_copy(tensor.detach()[(0,) * tensor.ndim]), tuple(tensor.shape))
    return env.t2j_copy(tensor.detach())
