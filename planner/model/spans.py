"""Describe the code between two cuts: its modules, its name, and the storages that it uses."""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from planner.model.cuts import PossibleCuts
from planner.model.leaves import TensorLeaf
from planner.model.recording import END, ModuleCall, Recording

Span = tuple[int, int]
"""Positions in the recorded forward where a layer begins (0 for the first) and ends (`END` for the last layer)."""


def modules_in(recording: Recording, span: Span) -> tuple[str, ...]:
    """Return the paths of the largest modules that run completely in a span, in order."""
    whole = [call for call in recording.calls[1:] if _is_whole(call, span)]
    tops = [call.path for call in whole if not _is_whole(recording.calls[call.parent], span)]
    return tuple(dict.fromkeys(tops))


def layer_names(model: nn.Module, modules: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
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


def storages_at(recording: Recording, time: int, crossing: Sequence[int]) -> set[int]:
    """Return the storages of the model's inputs, of its outputs, or of the tensors that cross a cut.

    Args:
        recording: One forward.
        time: 0 for the inputs, `END` for the outputs, or the position of a cut.
        crossing: Indices of the tensors that cross the cut; not used for inputs and outputs.
    """
    if time == 0:
        return {recording.values[leaf.number][0] for leaf in recording.inputs if isinstance(leaf, TensorLeaf)}
    if time == END:
        # The uses of a version are in order, and no use is later than `END`.
        versions = (data for _, data in recording.flow.nodes(data=True) if data["uses"] and data["uses"][-1] == END)
        return {data["storage"] for data in versions}
    return {recording.values[value][0] for value in crossing}


def writes_into(recording: Recording, span: Span, storages: set[int]) -> bool:
    """Return True if a layer writes into one of the given storages.

    Args:
        recording: One forward.
        span: Begin and end of the layer.
        storages: Numbers of the storages.
    """
    inside = (operator for operator in recording.operators if span[0] <= operator.time < span[1])
    return any(recording.flow.nodes[version]["storage"] in storages for o in inside for version in o.writes)


def repeated_reads_and_writes(cuts: PossibleCuts, cut: int) -> tuple[frozenset[str], frozenset[int]]:
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


def assign_unread_tensors(
    model_tensors: Sequence[frozenset[str]], recording: Recording, model: nn.Module, spans: Sequence[Span]
) -> tuple[frozenset[str], ...]:
    """Return the names of each layer's parameters and buffers, including those that the recorded forward did not read.

    A tensor that was not read, such as a weight of an unused expert, belongs to the layer that first calls the tensor's
    module or the nearest enclosing module.

    Args:
        model_tensors: For each layer, the names of the parameters and buffers that it reads.
        recording: One forward.
        model: The model.
        spans: Begin and end of each layer.
    """
    read_names = frozenset(name for names in model_tensors for name in names)
    # Tensors are compared by identity, because the forward may have read a tied tensor under another name.
    placed = {id(tensor) for name, tensor in _named_tensors(model) if name in read_names}
    layer_of: dict[str, int] = {}
    for layer, span in enumerate(spans):
        for call in recording.calls[1:]:
            # The first call of a module decides.
            if span[0] <= call.enter < span[1]:
                layer_of.setdefault(call.path, layer)
    complete = list(model_tensors)
    for name, tensor in _named_tensors(model):
        if name in read_names or id(tensor) in placed:
            continue
        path = name.rpartition(".")[0]
        # If no enclosing module was called, the tensor is assigned to the first layer.
        while path and path not in layer_of:
            path = path.rpartition(".")[0]
        complete[layer_of.get(path, 0)] |= {name}
        placed.add(id(tensor))
    return tuple(complete)


def _is_whole(call: ModuleCall, span: Span) -> bool:
    return call.number > 0 and span[0] <= call.enter and call.exit < span[1]


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
