"""Stand-ins for tensors that a stage does not have: ghosts, zeros, and outputs that cannot be read.

Outputs of the model that the loss did not read when the model was recorded (hidden states, attentions, encoder states)
are not sent from stage to stage. If the last stage cannot compute them, it returns stand-ins, which have a shape and no
values. Code that reads a stand-in raises an error that names the output.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from planner.core.errors import ModelError
from planner.core.values.devices import TORCH_KINDS
from planner.model.ghosts import SHAPE_ONLY, ghost_like, ghost_of_shape, zeros_without_memory
from planner.model.leaves import ConstantValue, TensorLeaf
from planner.model.model_part import ModelPart
from planner.model.nests import ABSENT, tensors_in


class UnreadOutput(Tensor):
    """Stand-in for a model output that the loss does not read. Reading it raises an error."""

    _name: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator that needs only the shape. Raise an error for other operators."""
        if func._schema.name in SHAPE_ONLY:
            return func(zeros_without_memory(args[0].shape, args[0].dtype, args[0].device), *args[1:], **(kwargs or {}))
        name = next(tensor._name for tensor in tensors_in((args, kwargs)) if isinstance(tensor, UnreadOutput))
        raise ModelError(
            f'the loss reads the model\'s output "{name}" ({func._schema.name}), which it did not read for '
            "`example_batch`: the previous stages do not send it",
            hint="let `loss_fn` read the same outputs whenever it is called",
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return shape, dtype and device as text."""
        return f"UnreadOutput({list(self.shape)}, {self.dtype}, {self.device})"


def _unread_output(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> UnreadOutput:
    unread: UnreadOutput = Tensor._make_wrapper_subclass(UnreadOutput, shape, dtype=dtype, device=device)
    unread._name = name
    return unread


class StandInFactory:
    """Factory of stand-ins for tensors that a stage lacks, for a micro-batch of `size` samples."""

    def __init__(self, part: ModelPart, size: int, device: torch.device) -> None:
        self._part = part
        self._size = size
        # Ghosts do not work with tensors on devices such as TPUs; there, stand-ins are zeros. Zeros do not reveal
        # mistakes, but profiling has already checked the stages in torch.
        self._with_ghosts = device.type in (*TORCH_KINDS, "meta")
        self._device = device if self._with_ghosts else torch.device("cpu")

    def missing_result(self, value: int) -> Tensor:
        """Return a stand-in for the tensor `Recording.values[value]`, which the stage does not receive."""
        recording = self._part.outline.recording
        storage, meta = recording.values[value]
        shape = self._part.outline.shape_of(value, self._size)
        if self._with_ghosts:
            # A result within an autograd function is not exposed, because it has no graph.
            exposed = recording.exposures.get(storage)
            if exposed is None:
                origin = "a result within an autograd function"
            else:
                call = exposed[0][1]
                origin = "an input of the model" if call < 0 else recording.calls[call].path
            return ghost_of_shape(shape, meta.dtype, self._device, origin=origin)
        # Modes that watch the model's operators must not see the creation of a stand-in.
        with _disable_current_modes(), torch.no_grad():
            if storage in self._part.overwritten:  # a tensor that is written into needs separate memory
                return torch.zeros(shape, dtype=meta.dtype, device=self._device)
            return zeros_without_memory(shape, meta.dtype, self._device)

    def parameter(self, name: str, tensor: Tensor) -> Tensor:
        """Return a stand-in for a parameter or buffer of another stage."""
        with _disable_current_modes(), torch.no_grad():
            if self._with_ghosts:
                return ghost_like(tensor, self._device, name)
            return zeros_without_memory(tensor.shape, tensor.dtype, self._device)

    def output(self, index: int, name: str, leaf: Any) -> Any:
        """Return a replacement for a leaf of the model's nested output that the loss does not read.

        Args:
            index: Index of the leaf.
            name: Name of the leaf, for the error that reading the stand-in raises.
            leaf: Leaf that the stage's forward returned: a tensor of the right shape, another value, or `ABSENT`.

        Returns:
            A stand-in, or `leaf` itself if it is neither a tensor nor absent.

        Raises:
            LookupError: The leaf is absent, and its shape or value is not known from the recording.
        """
        if isinstance(leaf, Tensor):
            return _unread_output(name, leaf.shape, leaf.dtype, leaf.device)
        if leaf is not ABSENT:
            return leaf
        outline = self._part.outline
        recording = outline.recording
        model = recording.calls[0]
        recorded = model.leaves[index] if model.nest == recording.output_nest else None
        if isinstance(recorded, ConstantValue):
            return recorded.value
        is_unread = recording.outputs[index] in recording.unread
        if isinstance(recorded, TensorLeaf) and is_unread and recorded.number in outline.shapes:
            shape = outline.shape_of(recorded.number, self._size)
            return _unread_output(name, shape, recorded.meta.dtype, self._device)
        raise LookupError

    @contextmanager
    def in_model(self, names: Sequence[str]) -> Iterator[None]:
        """Replace the parameters and buffers `names` by stand-ins in the `with` block."""
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for full in names:
                path, _, name = full.rpartition(".")
                owner = self._part.model.get_submodule(path)
                holder: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
                replaced.append((holder, name, holder[name]))
                holder[name] = self.parameter(full, holder[name])
            yield
        finally:
            for holder, name, tensor in replaced:
                holder[name] = tensor
