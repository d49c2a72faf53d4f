"""Find the shapes of all boundary tensors of a chain, and which layers change their input in place or return it."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from planner.core.errors import ModelError, PlannerError
from planner.core.values.precision import Precision
from planner.executor.run.parts import tensors_in_value
from planner.executor.run.recompute import RecomputedLayer
from planner.model.autocast import autocast_dtype, forward_context
from planner.model.batch_norm import BatchStatistics
from planner.model.chain import Chain, Layer
from planner.model.copying import copy_module
from planner.model.layout import meta_tensor_like
from planner.model.leaves import describe_constant, is_plain, is_same_constant
from planner.model.load import to_device
from planner.model.module_tensors import attribute_tensors
from planner.model.process_group import hide_process_group
from planner.model.refusals import control_flow_error, explain_error
from planner.model.seeding import keeping_random_state
from planner.model.variables import undo_variable_changes


@dataclass(frozen=True)
class Boundary:
    """Structure of the value that is sent over a boundary for one micro-batch, with its constants and tensor shapes."""

    leaves: tuple[Any, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, value: Any) -> "Boundary":
        """Return the boundary for a nested value: its structure, constants, and tensors without values."""
        leaves, spec = tree_flatten(value)
        _refuse_other_layouts([leaf for leaf in leaves if isinstance(leaf, Tensor)])
        return cls(tuple(meta_tensor_like(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Tensors of the value, in order, on the meta device."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Tensor))

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the nested value of this boundary, with these tensors."""
        if self.spec.is_leaf():
            return tensors[0] if tensors else self.leaves[0]
        rest = iter(tensors)
        return tree_unflatten([next(rest) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec)

    def check_matches(self, leaves: Sequence[Any], spec: TreeSpec, stage_inputs: Sequence[Tensor]) -> None:
        """Check that a value to send has this boundary's structure and shapes; `stage_inputs` is only for messages.

        Args:
            leaves: Leaves of the flattened value.
            spec: Structure of the value.
            stage_inputs: Tensors that the stage received. The error describes them.

        Raises:
            ModelError: The value differs, so the next stage would misread it.
        """
        pairs = list(zip(leaves, self.leaves, strict=False))
        if any(isinstance(leaf, Tensor) and leaf.requires_grad > _requires_grad(planned) for leaf, planned in pairs):
            raise control_flow_error(
                "a tensor that a stage sends requires a gradient now, but did not before (let `build_model` run a "
                "first forward that only initializes)"
            )
        other = next((pair for pair in pairs if not _is_same(*pair)), None)
        if other is not None and not any(isinstance(leaf, Tensor) for leaf in other):
            raise ModelError(
                f"a layer returned {_describe_change(*other)}: only tensors are sent to the next stages, which would "
                "use the old value",
                hint="return tensors only: a number as a tensor, and make an object in the layer that uses it",
            )
        if other is not None or spec != self.spec:
            raise ModelError(
                f"a stage that received {describe_leaves(stage_inputs)} should send {describe_leaves(self.leaves)}, "
                f"but has {describe_leaves(leaves)}: the next stage expects the shapes of `example_batch`",
                hint="give inputs of the same shape in every step (pad or cut them), or plan for the new shapes: let "
                "`example_batch` return them, and profile again",
            )


def _refuse_other_layouts(tensors: Sequence[Tensor]) -> None:
    kind = next((tensor.layout for tensor in tensors if tensor.layout != torch.strided), None)
    if kind is not None:
        raise ModelError(
            f"a layer passes on a tensor of {kind} (nested or sparse), whose size depends on the data and which cannot "
            "be sent",
            hint="make it dense and of a fixed shape at the end of the layer: `torch.nested.to_padded_tensor`, "
            "`to_dense()`",
        )


def _requires_grad(planned: Any) -> bool:
    return isinstance(planned, Tensor) and planned.requires_grad


def _is_same(leaf: Any, planned: Any) -> bool:
    """Return True if two tensors have the same shape and dtype, or two constants are equal."""
    if isinstance(leaf, Tensor) and isinstance(planned, Tensor):
        return (leaf.shape, leaf.dtype) == (planned.shape, planned.dtype)
    return is_same_constant(leaf, planned)


def _describe_change(now: Any, before: Any) -> str:
    """Describe the difference between two constants that are not equal."""
    if type(now) is type(before) and not is_plain(now) and not isinstance(now, np.ndarray):
        return f'an object of type "{type(now).__name__}", and not the one that it returned for `example_batch`'
    return f"{describe_constant(now)} where it returned {describe_constant(before)} for `example_batch`"


@dataclass(frozen=True)
class ChainShapes:
    """Tensors at every boundary of a chain, and whether each layer writes into its input or shares storage with it."""

    boundaries: tuple[Boundary, ...]
    """Boundaries before every layer, and after the last layer."""
    writes: tuple[bool, ...]
    """True for each layer that writes into its input."""
    aliases: tuple[bool, ...]
    """True for each layer whose output shares storage with its input."""

    def require_gradients_of(self, other: "ChainShapes") -> "ChainShapes":
        """Set `requires_grad` of all tensors that require a gradient in `other`, and return this object."""
        for here, there in zip(self.boundaries, other.boundaries, strict=True):
            for tensor, again in zip(here.tensors, there.tensors, strict=False):
                tensor.requires_grad_(tensor.requires_grad or (again.requires_grad and tensor.dtype == again.dtype))
        return self

    def stage_writes_input(self, first: int, end: int) -> bool:
        """Return True if a stage of layers `first` to `end - 1` would write into its input tensors."""
        for layer in range(first, end):
            if self.writes[layer]:
                return True
            if not self.aliases[layer]:
                return False
        return False

    def recomputed_layer(self, layer: int, end: int) -> RecomputedLayer:
        """Return the properties that a recomputation of `layer` needs, in a stage whose last layer is `end - 1`."""
        carries = tuple(tensor.requires_grad for tensor in self.boundaries[layer + 1].tensors)
        if layer == len(self.writes) - 1:
            carries = (any(carries),)  # the output of the last layer is the loss
        # The recomputation begins with this layer and reads the kept input a second time, as a stage would.
        return RecomputedLayer(self.stage_writes_input(layer, end), carries)


def chain_shapes(
    chain: Chain, inputs: Any, *, precision: Precision = "", device: torch.device | None = None
) -> ChainShapes:
    """Return the boundary tensors of a chain.

    Args:
        chain: Chain on the meta device.
        inputs: Model's input for one micro-batch, on any device.
        precision: Precision of the layers.
        device: Device that will run the layers; it determines the dtypes under autocast.

    Raises:
        ModelError: A layer does not fit its input, or cannot be trained in micro-batches.
    """
    BatchStatistics(chain.model.named_modules())  # refuses unsupported layers on every rank; removes statistics
    received = Boundary.of(to_device(inputs, torch.device("meta")))
    if chain.outline is None:
        with undo_variable_changes(chain.model), hide_process_group():
            first = _run_layers(chain.layers, received, precision, device)
            # Run twice, because a first forward may only initialize, and a layer may be skipped at random.
            return first.require_gradients_of(_run_layers(chain.layers, received, precision, device))
    size = next((int(tensor.shape[0]) for tensor in received.tensors), 0)
    between = (Boundary.of(chain.outline.meta_inputs(n, size)) for n in range(1, len(chain.layers)))
    behind = Boundary.of(torch.empty((), device="meta", requires_grad=True))  # in place of the output: the loss
    return ChainShapes((received, *between, behind), chain.outline.writes, chain.outline.aliases)


def _run_layers(
    layers: Sequence[Layer], received: Boundary, precision: Precision, device: torch.device | None
) -> ChainShapes:
    """Run the layers one after another, on tensors without values, or on random values if a layer needs values."""
    # Autocast does not affect meta tensors, so use fake tensors of the device with autocast.
    is_fake = device is not None and autocast_dtype(precision) is not None
    mode = FakeTensorMode() if is_fake else nullcontext()
    modules = nn.ModuleList(layer.module for layer in layers)

    def fake(tensor: Tensor) -> Tensor:
        with mode:
            empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
            return empty.requires_grad_(tensor.requires_grad)

    if is_fake:
        # Copy all layers at once, so that tied parameters stay tied.
        modules = copy_module(modules, {id(t): fake(t) for t in (*modules.parameters(), *modules.buffers())})

    def without_values(module: nn.Module, boundary: Boundary) -> _Effects:
        # Copy the tensors: a layer cannot write into a leaf, and a write into the copy can be detected.
        value = boundary.rebuild([(fake(t) if is_fake else t).clone() for t in boundary.tensors])
        with forward_context(precision, device) if device is not None else nullcontext(), mode:
            return _Effects.of(module, value)

    boundaries = [received]
    writes, aliases = [], []
    for layer, module in zip(layers, modules, strict=True):
        try:
            effects = without_values(module, boundaries[-1])
        except (Exception, SystemExit) as error:  # the layer may need values; a user's error occurs here again
            try:
                effects = _on_random_values(layer.module, boundaries[-1], precision, device or torch.device("cpu"))
            except (Exception, SystemExit) as with_values:
                raise _cannot_run_error(layer, boundaries[-1], error, with_values) from with_values
        writes.append(effects.writes)
        aliases.append(effects.aliases)
        boundaries.append(Boundary.of(effects.output))
    return ChainShapes(tuple(boundaries), tuple(writes), tuple(aliases))


class _Effects(NamedTuple):
    output: Any
    writes: bool
    aliases: bool

    @classmethod
    def of(cls, module: nn.Module, value: Any) -> "_Effects":
        inputs = tensors_in_value(value)
        versions = [t._version for t in inputs]
        output = module(value)
        _refuse_other_layouts(tensors_in_value(output))
        storages = {t.untyped_storage()._cdata for t in inputs}
        aliases = any(t.untyped_storage()._cdata in storages for t in tensors_in_value(output))
        return cls(output, [t._version for t in inputs] != versions, aliases)


def _on_random_values(module: nn.Module, received: Boundary, precision: Precision, device: torch.device) -> _Effects:
    # Run a copy of the layer, so that the layer keeps its own values.
    held = (*module.parameters(), *module.buffers(), *attribute_tensors(module))
    with keeping_random_state():
        torch.manual_seed(0)  # the same values on every rank
        module = copy_module(module, {id(tensor): _random_like(tensor, device) for tensor in held})
        value = received.rebuild([_random_like(tensor, device).clone() for tensor in received.tensors])
        with forward_context(precision, device):
            effects = _Effects.of(module, value)
    return effects._replace(output=to_device(effects.output, torch.device("meta")))


def _cannot_run_error(
    layer: Layer, received: Boundary, error: BaseException, with_values: BaseException
) -> PlannerError:
    where = f'layer "{layer.name}" ({type(layer.module).__name__})'
    # Two equal errors are from the user's code: the layer's input does not fit.
    if type(error) is type(with_values) or isinstance(with_values, PlannerError):
        return explain_error(where, with_values, describe_leaves(received.leaves))
    return ModelError(
        f"{where} does not run on random values, with which every rank finds the shapes at the boundaries: "
        f"{type(with_values).__name__}: {with_values}",
        hint="output shapes must depend only on input shapes: move checks of values into the data loader",
    )


def _random_like(tensor: Tensor, device: torch.device) -> Tensor:
    values = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    values = values.uniform_() if tensor.is_floating_point() else values.zero_()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(values, requires_grad=tensor.requires_grad)
    return values.requires_grad_(tensor.requires_grad)


def describe_leaves(leaves: Sequence[Any]) -> str:
    """Return a text that lists the leaves of a value: tensors by dtype and shape, other leaves by their `repr`."""
    shown = (
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
        for leaf in leaves
    )
    return ", ".join(shown) or "nothing"
