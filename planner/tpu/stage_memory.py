"""Memory of stages whose layers were compiled for a TPU: records of layers, and the law over them.

`planner.core.cost.costs` loads `compiled_costs` for profiles whose layers have `program`. The records are arrays of one
value per layer, or per stage of a window, as in `planner.core.cost.chain_costs`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from planner.core.cost.chain_costs import FloatArray, sums_before
from planner.core.cost.layer_memory import BACKWARD, FORWARD
from planner.core.cost.moments import BACKWARDS, FORWARDS
from planner.core.cost.parts import Parts, Size, all_parts, running_part
from planner.core.cost.size_costs import SizeCosts, additive_costs
from planner.core.cost.stages import Stages, Window
from planner.core.values.plan import Recompute
from planner.core.values.profile import ArrayKind, LayerProfile, ProgramMemory

_GAPS: Final = 1.05
"""What forward and backward in one piece take, over what their layers add up to: gaps between arrays of unlike sizes.

A margin: no layer by itself tells of them. Without it predictions were 0.92 to 1.06 of the programs in one piece that
docs/measurements/tpu-composition.md has, whose arrays are placed as `planner.tpu.programs.options_for` asks.
"""


class ProgramArrays(NamedTuple):
    """The arrays of a layer that lie in places which stages share (`planner.tpu.places`)."""

    trained: tuple[ArrayKind, ...]
    kept: tuple[ArrayKind, ...]
    """For backward, in loops over micro-batches."""
    received: tuple[ArrayKind, ...]
    """Over the boundary in front of it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Programs:
    """What a layer needs within one compiled program, gaps between arrays included."""

    carried: FloatArray
    """Held there from a layer's forward to its backward."""
    level: FloatArray
    """Highest there, in a forward and backward of one micro-batch."""
    narrowed: FloatArray
    """Weights as products take them, held by a loop over micro-batches."""
    narrowed_input: FloatArray
    """The first layer's input, of one micro-batch, where it is copied likewise."""
    padding: FloatArray
    """Bytes by which parameters and gradients are larger there."""
    reshaped: FloatArray
    """What loops hold in rows, in its own shape: part of a backward's transients; gaps left out, as in these."""
    waiting: FloatArray
    """By how much what is kept is larger until it is put into rows; gaps left out."""
    laid_out: FloatArray
    """The first layer's input once more, of one micro-batch, as it wants it to lie."""
    arrays: tuple[ProgramArrays, ...]
    """Each layer's, at the nearest profiled size; none where the profile does not say."""

    def in_stages(self, window: Window, micro_batches: int) -> "Looped":
        """Return what stages of these layers need."""
        carried_before = sums_before(self.carried)[window.firsts][:, None]
        return Looped(
            straight=window.highest(self.level[window.columns]) - carried_before,
            narrowed=window.sums(self.narrowed) + micro_batches * window.sums(self.narrowed_input),
            padding=window.sums(self.padding) + window.sums(self.laid_out),
            waiting=window.sums(self.waiting),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Looped:
    """What stages that are compiled as one program have beside that."""

    straight: FloatArray
    """Highest in a forward and backward in one piece."""
    narrowed: FloatArray
    """Copies of weights, and of the mini-batch, as products take them."""
    padding: FloatArray
    waiting: FloatArray
    """By how much what a forward keeps is larger until it is put into rows."""

    def parts(self, s: Stages, recompute: Recompute, *, in_flight: int) -> Parts:
        """Return the parts of stages that are compiled as one program each.

        Gradients are there from begin to end. A loop over micro-batches has an array with a place for each of them for
        everything that is kept. Its forward makes what one of them keeps before it puts that into its place, so there
        is one more of it. A micro-batch that is alone, or is computed again, is no loop's business: forward and
        backward are one piece, in which the compiler keeps what it likes and lets go of it as the backward goes.
        """
        kept_bytes, edges = s.input + s.saved, s.input + s.output
        keeps, loops = recompute in ("never", "layers"), in_flight > 1
        held = Size({"in_flight": kept_bytes if keeps else edges}, saved=int(keeps))
        around = self.padding + (self.narrowed if loops else 0.0)
        transfer = s.sent_output + s.input_gradient + s.message
        if not keeps or not (loops or s.layers_again):
            forward = backward = running_part(s.input if keeps else edges, self.straight + around, transfer)
        else:
            # Not all of it waits to be put away, so that copies of weights find room.
            making = s.peaks.forward + self.padding + (s.saved + self.waiting if loops else 0.0)
            forward = running_part(kept_bytes, making, s.message, saved=1 + loops, level=FORWARD)
            backward = running_part(kept_bytes, s.peaks.backward + around, transfer, saved=1, level=BACKWARD)
        kept = Size({"in_flight": np.maximum(kept_bytes, edges)}) if recompute == "except-last" else held
        running = {**dict.fromkeys(FORWARDS, forward), **dict.fromkeys(BACKWARDS, backward)}
        return all_parts(s, recompute, held=held, kept=kept, output_gradient=s.sent_output, running=running)


def compiled_costs(layers: Sequence[LayerProfile], n: int) -> SizeCosts:
    """Return the additive costs at the profile's size number `n`, with what layers need within one program."""
    plain, programs = additive_costs(layers, n), [layer.program[n] for layer in layers]
    received = np.append(programs[0].input_bytes, plain.boundaries.input[1:])
    return replace(
        plain,
        boundaries=replace(plain.boundaries, input=received),
        law=_programs(programs, plain.levels.saved),
        target=float(programs[-1].target_bytes),
    )


def _programs(programs: Sequence[ProgramMemory], saved: FloatArray) -> Programs:
    def each(size: Callable[[ProgramMemory], float]) -> FloatArray:
        return _GAPS * np.array([size(program) for program in programs], dtype=float)

    carried = each(lambda program: program.carried_bytes)
    reshaped = np.array([program.reshaped_bytes for program in programs], dtype=float)
    arrays = tuple(ProgramArrays(program.trained, program.kept, program.received) for program in programs)
    return Programs(
        carried=carried,
        level=sums_before(carried)[:-1] + each(lambda program: program.peak_bytes),
        narrowed=each(lambda program: program.narrowed_bytes),
        narrowed_input=each(lambda program: program.narrowed_input_bytes),
        padding=each(lambda program: 2 * program.padding_bytes),
        reshaped=reshaped,
        waiting=np.where(reshaped > 0, np.maximum(carried / _GAPS - saved, 0.0), 0.0),
        laid_out=each(lambda program: program.laid_out_bytes),
        arrays=arrays if all(layer.received for layer in arrays) else (),
    )
