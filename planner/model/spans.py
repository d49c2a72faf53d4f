"""Describe the code between two cuts: the modules of a layer, its name, and the storages that it touches.

A span is a pair of times: a layer is what runs from the first time and before the second.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from planner.model.cuts import Cuts
from planner.model.leaves import Value
from planner.model.recording import END, Call, Recording

Span = tuple[int, int]
"""Pair of times: of the cut before, or 0, and of the cut after, or `END`."""


def modules_in(recording: Recording, span: Span) -> tuple[str, ...]:
    """Return the paths of the largest modules that run as a whole in a span, in order."""
    whole = [call for call in recording.calls[1:] if _is_whole(call, span)]
    tops = [call.path for call in whole if not _is_whole(recording.calls[call.parent], span)]
    return tuple(dict.fromkeys(tops))


def layer_names(model: nn.Module, modules: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return a name for every layer, given its modules as returned by `modules_in`.

    The name is that of the module in it with the most parameters, followed by `#2` for the second layer of that name.
    """
    by_path = dict(model.named_modules(remove_duplicate=False))
    counts: dict[str, int] = {}
    names = []
    for paths in modules:
        # A layer may hold no whole module, only code between modules.
        sizes = {path: sum(p.numel() for p in by_path[path].parameters()) for path in paths}
        name = max(sizes, key=sizes.__getitem__, default="rest")
        counts[name] = counts.get(name, 0) + 1
        names.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return tuple(names)


def storages_at(recording: Recording, time: int, crossing: Sequence[int]) -> set[int]:
    """Return the storages of the tensors that exist at a time.

    Args:
        recording: One forward.
        time: 0 for the inputs, `END` for the outputs, or a cut.
        crossing: Values that cross the cut, if it is one.

    Returns:
        Numbers of storages.
    """
    if time == 0:
        return {recording.values[leaf.number][0] for leaf in recording.inputs if isinstance(leaf, Value)}
    if time == END:
        # Uses are in order, and nothing is used after the outputs.
        versions = (data for _, data in recording.flow.nodes(data=True) if data["uses"] and data["uses"][-1] == END)
        return {data["storage"] for data in versions}
    return {recording.values[value][0] for value in crossing}


def writes_into(recording: Recording, span: Span, storages: set[int]) -> bool:
    """Return True if an operator of a span writes into one of these storages.

    Args:
        recording: One forward.
        span: Times of a layer.
        storages: Numbers of storages.

    Returns:
        True if it writes.
    """
    inside = (operator for operator in recording.operators if span[0] <= operator.time < span[1])
    return any(recording.flow.nodes[version]["storage"] in storages for o in inside for version in o.writes)


def repeated_effects(cuts: Cuts, cut: int) -> tuple[frozenset[str], frozenset[int]]:
    """Return what the code that runs again after a cut reads and writes.

    Returns:
        The parameters and buffers that it reads, and the storages that it writes into.
    """
    flow = cuts.recording.flow.nodes
    numbered = enumerate(cuts.recording.operators)
    repeated = [o for number, o in numbered if (o.holds or o.writes) and cuts.repetition.repeats(number, cut)]
    return (
        frozenset(name for operator in repeated for name in operator.holds),
        frozenset(flow[version]["storage"] for operator in repeated for version in operator.writes),
    )


def add_unread(
    holds: Sequence[frozenset[str]], recording: Recording, model: nn.Module, spans: Sequence[Span]
) -> tuple[frozenset[str], ...]:
    """Add the parameters and buffers that this forward did not read to the layers.

    Those of experts that were not chosen, for example, go to the layer in which their module, or the nearest module
    around it that was called, begins. Others go to the first layer.

    Args:
        holds: Parameters and buffers that each layer reads.
        recording: One forward.
        model: The model.
        spans: Times of each layer.

    Returns:
        Parameters and buffers of each layer, complete.
    """
    read = frozenset(name for names in holds for name in names)
    # Compare by identity, because the forward may have read a tied tensor under another of its names.
    placed = {id(tensor) for name, tensor in _named_tensors(model) if name in read}
    layer_of: dict[str, int] = {}
    for layer, span in enumerate(spans):
        for call in recording.calls[1:]:
            # A module that is called several times counts where it is called first.
            if span[0] <= call.enter < span[1]:
                layer_of.setdefault(call.path, layer)
    complete = list(holds)
    for name, tensor in _named_tensors(model):
        if name in read or id(tensor) in placed:
            continue
        path = name.rpartition(".")[0]
        while path and path not in layer_of:
            path = path.rpartition(".")[0]
        complete[layer_of.get(path, 0)] |= {name}
        placed.add(id(tensor))
    return tuple(complete)


def _is_whole(call: Call, span: Span) -> bool:
    return call.number > 0 and span[0] <= call.enter and call.exit < span[1]


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
