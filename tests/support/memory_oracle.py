"""The law of memory as it stood before parts were counted, one formula for each moment: an oracle for the one law.

Its moments are written down for GPipe and 1F1B by hand, where the law reads them off the programs of the devices. It
takes 1F1B with all M micro-batches in flight for GPipe.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.layer_memory import StageLayers, StageLevels, cast_gradient_peaks
from planner.core.cost.passing import Passing
from planner.core.cost.waiting import Backward
from planner.core.values.plan import Recompute, StageMemory

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalMemory:
    """Itemised peaks of many stages: arrays of shape (firsts, L), in bytes.

    Row a, column e is the stage that runs layers `firsts[a]`..e; columns left of `firsts[a]` mean nothing.
    """

    parameters: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    buffers: FloatArray
    casts: FloatArray
    in_flight: FloatArray
    transfer: FloatArray
    working: FloatArray

    def total(self) -> FloatArray:
        """Sum of the items in whole bytes, as `stage_memory` rounds them (the reserve not included)."""
        total = np.rint(self.parameters)
        for item in fields(self)[1:]:
            total = total + np.rint(getattr(self, item.name))
        return total


def stage_memory(
    costs: ChainCosts,
    first: int,
    end: int,
    *,
    micro_batches: int,
    in_flight: int,
    recompute: Recompute,
    recomputed: Collection[int] = (),
    reserve_bytes: int = 0,
) -> StageMemory:
    """Peak memory of the stage that runs layers `first`..`end - 1`.

    Args:
        costs: The chain at the plan's micro-batch size.
        first: First layer.
        end: One past the last layer.
        micro_batches: M.
        in_flight: Most micro-batches waiting for their backward (see `planner.core.schedule.actions.num_in_flight`).
        recompute: On which micro-batches activations are dropped.
        recomputed: With `recompute="layers"`, the layers that are recomputed, counted along the chain.
        reserve_bytes: Added as an item of its own.
    """
    stages = _Stages(costs, np.array([first]), micro_batches, slice(first, end))
    if recompute == "layers":
        stages.recompute_layers(StageLayers.of(costs, first, end).levels(frozenset(recomputed)))
        recompute = "never"
    memory = _peaks(stages, in_flight, recompute)
    items = {f.name: round(float(getattr(memory, f.name)[0, -1])) for f in fields(memory)}
    return StageMemory.of(**items, reserve=reserve_bytes)


class ChunkParts(NamedTuple):
    """What stages need that share a device with others: in whole bytes, arrays of one shape.

    Which of the parts are there at once, and how often, is for `planner.core.cost.device_memory` to say.
    """

    always: FloatArray
    """Parameters, optimizer state, buffers and the mini-batch's part; without exact records gradients, too."""
    gradients: FloatArray
    """From the end of the first backward on."""
    casts: FloatArray
    """While the schedule runs."""
    held: FloatArray
    """By a micro-batch between its forward and its backward."""
    kept: FloatArray
    """Beside that, by the last micro-batch, which `except-last` does not recompute."""
    input: FloatArray
    """In a buffer, ahead of the forward."""
    output_gradient: FloatArray
    """In a buffer, ahead of the backward."""
    input_gradient: FloatArray
    """Sent last, and not yet known to have arrived."""
    forward: FloatArray
    """While a forward runs, all of its micro-batch included; likewise the others."""
    last_forward: FloatArray
    first_backward: FloatArray
    backward: FloatArray
    last_backward: FloatArray
    optimizer_step: FloatArray


CHUNK_PARTS = ChunkParts._fields[1:]
"""All but `always`."""


def chunk_parts(
    costs: ChainCosts,
    firsts: NDArray[np.int64],
    stop: int,
    *,
    micro_batches: int,
    recompute: Recompute,
    recomputed: Collection[int] = (),
) -> ChunkParts:
    """Of stages whose last layer is one of `firsts[0]`..`stop - 1`; shapes as those of `interval_totals`.

    With `recompute="layers"` of the one stage that ends there: in the last column.
    """
    stages = _Stages(costs, firsts, micro_batches, slice(int(firsts[0]), stop))
    if recompute == "layers":
        stages.recompute_layers(StageLayers.of(costs, int(firsts[0]), stop).levels(frozenset(recomputed)))
        recompute = "never"
    if micro_batches == 1 and recompute == "except-last":
        recompute = "never"
    own_parts = _chunk_parts if stages.exact else _additive_chunk_parts
    parts = own_parts(stages, recompute)
    if recompute != "never" and stages.forward_only.any():
        never = own_parts(stages, "never")
        parts = ChunkParts(*(np.where(stages.forward_only, a, b) for a, b in zip(never, parts, strict=True)))
    return ChunkParts(*(np.rint(np.broadcast_to(part, stages.buffers.shape)) for part in parts))


def _peaks(stages: "_Stages", in_flight: int, recompute: Recompute) -> IntervalMemory:
    if recompute == "layers":
        raise ValueError("which layers is known of one stage at a time: ask `stage_memory`")
    memory = _highest(stages, in_flight, recompute)
    if recompute == "never" or not stages.forward_only.any():
        return memory
    # Where nothing in front is trained, there is no backward, and the executor recomputes nothing.
    never = _highest(stages, in_flight, "never")
    choice = {
        f.name: np.where(stages.forward_only, getattr(never, f.name), getattr(memory, f.name)) for f in fields(memory)
    }
    return IntervalMemory(**choice)


def _highest(stages: "_Stages", in_flight: int, recompute: Recompute) -> IntervalMemory:
    peak = total = None
    for moment in _all_moments(stages, in_flight, recompute):
        alive = moment.alive()
        if peak is None or total is None:
            peak, total = moment, alive
            continue
        higher = alive > total
        total = np.where(higher, alive, total)
        peak = _Moment(*(np.where(higher, new, old) for new, old in zip(moment, peak, strict=True)))
    assert peak is not None  # every recompute choice has moments
    return IntervalMemory(
        parameters=stages.parameters,
        gradients=peak.gradients,
        optimizer=stages.optimizer,
        buffers=stages.buffers,
        casts=peak.casts,
        in_flight=peak.in_flight + stages.data,
        transfer=peak.transfer,
        working=peak.working,
    )


def _all_moments(stages: "_Stages", in_flight: int, recompute: Recompute) -> Iterator["_Moment"]:
    yield from _engine_moments(stages, in_flight, recompute)
    yield from _bucket_moments(stages, in_flight, recompute)
    yield stages.optimizer_moment()


def _engine_moments(stages: "_Stages", in_flight: int, recompute: Recompute) -> Iterator["_Moment"]:
    """Those while the schedule runs."""
    if stages.micro_batches == 1 and recompute == "except-last":
        recompute = "never"
    if stages.exact:
        return _moments(stages, in_flight, recompute)
    return (_one_program if stages.compiled else _additive)(stages, in_flight, recompute)


class _Moment(NamedTuple):
    """What is alive at one moment, beside parameters, optimizer state and buffers."""

    gradients: FloatArray
    casts: FloatArray
    in_flight: FloatArray
    transfer: FloatArray
    working: FloatArray

    def alive(self) -> FloatArray:
        """All of it."""
        return self.gradients + self.casts + self.in_flight + self.transfer + self.working


class _Stages:
    """Sums and running maxima over layers first..e, for every first (rows) and every last layer e (columns)."""

    def __init__(
        self, costs: ChainCosts, firsts: NDArray[np.int64], micro_batches: int, columns: slice = slice(None)
    ) -> None:
        first = firsts[:, None]
        layers = np.arange(costs.num_layers)[columns]
        last = layers[None, :]
        is_last = last == costs.num_layers - 1
        passing = Passing(costs, firsts, layers)

        def sums(per_layer: FloatArray) -> FloatArray:
            before: FloatArray = np.concatenate([[0.0], np.cumsum(per_layer)])
            between: FloatArray = before[1:][None, columns] - before[firsts][:, None]
            return between

        def highest(levels: FloatArray) -> FloatArray:
            running: FloatArray = np.maximum.accumulate(np.where(last >= first, levels, 0.0), axis=1)
            return running

        def highest_backward(level: FloatArray, end_twice: FloatArray, backward: Backward | None = None) -> FloatArray:
            return passing.highest_backward(level[columns], end_twice[columns], backward if costs.exact else None)

        def tied(per_layer: FloatArray, name: str) -> FloatArray:
            total = sums(per_layer)
            for tie in costs.ties:
                total = total - np.where((first <= tie.first) & (last >= tie.second), getattr(tie, name), 0.0)
            return total

        saved_before = np.concatenate([[0.0], np.cumsum(costs.levels.saved)])[firsts][:, None]
        self.micro_batches, self.recomputes_layers = micro_batches, False
        self.exact, self.compiled = costs.exact, (costs.law is not None)
        self.parameters = tied(costs.state.parameters, "parameter_bytes")
        # Replicas sum zeros for parameters without a gradient.
        self.gradients = tied(costs.gradients, "gradient_bytes") + sums(costs.state.idle) * (costs.bucket_bytes > 0)
        self.optimizer = tied(costs.state.optimizer, "optimizer_bytes")
        self.buffers, self.rewritten = sums(costs.state.buffers), sums(costs.state.rewritten)
        self.casts = tied(costs.state.casts, "cast_bytes")
        self.optimizer_peak = (
            sums(costs.state.optimizer_peak)
            if costs.optimizer_peaks_add
            else np.maximum(
                highest(costs.state.optimizer_peak[columns]),
                highest(np.where(last > first, costs.state.optimizer_boundary_peak[columns], 0.0)),
            )
        )
        self.output = np.broadcast_to(costs.boundaries.output[None, columns], self.buffers.shape)
        self.copied_input = costs.boundaries.copied_input[firsts][:, None]
        self.saved = (
            sums(costs.levels.saved)
            + costs.boundaries.unsaved_output[None, columns]
            - passing.unkept
            + self.copied_input
        )
        # The first stage reads slices of the mini-batch, which its caller holds for the whole step; other stages
        # receive into a buffer per micro-batch in flight, and send that buffer's gradient back.
        self.input = np.where(firsts > 0, costs.boundaries.input[firsts], 0.0)[:, None]
        self.data = micro_batches * (
            np.where(first == 0, costs.boundaries.input[0], 0.0) + np.where(is_last, costs.target, 0.0)
        )
        self.output_gradient = np.where(is_last, 0.0, costs.boundaries.output_gradient[None, columns])
        self.sent_output = np.where(is_last, 0.0, self.output)
        self.forward_only = np.broadcast_to(~costs.has_backward[None, columns], self.buffers.shape)
        # Of the model's own input there is none anyway.
        sent = np.where((firsts > 0) & costs.has_backward[firsts - 1], costs.boundaries.input_gradient[firsts], 0.0)
        self.input_gradient = sent[:, None]
        # What the stage received is counted as that, whichever of its layers it goes into.
        without_received = costs.levels.forward[columns] - passing.received_input(
            passing.unkept, costs.boundaries.unkept_input[columns]
        )
        self.forward = highest(without_received) - saved_before
        self.no_grad = highest(
            costs.levels.no_grad[columns] - passing.received_input(passing.all, costs.boundaries.input_alive[columns])
        )
        # The engine holds a stage's output until its backward is done, whether or not a layer keeps it so long. What
        # of it the stage received lies in its input.
        self.own_output = self.output - passing.all
        self.passes = bool(passing.all.any())
        casts_behind = costs.state.casts.sum() - np.cumsum(costs.state.casts)[None, columns]
        backward = highest_backward(costs.levels.backward, costs.levels.end_twice, "later") - saved_before
        self.backward = backward - casts_behind + self.output
        gradients_behind = costs.gradients.sum() - np.cumsum(costs.gradients)[None, columns]
        first_backward = (
            highest_backward(costs.levels.first_backward, costs.levels.end_twice_first, "first") - saved_before
        )
        # "again": of a micro-batch that is recomputed; what differs are gradients of autocast's copies.
        self.first_backward = self.first_recomputed = first_backward - gradients_behind + self.output
        if costs.exact and costs.state.casts.any():
            self._count_gradients_of_casts(
                costs,
                columns,
                saved_before,
                highest=highest,
                highest_backward=highest_backward,
                sums=sums,
            )
        self.transient = highest(np.maximum(costs.levels.forward, costs.levels.backward)[columns])
        self._count_buckets(costs, firsts, saved_before, gradients_behind, last=last)
        self._count_programs(costs, columns, firsts, highest=highest, sums=sums)

    def _count_buckets(
        self,
        costs: ChainCosts,
        firsts: NDArray[np.int64],
        saved_before: FloatArray,
        gradients_behind: FloatArray,
        *,
        last: NDArray[np.int64],
    ) -> None:
        """Of gradients on their way to other replicas: how many bytes, and the levels of the backwards they go out in.

        All gradients of a small stage go out together: not before the backward of its first layer that has any. Of a
        larger one, or under autocast, whose copies have gradients of their own, the highest level is a bound.
        """
        self.has_replicas = costs.bucket_bytes > 0
        self.bucket = np.minimum(costs.bucket_bytes, self.gradients)
        self.bucket_first, self.bucket_backward = self.first_backward, self.backward
        if not self.has_replicas or costs.state.casts.any():
            return
        trained = np.flatnonzero(costs.gradients > 0)
        at = np.append(trained, costs.num_layers - 1)[np.searchsorted(trained, firsts)]
        is_one = self.gradients <= costs.bucket_bytes
        level = costs.levels.first_backward[at][:, None] - saved_before - gradients_behind + self.output
        self.bucket_first = np.where(is_one, np.minimum(self.bucket_first, level), self.bucket_first)
        level = costs.levels.backward[at][:, None] - saved_before + self.output
        for tie in costs.ties:
            waits = (at[:, None] == tie.first) & (last >= tie.second)
            level = level + np.where(waits, tie.gradient_bytes, 0.0)
        self.bucket_backward = np.where(is_one, np.minimum(self.bucket_backward, level), self.bucket_backward)

    def _count_programs(
        self,
        costs: ChainCosts,
        columns: slice,
        firsts: NDArray[np.int64],
        *,
        highest: Callable[[FloatArray], FloatArray],
        sums: Callable[[FloatArray], FloatArray],
    ) -> None:
        """Levels within one program; those of a loop lie above all that it keeps, whatever is in front of a layer."""
        if costs.law is None:
            return
        self.narrowed = sums(costs.law.narrowed) + self.micro_batches * sums(costs.law.narrowed_input)
        self.padding = sums(costs.law.padding) + sums(costs.law.laid_out)
        self.waiting = sums(costs.law.waiting)
        self.forward, self.backward = highest(costs.levels.forward[columns]), highest(costs.levels.backward[columns])
        carried_before = np.concatenate([[0.0], np.cumsum(costs.law.carried)])[firsts][:, None]
        self.program = highest(costs.law.level[columns]) - carried_before

    def _count_gradients_of_casts(
        self,
        costs: ChainCosts,
        columns: slice,
        saved_before: FloatArray,
        *,
        highest: Callable[[FloatArray], FloatArray],
        highest_backward: Callable[[FloatArray, FloatArray], FloatArray],
        sums: Callable[[FloatArray], FloatArray],
    ) -> None:
        """They wait for the end of a backward, and there turn into gradients of parameters, which are twice as large.

        But for the micro-batch that made the copies: in its backward they turn into these at once.
        """
        waiting = highest(cast_gradient_peaks(costs)[columns])
        casts = sums(costs.state.casts)
        at_end = np.where(casts > 0, waiting + casts + self.own_output, 0.0)
        self.backward = np.maximum(self.backward, at_end)
        # If that micro-batch is recomputed, they wait, and gradients of parameters without a copy exist at once.
        others = np.maximum(costs.gradients - 2 * costs.state.casts, 0.0)
        through = np.cumsum(costs.state.casts + others)
        level = costs.levels.backward - np.cumsum(others) + others + others.sum()
        level = highest_backward(level, costs.levels.end_twice) - saved_before - through[-1] + through[None, columns]
        at_end = sums(costs.gradients) + waiting / 2
        self.first_recomputed = np.minimum(
            self.first_backward, np.maximum(level + self.output, at_end + self.own_output)
        )

    def recompute_layers(self, levels: StageLevels) -> None:
        """Recomputes single layers, in whole bytes; for one stage, in the last column."""
        for name, values in vars(self).items():
            if isinstance(values, np.ndarray):
                setattr(self, name, np.rint(values))
        # A copy of the input is part of the levels.
        self.copied_input = np.zeros_like(self.copied_input)
        shape = self.buffers.shape
        self.saved, self.forward = np.full(shape, levels.saved), np.full(shape, levels.forward)
        self.first_backward = self.bucket_first = np.full(shape, levels.first_backward)
        self.backward = self.bucket_backward = self.transient = np.full(shape, levels.backward)
        self.recomputes_layers = True

    def forward_moment(self, gradients: FloatArray, in_flight: FloatArray, working: FloatArray) -> _Moment:
        return _Moment(gradients, self.casts, in_flight, np.zeros_like(working), working)

    def first_backward_moment(self, in_flight: FloatArray, working: FloatArray) -> _Moment:
        # Gradients exist in part; the items show them as far as they are part of what is alive.
        gradients = np.minimum(self.gradients, working)
        return _Moment(gradients, self.casts, in_flight, self.output_gradient, working - gradients)

    def backward_moment(self, in_flight: FloatArray, working: FloatArray, sent: FloatArray) -> _Moment:
        return _Moment(self.gradients, self.casts, in_flight, self.output_gradient + sent, working)

    def optimizer_moment(self) -> _Moment:
        # Autocast is left before the optimizer's step, and its copies of the weights with it.
        nothing = np.zeros_like(self.gradients)
        return _Moment(self.gradients, nothing, nothing, nothing, self.optimizer_peak)


def _moments(s: _Stages, in_flight: int, recompute: Recompute) -> Iterator[_Moment]:
    """The moments that can hold the peak, from exact records (GPipe where all M are in flight, else 1F1B)."""
    nothing = np.zeros_like(s.saved)
    full = s.input + s.saved  # a waiting micro-batch that kept its activations
    running = s.input + s.own_output  # one that dropped them, and is recomputed
    edges = running + s.rewritten  # a waiting one
    waiting = in_flight - 1  # beside the one being computed
    gpipe = in_flight == s.micro_batches
    # 1F1B goes on with forwards after the first backward: gradients are there.
    gradients = nothing if gpipe else s.gradients
    # GPipe waits for its sends at the end of the phase only: until then their handles hold what was sent. 1F1B has
    # waited before the next backward, but for an input's gradient in the cool-down: a micro-batch less is there then.
    sent = s.input_gradient + s.sent_output if gpipe else nothing

    if recompute == "never":
        own = s.input + s.copied_input
        yield s.forward_moment(gradients, waiting * full + s.input + s.copied_input, s.forward)
        if gpipe:
            yield s.first_backward_moment(waiting * full + own, s.first_backward)
            if waiting > 0:
                yield s.backward_moment((waiting - 1) * full + own, s.backward, sent)
            if waiting > 1 and s.passes:
                # What passes by is held once while it waits, and twice where it was sent.
                yield s.backward_moment(own, s.backward, waiting * sent)
        else:
            yield s.backward_moment(waiting * full + own, s.backward, sent)
    else:
        # With `except-last` one of the waiting micro-batches, the last one, kept its activations.
        kept = full - edges if recompute == "except-last" and waiting > 0 else nothing
        if not gpipe:
            kept = np.maximum(kept, 0.0)  # there are as many in flight before it comes
        # The recomputed output, part of both levels, lives beside the one that was sent.
        again_first = np.maximum(s.forward + s.rewritten, s.first_recomputed) + s.copied_input
        again = np.maximum(s.forward + s.rewritten, s.backward) + s.copied_input
        last_forward = s.no_grad + s.rewritten
        if recompute == "except-last":
            last_forward = s.forward if gpipe else np.maximum(s.forward, last_forward)
        yield s.forward_moment(gradients, waiting * edges + s.input, last_forward + s.copied_input)
        if gpipe:
            yield s.first_backward_moment(waiting * edges + kept + running, again_first)
            if waiting > 0:
                only_last_left = recompute == "except-last" and waiting == 1
                held = (waiting - 1) * edges + (nothing if only_last_left else kept)
                yield s.backward_moment(held + running, again, sent)
            if waiting > 1 and s.passes:
                last_waits = np.maximum(edges + kept, sent)
                yield s.backward_moment(last_waits + running, again, (waiting - 1) * sent)
        else:
            yield s.backward_moment(waiting * edges + kept + running, again, sent)


def _bucket_moments(s: _Stages, in_flight: int, recompute: Recompute) -> Iterator[_Moment]:
    """The last backward, in which gradients go out to other replicas: those of one message are there twice."""
    if not s.has_replicas:
        return
    if not s.exact:
        for moment in (_one_program if s.compiled else _additive)(s, in_flight, recompute):
            yield moment._replace(transfer=moment.transfer + s.bucket)
        return
    held, first, later = s.input + s.copied_input, s.bucket_first, s.bucket_backward
    if recompute == "always":
        # Gradients go out when the forward again is over: it does not count here.
        held = s.input + s.own_output + s.copied_input
    if s.micro_batches == 1:
        moment = s.first_backward_moment(held, first)
    else:
        sends = (s.micro_batches - 1) * s.sent_output if in_flight == s.micro_batches else np.zeros_like(held)
        inputs = (s.micro_batches - 1 if in_flight == s.micro_batches else 1) * s.input_gradient
        moment = s.backward_moment(held, later, sends + inputs)
    yield moment._replace(transfer=moment.transfer + s.bucket)


def _chunk_parts(s: _Stages, recompute: Recompute) -> ChunkParts:
    """From exact records; the same terms as in `_moments`."""
    own = s.input + s.copied_input
    gradient = np.where(s.forward_only, 0.0, s.output_gradient)
    full, running = s.input + s.saved, s.input + s.own_output
    edges = running + s.rewritten
    keeping = own + s.forward, own + s.backward + gradient
    if recompute == "never":
        forward, first, backward = keeping[0], own + s.first_backward + gradient, keeping[1]
    else:
        forward = own + s.no_grad + s.rewritten
        first = running + np.maximum(s.forward + s.rewritten, s.first_recomputed) + s.copied_input + gradient
        backward = running + np.maximum(s.forward + s.rewritten, s.backward) + s.copied_input + gradient
    last_keeps = recompute == "except-last"
    last_backward = keeping[1] if last_keeps else backward
    if s.has_replicas:
        last = (own if recompute != "always" else running + s.copied_input) + gradient + s.bucket
        last_backward = np.maximum(last_backward, last + s.bucket_backward)
        if s.micro_batches == 1:
            first = np.maximum(first, last + s.bucket_first)
    return ChunkParts(
        always=_whole_bytes(s.parameters, s.optimizer, s.buffers, s.data),
        gradients=s.gradients,
        casts=s.casts,
        held=full if recompute == "never" else edges,
        kept=np.maximum(full - edges, 0.0) if last_keeps else np.zeros_like(full),
        input=s.input,
        output_gradient=gradient,
        input_gradient=s.input_gradient,
        forward=forward,
        last_forward=keeping[0] if last_keeps else forward,
        first_backward=first,
        backward=backward,
        last_backward=last_backward,
        optimizer_step=s.optimizer_peak,
    )


def _additive_chunk_parts(s: _Stages, recompute: Recompute) -> ChunkParts:
    """Without exact records; the same terms as in `_additive`, whatever runs."""
    full, edges = s.input + s.saved, s.input + s.output + s.rewritten
    held = full if recompute == "never" else edges
    again = np.zeros_like(full) if recompute == "never" else s.saved
    running = held + again + s.transient + s.casts + s.output_gradient + s.input_gradient
    kept = np.maximum(full - edges, 0.0) if recompute == "except-last" else np.zeros_like(full)
    return ChunkParts(
        always=_whole_bytes(s.parameters, s.gradients, s.optimizer, s.buffers, s.data),
        gradients=np.zeros_like(full),
        casts=s.casts,
        held=held,
        kept=kept,
        input=s.input,
        output_gradient=s.output_gradient,
        input_gradient=s.input_gradient,
        forward=running,
        last_forward=running + kept,
        first_backward=running + (s.bucket if s.has_replicas and s.micro_batches == 1 else 0.0),
        backward=running,
        last_backward=running + kept + (s.bucket if s.has_replicas else 0.0),
        optimizer_step=s.optimizer_peak,
    )


def _whole_bytes(*items: FloatArray) -> FloatArray:
    total = np.zeros_like(items[0])
    for item in items:
        total = total + np.rint(item)
    return total


def _additive(s: _Stages, in_flight: int, recompute: Recompute) -> Iterator[_Moment]:
    """The bound without exact records: everything held at once plus the largest transient of any layer."""
    full = s.input + s.saved
    edges = s.input + s.output + s.rewritten
    transient = s.transient + s.casts  # the gradients of these wait for the end of a backward
    if recompute == "never":
        yield s.backward_moment(in_flight * full, transient, s.input_gradient)
    else:
        kept = np.maximum(full - edges, 0.0) if recompute == "except-last" and in_flight > 1 else np.zeros_like(full)
        yield s.backward_moment(in_flight * edges + kept, s.saved + transient, s.input_gradient)


def _one_program(s: _Stages, in_flight: int, recompute: Recompute) -> Iterator[_Moment]:
    """What a stage takes that is compiled as one program, gradients and copies of weights there from begin to end.

    A loop over micro-batches has an array with a place for each of them for everything that is kept. Its forward makes
    what one of them keeps before it puts that into its place, so there is one more of it, in its own shape. A
    micro-batch that is alone, or is computed again, is no loop's business: forward and backward are one piece, in which
    the compiler keeps what it likes and lets go of it as the backward goes.
    """
    full, edges = s.input + s.saved, s.input + s.output
    looped = s.padding + (s.narrowed if in_flight > 1 else 0.0)
    if recompute != "never":
        kept = np.maximum(full - edges, 0.0) if recompute == "except-last" and in_flight > 1 else np.zeros_like(full)
        yield s.backward_moment(in_flight * edges + kept, s.program + looped, s.input_gradient)
    elif in_flight == 1 and not s.recomputes_layers:
        yield s.backward_moment(s.input, s.program + looped, s.input_gradient)
    else:
        copied = s.saved + s.waiting if in_flight > 1 else np.zeros_like(full)
        # Not all of it waits to be put away, so that copies of weights find room.
        yield s.forward_moment(s.gradients, in_flight * full, copied + s.forward + s.padding)
        yield s.backward_moment(in_flight * full, s.backward + looped, s.input_gradient)
