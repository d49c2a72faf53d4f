"""Memory and times of compiled layers and optimizer steps. This module does not import jax.

`Compiler` caches these values on disk, unless they are of an attached TPU.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from planner.core.values.profile import ArrayKind, BoundaryTensor, MemoryDetail, ProgramMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledLayer:
    """Memory, times and FLOPs of a compiled layer at one micro-batch size. Sizes include padding, unless noted."""

    inputs: tuple[int, ...]
    """Bytes of each input tensor in its smallest memory layout."""
    laid_out: tuple[int, ...]
    """Bytes of each input in the memory layout that the compiler chooses for the layer."""
    wanted: tuple[int, ...]
    """Bytes of each input in a loop over micro-batches: as in `laid_out`, or fewer if the loop flattens the input."""
    kept_inputs: tuple[bool, ...]
    """True for inputs that the backward reads."""
    outputs: tuple[int, ...]
    kept_outputs: tuple[bool, ...]
    aliases: tuple[int, ...]
    """For each output, the index of the input that it returns unchanged; -1 for new outputs."""
    reshaped_bytes: int
    """Bytes, before flattening, of the saved arrays that a loop over micro-batches flattens."""
    forward_us: float
    backward_us: float
    forward_temporary_bytes: int
    backward_temporary_bytes: int
    """Temporaries of the backward, including gradients of outputs and inputs."""
    peak_bytes: int
    """Temporaries of forward and backward in one executable, including gradients of outputs and inputs."""
    carried_bytes: int
    """Bytes kept from forward to backward if both are in one executable, without inputs, outputs and parameters."""
    narrowed_bytes: int
    """Bytes of 16-bit copies of weights for matmuls."""
    padding_bytes: int
    """Bytes of padding of trained parameters."""
    flops: float
    """Floating-point operations of the forward."""
    narrowed_inputs_bytes: int
    """Bytes of 16-bit copies of inputs for matmuls."""
    trained_kinds: tuple[ArrayKind, ...]
    """Type, shape and bytes of each trained parameter."""
    made_kinds: tuple[ArrayKind, ...]
    """Type, shape and bytes of each array that the forward makes for the backward, except outputs."""
    input_kinds: tuple[ArrayKind, ...]
    """Type, shape and bytes of each input, as a loop over micro-batches stores it."""
    output_kinds: tuple[ArrayKind, ...]
    """Type, shape and bytes of each output, as a loop over micro-batches stores it."""
    # In the loop, an output has 16 bits per number unless this layer's backward reads it otherwise than in a matmul.
    narrow_inputs: tuple[bool, ...]
    """True for inputs that the backward reads only as matmul operands, or not at all."""

    def memory_detail(self) -> MemoryDetail:
        """Return the layer's memory as a `MemoryDetail`, the record that profiles of CPUs and GPUs use."""
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

    def memory_in_program(
        self, stored_outputs: Mapping[int, bool], received_sizes: Sequence[tuple[int, int]]
    ) -> ProgramMemory:
        """Return the layer's memory within an executable that contains all layers.

        Args:
            stored_outputs: Outputs that are stored for the backward of any layer. The key is the output's index. The
                value is True if all backwards read the output only as a matmul operand.
            received_sizes: Two sizes of each received tensor, in bytes. The first one is the size as sent. Layers that
                read the tensor may need different layouts. The second one is the size in the largest of these layouts.
        """
        return ProgramMemory(
            carried_bytes=self.carried_bytes + sum(self.outputs[n] for n in stored_outputs),
            peak_bytes=self.peak_bytes,
            narrowed_bytes=self.narrowed_bytes,
            padding_bytes=self.padding_bytes,
            reshaped_bytes=self.reshaped_bytes,
            trained=merge_equal_arrays(self.trained_kinds),
            kept=merge_equal_arrays(
                [
                    *self.made_kinds,
                    # An output that some backward reads at full width is stored at full width.
                    *(
                        array if stored_outputs[n] else replace(array, loop_bytes=array.bytes)
                        for n, array in enumerate(self.output_kinds)
                        if n in stored_outputs
                    ),
                ]
            ),
            received=merge_equal_arrays(map(_received_kind, self.input_kinds, received_sizes)),
        )


def _received_kind(array: ArrayKind, sizes: tuple[int, int]) -> ArrayKind:
    sent_bytes, wanted_bytes = sizes
    divisor = 2 if array.loop_bytes < array.bytes else 1
    return replace(array, bytes=sent_bytes, loop_bytes=wanted_bytes // divisor)


def merge_equal_arrays(arrays: Iterable[ArrayKind]) -> tuple[ArrayKind, ...]:
    """Merge equal arrays into one entry with a count."""
    return tuple(replace(array, count=count) for array, count in Counter(arrays).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledOptimizerStep:
    """Memory and time of a compiled optimizer step for the parameters of one layer."""

    step_us: float
    peak_bytes: int
    """Temporary bytes, without parameters, gradients and state."""
