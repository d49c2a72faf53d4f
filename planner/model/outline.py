"""A model's outline: how one forward went, where it is cut into layers, and what crosses the cuts.

It names modules and tensors and holds none, so the outline of one instance of a model serves every other. Two forwards,
of batches of different size, tell how the shapes of all tensors grow with the batch.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.core.values.profile import Granularity
from planner.model.attributes import Change
from planner.model.cuts import Cuts
from planner.model.layout import dense_strides
from planner.model.leaves import Constant, counted
from planner.model.nests import put_together, take_apart
from planner.model.recording import END, Call, Join, Leaf, Recording, Value, record
from planner.model.refusals import raised_by

__all__ = ["SIZES", "Outline", "outline_of"]

_MANY_PARTS = 2
"""So many tensors more than there need be are worth a word."""

_MANY_PREVENTED = 0.25
"""Of all places where the model could be cut, so large a part that cannot be is worth a word."""

SIZES = (2, 4)
"""Samples in the two batches that are run. Not 1, which batch normalization and broadcasting treat in their own way."""

_Shapes = dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
"""By value: the shapes for either batch."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """See above."""

    recording: Recording
    shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]]
    """By value: its shape in a batch of either size."""
    cuts: tuple[int, ...]
    names: tuple[str, ...]
    """Of the layers, one more than there are cuts."""
    ends: tuple[str, ...]
    """By cut: what the layer in front of it is called where nothing is left uncut."""
    modules: tuple[tuple[str, ...], ...]
    """By layer: paths of the largest modules that run as a whole in it, in order."""
    holds: tuple[frozenset[str], ...]
    """By layer: the parameters and buffers that it needs."""
    crossings: tuple[tuple[int, ...], ...]
    """By cut: the values that cross it."""
    repeated_holds: tuple[frozenset[str], ...]
    """By cut: parameters and buffers that code in front of it, which is run again behind it, touches."""
    overwritten: tuple[frozenset[int], ...]
    """By cut: storages that code in front of it, which is run again behind it, writes into."""
    writes: tuple[bool, ...]
    """By layer: whether it writes into a tensor that it receives."""
    aliases: tuple[bool, ...]
    """By layer: whether what it passes on shares memory with what it received."""
    parts: tuple[tuple[int, int], ...]
    """By cut: of how many tensors it is that nothing behind it reads them, but only what is computed from them in front
    and again behind; and how many results that has."""
    prevented: str
    """Why there are few cuts; empty if there is one nearly wherever there could be."""
    joins: tuple[Join, ...]
    """What the code between modules makes that crosses the cuts behind it as it is."""
    missing: tuple[frozenset[int], ...]
    """By cut: leaves of the model's output that the loss does not read and that cannot be had behind it."""

    @property
    def widened(self) -> str:
        """Where most tensors cross for the sake of code between modules that is run again; empty if few do."""
        layer = max(range(len(self.parts)), key=lambda n: self.parts[n][0] - self.parts[n][1])
        parts, results = self.parts[layer]
        if parts - results < _MANY_PARTS:
            return ""
        return (
            f'{parts} tensors cross the boundary behind "{self.names[layer]}" only for the model\'s own code between '
            f"its modules, which makes {results} of them and does so again in the next stage (as "
            "`x = torch.cat([x, block(x)])` does); do that at the end of a module's forward (`x = block(x)`), and its "
            "result crosses instead"
        )

    def times(self, first: int, end: int) -> tuple[int, int]:
        """Between which times layers `first`..`end - 1` run."""
        return (self.cuts[first - 1] if first else 0), (self.cuts[end - 1] if end <= len(self.cuts) else END)

    def received(self, layer: int) -> tuple[int, ...]:
        """The values in front of a layer but the first."""
        return self.crossings[layer - 1]

    def shape(self, value: int, size: int) -> tuple[int, ...]:
        """Of a value, in a batch of `size` samples."""
        pairs = zip(*self.shapes[value], strict=True)
        return tuple(max(0, a + (b - a) * (size - SIZES[0]) // (SIZES[1] - SIZES[0])) for a, b in pairs)

    def size_of(self, values: Sequence[int], tensors: Sequence[Tensor]) -> int:
        """How many samples there are, by the shapes of some values."""
        for value, tensor in zip(values, tensors, strict=True):
            for a, b, given in zip(*self.shapes[value], tensor.shape, strict=True):
                if a != b:
                    return SIZES[0] + (given - a) * (SIZES[1] - SIZES[0]) // (b - a)
        return SIZES[0]

    def boundary(self, layer: int, size: int) -> tuple[Tensor, ...]:
        """What is received by a layer but the first, on the meta device."""
        return tuple(self._meta(value, size) for value in self.received(layer))

    @property
    def described(self) -> list[Any]:
        """What crosses each cut, for a digest."""
        return [[[self.shapes[v], str(self.recording.values[v][1].dtype)] for v in values] for values in self.crossings]

    def _meta(self, value: int, size: int) -> Tensor:
        meta = self.recording.values[value][1]
        recorded = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="meta")
        shape = self.shape(value, size)
        strides = dense_strides(shape, recorded)
        return torch.empty_strided(shape, strides, dtype=meta.dtype, device="meta", requires_grad=meta.requires_grad)


def outline_of(
    model: nn.Module,
    example_inputs: Callable[[int], Any],
    granularity: Granularity,
    loss_of: Callable[[int], Callable[[Any], object]] | None,
    *,
    uncut: Sequence[str] = (),
) -> Outline:
    """The outline of `model`.

    Args:
        model: Any module.
        example_inputs: A batch of so many samples.
        granularity: How finely it is cut.
        loss_of: For so many samples, the loss of what the model returns for them; without it, all of that counts as
            read.
        uncut: Names of layers behind which it is not cut, though it could be.

    Raises:
        ModelError: It cannot be cut anywhere, or does something else for other batch sizes.
    """
    recording = _recorded(model, example_inputs, SIZES[0], loss_of)
    other = _recorded(model, example_inputs, SIZES[1])
    made = _made_for_both(recording, other)
    recording.made = list(made)
    cuts = Cuts(recording, model)
    chosen, problems = cuts.choose(granularity)
    shapes, unlike = _shapes(recording, other, chosen)
    shapes |= {join.value: made[join] for join in cuts.joins}
    chosen = _without(
        _depending(cuts, chosen, shapes, unlike, _names(model, _spans(recording, chosen))), chosen, problems
    )
    ends = _names(model, _spans(recording, chosen))[:-1]
    if uncut:
        chosen = [cut for cut, name in zip(chosen, ends, strict=True) if name not in uncut]
        ends = tuple(name for name in ends if name not in uncut)
        problems.append(f"the stages behind {', '.join(uncut)} do not compute what the model does")
    if not chosen:
        why = f": {problems[0]}" if problems else ", it has a single layer with parameters"
        raise ModelError(
            f"the model ({type(model).__name__}) cannot be cut{why}",
            hint="split it into modules that return what the following ones need, such as blocks in an nn.ModuleList",
        )
    edges = [0, *chosen, END]
    spans = list(pairwise(edges))
    crossings = tuple(cuts.crossing(cut).values for cut in chosen)
    holds = [cuts.holds(*span) for span in spans]
    modules = [_modules(recording, span) for span in spans]
    names = _names(model, modules)
    _add_unread(holds, recording, model, spans)
    return Outline(
        recording=recording,
        shapes=shapes,
        cuts=tuple(chosen),
        names=names,
        ends=ends,
        modules=tuple(modules),
        holds=tuple(holds),
        crossings=crossings,
        repeated_holds=tuple(_repeated_holds(cuts, cut) for cut in chosen),
        overwritten=tuple(_overwritten(cuts, cut) for cut in chosen),
        writes=tuple(_writes(recording, span, _storages(recording, span[0], crossings, chosen)) for span in spans),
        aliases=tuple(
            bool(
                set(_storages(recording, first, crossings, chosen)) & set(_storages(recording, end, crossings, chosen))
            )
            for first, end in spans
        ),
        parts=tuple(map(cuts.parts, chosen)),
        joins=cuts.joins,
        prevented=_prevented(problems, cuts.num_tried),
        missing=tuple(
            cuts.missing_outputs(cut, frozenset[str]().union(*holds[n:])) for n, cut in enumerate(chosen, start=1)
        ),
    )


# Private functions


def _recorded(
    model: nn.Module,
    example_inputs: Callable[[int], Any],
    size: int,
    loss_of: Callable[[int], Callable[[Any], object]] | None = None,
) -> Recording:
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same data every time, and so the same digest
        inputs = example_inputs(size)
        loss = None if loss_of is None else loss_of(size)
    try:
        with contextlib.suppress(Exception):  # whatever it is, on real values it may be none, or comes again
            return record(model, inputs, loss_of=loss, ghosts=True)
        return record(model, _beside(model, inputs), loss_of=loss, ghosts=False)
    except (Exception, SystemExit) as error:
        told = raised_by(f"the model ({type(model).__name__})", error, f"an example batch of {size}")
        if told is error:
            raise
        raise told from error


def _beside(model: nn.Module, inputs: Any) -> Any:
    """The inputs on the device of the model."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    leaves, nest = take_apart(inputs)
    return put_together((leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves), nest)


def _shapes(recording: Recording, other: Recording, cuts: Sequence[int]) -> tuple[_Shapes, list[Call]]:
    """Of what comes into sight in modules that a cut goes through; and those that call others for another batch."""
    unlike: list[Call] = []
    shapes = _paired("the model's input", recording.inputs, other.inputs)
    todo = [(0, 0)]  # their numbers differ behind a call that makes more calls for another batch
    while todo:
        one, two = (run.calls[number] for run, number in zip((recording, other), todo.pop(), strict=True))
        if [recording.calls[c].path for c in one.children] != [other.calls[c].path for c in two.children]:
            unlike.append(one)
            continue
        for child, its in zip(one.children, two.children, strict=True):
            call = recording.calls[child]
            with contextlib.suppress(ModelError):
                shapes = _paired(call.path, call.leaves, other.calls[its].leaves) | shapes
                call.leaves = _counted(call.leaves, other.calls[its].leaves)
            call.changes, paired = _left_behind(call, other.calls[its])
            shapes = paired | shapes
            if any(call.enter < cut <= call.exit for cut in cuts):
                todo.append((child, its))
    if recording.unread:
        with contextlib.suppress(ModelError):  # it may return what it likes, but then nothing stands in for that
            shapes = _paired("the model", recording.calls[0].leaves, other.calls[0].leaves) | shapes
    return shapes, unlike


def _paired(
    path: str, leaves: Sequence[Leaf], others: Sequence[Leaf]
) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    if len(leaves) != len(others):
        raise _returns_else(path)
    pairs = [(a, b) for a, b in zip(leaves, others, strict=True) if isinstance(a, Value)]
    if any(not isinstance(b, Value) or len(a.meta.shape) != len(b.meta.shape) for a, b in pairs):
        raise _returns_else(path)
    return {a.number: (a.meta.shape, b.meta.shape) for a, b in pairs if isinstance(b, Value)}


def _prevented(problems: Sequence[str], num_tried: int) -> str:
    if len(problems) < _MANY_PREVENTED * num_tried:
        return ""
    return (
        f"the model cannot be cut behind {len(problems)} of {num_tried} modules ({problems[0]}): "
        "layers are larger than they need be; let modules return what is used behind them"
    )


def _depending(
    cuts: Cuts, chosen: Sequence[int], shapes: _Shapes, unlike: Sequence[Call], names: Sequence[str]
) -> dict[int, ModelError]:
    """The cuts that go through no fixed path, or that something crosses whose shape depends on the data; and why."""
    found: dict[int, ModelError] = {}
    for name, cut in zip(names, chosen, strict=False):
        through = next((call.path for call in unlike if call.enter < cut <= call.exit), None)
        error = _depends(name, cuts.crossing(cut).values, shapes) if through is None else _changes(through)
        if error is not None:
            found[cut] = error
    return found


def _without(errors: dict[int, ModelError], chosen: Sequence[int], problems: list[str]) -> list[int]:
    """The cuts that are none of these; `ModelError` if there is none, and others were."""
    left = [cut for cut in chosen if cut not in errors]
    if errors and not left:
        raise next(iter(errors.values()))
    problems.extend(error.message for error in errors.values())
    return left


def _depends(name: str, values: Sequence[int], shapes: _Shapes) -> ModelError | None:
    """Why no boundary can be behind a layer: what crosses it depends on the data."""
    if any(value not in shapes for value in values):
        return ModelError(
            f'what crosses the boundary behind "{name}" is something else for another batch size',
            hint="a pipeline needs the same tensors for every batch",
        )
    for one, two in (shapes[value] for value in values):
        if not _grows(one, two):
            return ModelError(
                f'what crosses the boundary behind "{name}" has shape {list(one)} for {SIZES[0]} samples and '
                f"{list(two)} for {SIZES[1]}: it depends on the data",
                hint="let shapes follow from the batch size alone: pad to a fixed length, in place of "
                "`pack_padded_sequence`, a choice by mask or routing between modules",
            )
    return None


def _changes(path: str) -> ModelError:
    return ModelError(
        f'"{path or "the model"}" calls other modules for another batch size: it takes no fixed path',
        hint="a pipeline needs the same layers for every batch",
    )


def _grows(one: tuple[int, ...], two: tuple[int, ...]) -> bool:
    """Whether a shape is so much larger for every sample more."""
    step = SIZES[1] - SIZES[0]
    growth = [b - a for a, b in zip(one, two, strict=True)]
    return all(g % step == 0 and 0 <= g // step * SIZES[0] <= a for a, g in zip(one, growth, strict=True))


def _made_for_both(recording: Recording, other: Recording) -> dict[Join, tuple[tuple[int, ...], tuple[int, ...]]]:
    """What may be a join for batches of either size; and its shapes."""
    known = {place: other.values[join.value][1].shape for place, join in _placed(other)}
    made = {}
    for place, join in _placed(recording):
        shape, its = recording.values[join.value][1].shape, known.get(place, ())
        if len(shape) == len(its) and _grows(shape, its):
            made[join] = shape, its
    return made


def _placed(recording: Recording) -> Iterator[tuple[tuple[Any, ...], Join]]:
    """What may be a join, by where it is; numbers of calls are others where a module calls more for another batch."""
    places: list[tuple[int, ...]] = [()] * len(recording.calls)
    for call in recording.calls:
        for n, child in enumerate(call.children):
            places[child] = (*places[call.number], n)
    for join in recording.made:
        yield (places[join.call], join.gap, join.called), join


def _counted(leaves: Sequence[Leaf], others: Sequence[Leaf]) -> tuple[Leaf, ...]:
    return tuple(counted(leaf, other, SIZES) for leaf, other in zip(leaves, others, strict=True))


def _left_behind(
    call: Call, other: Call
) -> tuple[tuple[Change, ...], dict[int, tuple[tuple[int, ...], tuple[int, ...]]]]:
    """What a call leaves in attributes for either batch; and of the tensors among that the shapes."""
    known = {(change.path, change.keys, change.kind, change.nest): change.leaves for change in other.changes}
    kept: list[Change] = []
    shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for change in call.changes:
        others = known.get((change.path, change.keys, change.kind, change.nest), ())
        leaves = _counted(change.leaves, others) if others else ()
        # A number that depends on the data is for somebody to look at: nothing is known of it behind a cut.
        if not leaves or any(isinstance(a, Constant) and a != b for a, b in zip(leaves, others, strict=True)):
            continue
        with contextlib.suppress(ModelError):
            shapes |= _paired(call.path, leaves, others)
            kept.append(replace(change, leaves=leaves))
    return tuple(kept), shapes


def _returns_else(path: str) -> ModelError:
    return ModelError(
        f'"{path}" returns something of another structure for another batch size',
        hint="a pipeline needs the same tensors for every batch",
    )


def _storages(recording: Recording, time: int, crossings: Sequence[tuple[int, ...]], cuts: Sequence[int]) -> list[int]:
    """Of the tensors that are there at a cut, at the begin or at the end."""
    if time == 0:
        return [recording.values[leaf.number][0] for leaf in recording.inputs if isinstance(leaf, Value)]
    if time == END:
        versions = (data for _, data in recording.flow.nodes(data=True) if data["uses"] and data["uses"][-1] == END)
        return [data["storage"] for data in versions]
    return [recording.values[value][0] for value in crossings[cuts.index(time)]]


def _writes(recording: Recording, span: tuple[int, int], received: Sequence[int]) -> bool:
    inside = (o for o in recording.operators if span[0] <= o.time < span[1])
    return any(recording.flow.nodes[version]["storage"] in received for o in inside for version in o.writes)


def _repeated_holds(cuts: Cuts, cut: int) -> frozenset[str]:
    return frozenset(
        name
        for number, operator in enumerate(cuts.recording.operators)
        if operator.holds and cuts.repeated(number, cut)
        for name in operator.holds
    )


def _overwritten(cuts: Cuts, cut: int) -> frozenset[int]:
    flow = cuts.recording.flow.nodes
    return frozenset(
        flow[version]["storage"]
        for number, operator in enumerate(cuts.recording.operators)
        if operator.writes and cuts.repeated(number, cut)
        for version in operator.writes
    )


def _modules(recording: Recording, span: tuple[int, int]) -> tuple[str, ...]:
    whole = [call for call in recording.calls[1:] if _is_whole(call, span)]
    tops = [call.path for call in whole if not _is_whole(recording.calls[call.parent], span)]
    return tuple(dict.fromkeys(tops))


def _spans(recording: Recording, cuts: Sequence[int]) -> list[tuple[str, ...]]:
    return [_modules(recording, span) for span in pairwise([0, *cuts, END])]


def _names(model: nn.Module, modules: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """A layer is called after the module in it with the most parameters."""
    known = dict(model.named_modules(remove_duplicate=False))
    counts: dict[str, int] = {}
    names = []
    for paths in modules:
        sizes = {path: sum(p.numel() for p in known[path].parameters()) for path in paths}
        name = max(sizes, key=sizes.__getitem__, default="rest")
        counts[name] = counts.get(name, 0) + 1
        names.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return tuple(names)


def _is_whole(call: Call, span: tuple[int, int]) -> bool:
    return call.number > 0 and span[0] <= call.enter and call.exit < span[1]


def _add_unread(
    holds: list[frozenset[str]], recording: Recording, model: nn.Module, spans: Sequence[tuple[int, int]]
) -> None:
    """Parameters and buffers that this forward did not read (of experts not chosen) go to where their module is."""
    read = frozenset(name for names in holds for name in names)
    known = {id(tensor) for name, tensor in _named_tensors(model) if name in read}
    where: dict[str, int] = {}
    for n, span in enumerate(spans):
        for call in recording.calls[1:]:
            if span[0] <= call.enter < span[1]:
                where.setdefault(call.path, n)
    for name, tensor in _named_tensors(model):
        if name in read or id(tensor) in known:
            continue
        path = name.rpartition(".")[0]
        while path and path not in where:
            path = path.rpartition(".")[0]
        n = where.get(path, 0)
        holds[n] |= {name}
        known.add(id(tensor))


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
