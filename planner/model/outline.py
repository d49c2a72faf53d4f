"""A model's outline: one recorded forward, the cuts into layers, and the tensors that cross the cuts.

An outline refers to modules and tensors by name and number only, so the outline of one instance of a model serves all
others. Two recorded forwards, with different batch sizes, show how the shapes of all tensors grow with the batch.

    layer                 0           1           2
    position in forward   0 ... cuts[0] ... cuts[1] ... END
    tensors that cross      crossings[0]  crossings[1]
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.core.values.profile import Granularity
from planner.model.calling import is_compiled
from planner.model.cuts import PossibleCuts
from planner.model.growth import (
    SIZES,
    Shapes,
    cut_errors,
    sendable_results,
    shapes_in_both_recordings,
)
from planner.model.layout import meta_tensor_like
from planner.model.leaves import TensorLeaf
from planner.model.nests import flatten, unflatten
from planner.model.recorder import record
from planner.model.recording import END, FunctionResult, ModuleCall, Recording
from planner.model.refusals import explain_error
from planner.model.seeding import seeded_draws

_Span = tuple[int, int]
"""Positions in the recorded forward where a layer begins (0 for the first) and ends (`END` for the last layer)."""

_MANY_EXTRA_TENSORS = 2
"""Smallest number of extra tensors for which the user gets a note.

The number of extra tensors is the number sent only for repeated code, minus the number of results of this code.
"""

_MANY_PREVENTED = 0.25
"""Smallest share of prevented cuts, among tried cuts, for which the user gets a note."""


@dataclass(frozen=True, kw_only=True)
class ModelOutline:
    """Cuts of a recorded model into layers, and the tensors that cross the cuts."""

    recording: Recording
    shapes: Shapes
    """Shapes of each tensor in the two recorded batches."""
    cuts: tuple[int, ...]
    """Positions of the cuts in the recorded forward, in order."""
    names: tuple[str, ...]
    """Names of the layers; there is one layer more than there are cuts."""
    boundary_names: tuple[str, ...]
    """Name of each cut, as in the option `uncut`. The name does not change if other cuts are removed."""
    modules: tuple[tuple[str, ...], ...]
    """For each layer, the paths of the largest modules that run completely in the layer, in order."""
    model_tensors: tuple[frozenset[str], ...]
    """Parameters and buffers that each layer needs."""
    crossings: tuple[tuple[int, ...], ...]
    """For each cut, the indices in `Recording.values` of the tensors that cross it."""
    repeated_model_tensors: tuple[frozenset[str], ...]
    """For each cut: parameters and buffers that are read by code that runs before the cut and again after the cut."""
    overwritten: tuple[frozenset[int], ...]
    """For each cut: storages that are written by code that runs before the cut and again after the cut."""
    writes: tuple[bool, ...]
    """True for each layer that writes into a received tensor."""
    aliases: tuple[bool, ...]
    """True for each layer that sends a tensor in the same memory as a received one."""
    repeated_code_counts: tuple[tuple[int, int], ...]
    """For each cut: number of tensors that are sent only for repeated code, and number of results of this code."""
    note_on_missing_cuts: str
    """Note that many cuts are not possible, with a reason; empty if nearly all useful cuts are possible."""
    sent_results: tuple[FunctionResult, ...]
    """Results of the model's own code that may be sent across cuts (`planner.model.sent_results`)."""
    missing: tuple[frozenset[int], ...]
    """For each cut, the leaves of the model's output that the loss does not read and later stages cannot compute."""

    @property
    def note_on_repeated_code(self) -> str:
        """Note for the user if code that runs both before and after a cut needs many extra tensors; else empty."""
        counts = self.repeated_code_counts
        layer = max(range(len(counts)), key=lambda n: counts[n][0] - counts[n][1])
        parts, results = counts[layer]
        if parts - results < _MANY_EXTRA_TENSORS:
            return ""
        return (
            f'{parts} tensors cross the boundary after "{self.names[layer]}" only for the model\'s own code between '
            f"its modules, which makes {results} of them and does so again in the next stage (as "
            "`x = torch.cat([x, block(x)])` does); do that at the end of a module's forward (`x = block(x)`), so that "
            "only its result is sent"
        )

    def start_and_end(self, first: int, end: int) -> tuple[int, int]:
        """Return the positions in the recorded forward at which layer `first` begins and layer `end - 1` ends."""
        return (self.cuts[first - 1] if first else 0), (self.cuts[end - 1] if end <= len(self.cuts) else END)

    def received(self, layer: int) -> tuple[int, ...]:
        """Return the indices in `Recording.values` of the tensors that `layer` receives (not for the first layer)."""
        return self.crossings[layer - 1]

    def shape_of(self, index: int, batch_size: int) -> tuple[int, ...]:
        """Return the shape of the tensor `Recording.values[index]` in a batch of `batch_size` samples."""
        added, step = batch_size - SIZES[0], SIZES[1] - SIZES[0]
        return tuple(max(0, a + (b - a) * added // step) for a, b in zip(*self.shapes[index], strict=True))

    def batch_size_of(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> int:
        """Return the number of samples in a batch, from some tensors and their indices in `Recording.values`."""
        for index, tensor in zip(indices, tensors, strict=True):
            # Only a dimension that grows with the batch determines the size; those of a common mask are constant.
            for a, b, length in zip(*self.shapes[index], tensor.shape, strict=True):
                if a != b:
                    # This is the formula of `shape_of`, solved for the number of samples.
                    return SIZES[0] + (length - a) * (SIZES[1] - SIZES[0]) // (b - a)
        return SIZES[0]

    def meta_inputs(self, layer: int, batch_size: int) -> tuple[Tensor, ...]:
        """Return meta tensors like the inputs of `layer` for `batch_size` samples (not for the first layer)."""
        return tuple(self._meta(value, batch_size) for value in self.received(layer))

    @property
    def crossing_shapes(self) -> list[Any]:
        """Shapes and dtypes of the tensors that cross each cut, for a digest."""
        return [[[self.shapes[v], str(self.recording.values[v][1].dtype)] for v in values] for values in self.crossings]

    def _meta(self, value: int, size: int) -> Tensor:
        meta = self.recording.values[value][1]
        recorded = torch.empty_strided(
            meta.shape, meta.stride, dtype=meta.dtype, device="meta", requires_grad=meta.requires_grad
        )
        # A tensor is sent without gaps, with its dimensions in their recorded order in memory.
        return meta_tensor_like(recorded, self.shape_of(value, size))


def outline_of(
    model: nn.Module,
    example_inputs: Callable[[int], Any],
    granularity: Granularity,
    loss_of: Callable[[int], Callable[[Any], object]] | None,
    *,
    uncut: Sequence[str] = (),
) -> ModelOutline:
    """Return the outline of a model: record two forwards and choose the cuts.

    Args:
        model: The model.
        example_inputs: Function from a number of samples to inputs.
        granularity: `coarse` for about one layer per block, `fine` for parts of blocks as well.
        loss_of: Function from a number of samples to a function that computes the loss from the model's output. If it
            is None, all outputs count as read by the loss.
        uncut: Names of layers after which the model is not cut.

    Raises:
        ModelError: The model cannot be cut anywhere, or its code depends on the batch size.
    """
    recording = _recorded(model, example_inputs, SIZES[0], loss_of)
    other = _recorded(model, example_inputs, SIZES[1])
    candidates = sendable_results(recording, other)
    # A result is sent for every batch size, so a candidate must occur in both recordings.
    recording.candidates = list(candidates)
    cuts = PossibleCuts(recording, model)
    chosen, problems = cuts.choose(granularity)
    shapes, varying = shapes_in_both_recordings(recording, other, chosen)
    # No call returns these results, so their shapes are added here.
    shapes |= {result.value: candidates[result] for result in cuts.sent_results}
    crossings = ((cut, name, cuts.crossing(cut).values) for cut, name in _named_cuts(recording, model, chosen))
    chosen = _without_errors(cut_errors(crossings, shapes, varying), chosen, problems)
    # These names are those before `uncut` removes cuts, because `uncut` refers to them.
    ends = [(cut, name) for cut, name in _named_cuts(recording, model, chosen) if name not in uncut]
    if uncut:
        problems.append(f"the stages after {', '.join(uncut)} do not train as the model does")
    if not ends:
        why = f": {problems[0]}" if problems else ", it has a single layer with parameters"
        compiled = [path for path, module in model.named_modules() if is_compiled(module)]
        hint = "split it into modules that return what the following ones need, such as blocks in an nn.ModuleList"
        if compiled:
            hint = (
                f'a compiled module is not cut: compile the blocks of "{compiled[0]}" instead, or leave compilation out'
            )
        raise ModelError(f"the model ({type(model).__name__}) cannot be cut{why}", hint=hint)
    return _outline_of_cuts(cuts, model, ends, shapes, prevented=_prevented(problems, cuts.num_tried))


def _outline_of_cuts(
    cuts: PossibleCuts, model: nn.Module, ends: Sequence[tuple[int, str]], shapes: Shapes, *, prevented: str
) -> ModelOutline:
    recording, chosen = cuts.recording, tuple(cut for cut, _ in ends)
    spans = list(pairwise((0, *chosen, END)))
    crossings = tuple(cuts.crossing(cut).values for cut in chosen)
    inputs = tuple(leaf.number for leaf in recording.inputs if isinstance(leaf, TensorLeaf))
    # The uses of a version are in order, and no use is later than `END`.
    outputs = {data["storage"] for data in recording.flow.nodes.values() if data["uses"] and data["uses"][-1] == END}
    # Storages of the model's inputs, of the tensors that cross each cut, and of the outputs.
    storages = [*({recording.values[n][0] for n in values} for values in (inputs, *crossings)), outputs]
    modules = tuple(_modules_in(recording, span) for span in spans)
    repeated = [_repeated_reads_and_writes(cuts, cut) for cut in chosen]
    model_tensors = _assign_unread_tensors([cuts.model_tensors(*span) for span in spans], recording, model, spans)
    return ModelOutline(
        recording=recording,
        shapes=shapes,
        cuts=chosen,
        names=_layer_names(model, modules),
        boundary_names=tuple(name for _, name in ends),
        modules=modules,
        model_tensors=model_tensors,
        crossings=crossings,
        repeated_model_tensors=tuple(names for names, _ in repeated),
        overwritten=tuple(written for _, written in repeated),
        writes=tuple(
            _writes_into(recording, span, received) for span, received in zip(spans, storages[:-1], strict=True)
        ),
        aliases=tuple(bool(received & passed_on) for received, passed_on in pairwise(storages)),
        repeated_code_counts=tuple(map(cuts.count_operands_and_results, chosen)),
        sent_results=cuts.sent_results,
        note_on_missing_cuts=prevented,
        missing=tuple(
            cuts.missing_outputs(cut, frozenset[str]().union(*model_tensors[layer:]))
            for layer, cut in enumerate(chosen, 1)
        ),
    )


def _named_cuts(recording: Recording, model: nn.Module, cuts: Sequence[int]) -> list[tuple[int, str]]:
    spans = pairwise((0, *cuts, END))
    return list(zip(cuts, _layer_names(model, (_modules_in(recording, span) for span in spans)), strict=False))


def _recorded(
    model: nn.Module,
    example_inputs: Callable[[int], Any],
    size: int,
    loss_of: Callable[[int], Callable[[Any], object]] | None = None,
) -> Recording:
    with seeded_draws(0):  # equal data in every process, for equal digests
        inputs = example_inputs(size)
        loss = None if loss_of is None else loss_of(size)
    try:
        # With ghosts, a forward needs hardly any memory and time, whatever the size of the model.
        with contextlib.suppress(Exception):  # with real values the error may not occur; otherwise it is raised again
            return record(model, inputs, loss_of=loss, ghosts=True)
        return record(model, _on_device_of(model, inputs), loss_of=loss, ghosts=False)
    except (Exception, SystemExit) as error:
        refusal = explain_error(f"the model ({type(model).__name__})", error, f"an example batch of {size}")
        if refusal is error:
            raise
        raise refusal from error


def _on_device_of(model: nn.Module, inputs: Any) -> Any:
    # An example batch is made on the CPU; a finished model may be on another device.
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    leaves, nest = flatten(inputs)
    return unflatten((leaf.to(device) if isinstance(leaf, Tensor) else leaf for leaf in leaves), nest)


def _prevented(problems: Sequence[str], num_tried: int) -> str:
    if len(problems) < _MANY_PREVENTED * num_tried:
        return ""
    return (
        f"the model cannot be cut after {len(problems)} of {num_tried} modules ({problems[0]}): "
        "layers are larger than necessary; let modules return everything that is used after them"
    )


def _without_errors(errors: dict[int, ModelError], chosen: Sequence[int], problems: list[str]) -> list[int]:
    sound = [cut for cut in chosen if cut not in errors]
    if errors and not sound:
        raise next(iter(errors.values()))
    problems.extend(error.message for error in errors.values())
    return sound


def _modules_in(recording: Recording, span: _Span) -> tuple[str, ...]:
    """Return the paths of the largest modules that run completely in a span, in order."""
    whole = [call for call in recording.calls[1:] if _is_whole(call, span)]
    tops = [call.path for call in whole if not _is_whole(recording.calls[call.parent], span)]
    return tuple(dict.fromkeys(tops))


def _is_whole(call: ModuleCall, span: _Span) -> bool:
    return call.number > 0 and span[0] <= call.enter and call.exit < span[1]


def _layer_names(model: nn.Module, modules: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return a name for every layer: the path of its module with the most parameters.

    The second layer with the same name gets the suffix `#2`. `modules` are the paths of each layer's modules.
    """
    by_path = dict(model.named_modules(remove_duplicate=False))
    counts: dict[str, int] = {}
    names = []
    for paths in modules:
        # A layer may contain no complete module, only code between modules.
        sizes = {path: sum(p.numel() for p in by_path[path].parameters()) for path in paths}
        name = max(sizes, key=sizes.__getitem__, default="rest")
        counts[name] = counts.get(name, 0) + 1
        names.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return tuple(names)


def _writes_into(recording: Recording, span: _Span, storages: set[int]) -> bool:
    inside = (operator for operator in recording.operators if span[0] <= operator.time < span[1])
    return any(recording.flow.nodes[version]["storage"] in storages for o in inside for version in o.writes)


def _repeated_reads_and_writes(cuts: PossibleCuts, cut: int) -> tuple[frozenset[str], frozenset[int]]:
    """Return the parameters and buffers that code reads again after a cut, and the storages that it writes again."""
    flow = cuts.recording.flow.nodes
    numbered = enumerate(cuts.recording.operators)
    repeated = [
        o for number, o in numbered if (o.model_tensors or o.writes) and cuts.repeated_code.is_repeated(number, cut)
    ]
    return (
        frozenset(name for operator in repeated for name in operator.model_tensors),
        frozenset(flow[version]["storage"] for operator in repeated for version in operator.writes),
    )


def _assign_unread_tensors(
    model_tensors: Sequence[frozenset[str]], recording: Recording, model: nn.Module, spans: Sequence[_Span]
) -> tuple[frozenset[str], ...]:
    """Return each layer's parameters and buffers, by name, including those that the recorded forward did not read.

    A tensor that was not read, such as a weight of an unused expert, belongs to the layer that first calls the tensor's
    module or the nearest enclosing module.
    """
    read_names = frozenset(name for names in model_tensors for name in names)
    named = [*model.named_parameters(), *model.named_buffers()]
    # Tensors are compared by identity, because the forward may have read a tied tensor under another name.
    placed = {id(tensor) for name, tensor in named if name in read_names}
    layer_of: dict[str, int] = {}
    for layer, span in enumerate(spans):
        for call in recording.calls[1:]:
            # If a module is called several times, its first call decides its layer.
            if span[0] <= call.enter < span[1]:
                layer_of.setdefault(call.path, layer)
    complete = list(model_tensors)
    for name, tensor in named:
        if name in read_names or id(tensor) in placed:
            continue
        path = name.rpartition(".")[0]
        # If no enclosing module was called, the tensor is assigned to the first layer.
        while path and path not in layer_of:
            path = path.rpartition(".")[0]
        complete[layer_of.get(path, 0)] |= {name}
        placed.add(id(tensor))
    return tuple(complete)
