"""What the compiler says of layers and of steps of the optimizer, as it is remembered; no jax is needed to read it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.core.values.profile import ArrayKind, BoundaryTensor, MemoryDetail, ProgramMemory


@dataclass(frozen=True, kw_only=True)
class CompiledLayer:
    """One layer at one micro-batch size; bytes of the device's memory."""

    inputs: tuple[int, ...]
    """Per input tensor."""
    laid_out: tuple[int, ...]
    """Bytes of each, as the layer wants it to lie."""
    wanted: tuple[int, ...]
    """The same, in loops."""
    kept_inputs: tuple[bool, ...]
    """Whether backward reads it."""
    outputs: tuple[int, ...]
    kept_outputs: tuple[bool, ...]
    aliases: tuple[int, ...]
    """Per output: which input it is as it came, or -1."""
    reshaped_bytes: int
    """What backward reads, parameters left out, of what lies in another shape in loops: as the layer has it."""
    forward_us: float
    backward_us: float
    forward_temporary_bytes: int
    backward_temporary_bytes: int
    """With the gradients of outputs and inputs."""
    peak_bytes: int
    """The temporaries of both in one program, with the same gradients."""
    carried_bytes: int
    """From one to the other there, inputs, outputs and parameters not counted."""
    narrowed_bytes: int
    """Bytes of weights as products take them."""
    padding_bytes: int
    """Bytes that the parameters that are trained take more than they have."""
    flops: float
    """Operations of the forward."""
    narrowed_inputs_bytes: int
    """Bytes of inputs as products take them."""
    trained_kinds: tuple[ArrayKind, ...]
    """Parameters that are trained."""
    made_kinds: tuple[ArrayKind, ...]
    """Arrays kept for backward, neither input nor output nor parameter, as loops hold them."""
    input_kinds: tuple[ArrayKind, ...]
    """Inputs one by one; what forward and backward read by products alone lies narrow in loops."""
    output_kinds: tuple[ArrayKind, ...]
    """Outputs one by one; what the layer's own backward reads so, or not at all, lies narrow in loops."""
    narrow_inputs: tuple[bool, ...]
    """Whether its backward reads each input so."""

    def detail(self) -> MemoryDetail:
        """The record that an allocator would have given."""
        tensors = zip(self.output_kinds, self.kept_outputs, self.aliases, strict=True)
        outputs = tuple(BoundaryTensor(bytes=array.bytes, kept=kept, alias=alias) for array, kept, alias in tensors)
        created_bytes = sum(tensor.bytes for tensor in outputs if tensor.alias < 0)
        inputs = zip(self.input_kinds, self.kept_inputs, strict=True)
        made_bytes = sum(array.bytes for array in self.made_kinds)
        forward_bytes = self.forward_temporary_bytes + made_bytes + created_bytes
        backward_bytes = self.backward_temporary_bytes + made_bytes + self.reshaped_bytes
        return MemoryDetail(
            internal_bytes=made_bytes,
            inputs=tuple(BoundaryTensor(bytes=array.bytes, kept=kept) for array, kept in inputs),
            outputs=outputs,
            forward_peak_bytes=forward_bytes,
            no_grad_peak_bytes=forward_bytes,
            first_backward_peak_bytes=backward_bytes,
            backward_peak_bytes=backward_bytes,
        )

    def program(self, kept: Mapping[int, bool], received: Sequence[tuple[int, int]]) -> ProgramMemory:
        """The record of a layer within one program.

        Args:
            kept: Which of its outputs are held for some backward, each with whether all of these read it narrow.
            received: Bytes of its first inputs, as they come over the boundary in front of it, and as layers want them.
        """
        return ProgramMemory(
            carried_bytes=self.carried_bytes + sum(self.outputs[n] for n in kept),
            peak_bytes=self.peak_bytes,
            narrowed_bytes=self.narrowed_bytes,
            padding_bytes=self.padding_bytes,
            reshaped_bytes=self.reshaped_bytes,
            trained=counted(self.trained_kinds),
            kept=counted([*self.made_kinds, *(_kept(self.output_kinds[n], narrow=kept[n]) for n in sorted(kept))]),
            received=counted(map(_received, self.input_kinds, received)),
        )


def _kept(array: ArrayKind, *, narrow: bool) -> ArrayKind:
    return array if narrow else replace(array, loop_bytes=array.bytes)


def _received(array: ArrayKind, sizes: tuple[int, int]) -> ArrayKind:
    sent_bytes, wanted_bytes = sizes
    halves = 2 if array.loop_bytes < array.bytes else 1
    return replace(array, bytes=sent_bytes, loop_bytes=wanted_bytes // halves)


def counted(arrays: Iterable[ArrayKind]) -> tuple[ArrayKind, ...]:
    """Equal ones as one of so many."""
    return tuple(replace(array, count=count) for array, count in Counter(arrays).items())


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """The optimizer's step over the parameters of one layer."""

    step_us: float
    peak_bytes: int
    """Bytes beside parameters, gradients and state."""
