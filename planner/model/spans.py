"""What lies between two cuts: the modules of a layer, its name, and the storages that it touches.

A span is a pair of times: a layer is what ran from its first time on and before its second.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from planner.model.cuts import Cuts
from planner.model.leaves import Value
from planner.model.recording import END, Call, Recording

Span = tuple[int, int]
"""Times: of the cut in front, or 0, and of the cut behind, or `END`."""


def modules_in(recording: Recording, span: Span) -> tuple[str, ...]:
    """Paths of the largest modules that run as a whole in a span, in order."""
    whole = [call for call in recording.calls[1:] if _is_whole(call, span)]
    tops = [call.path for call in whole if not _is_whole(recording.calls[call.parent], span)]
    return tuple(dict.fromkeys(tops))


def layer_names(model: nn.Module, modules: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """A name for every layer, whose modules are as `modules_in` has them.

    It is that of the module in it with the most parameters, with `#2` where there is another such.
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
    """The storages of the tensors that are there at a time: 0, for the inputs; `END`, for the outputs; or a cut.

    `crossing` has the values that cross the cut, where it is one.
    """
    if time == 0:
        return {recording.values[leaf.number][0] for leaf in recording.inputs if isinstance(leaf, Value)}
    if time == END:
        # Uses are in order, and nothing is used after the outputs.
        versions = (data for _, data in recording.flow.nodes(data=True) if data["uses"] and data["uses"][-1] == END)
        return {data["storage"] for data in versions}
    return {recording.values[value][0] for value in crossing}


def writes_into(recording: Recording, span: Span, storages: set[int]) -> bool:
    """Whether an operator of a span writes into one of these storages."""
    inside = (operator for operator in recording.operators if span[0] <= operator.time < span[1])
    return any(recording.flow.nodes[version]["storage"] in storages for o in inside for version in o.writes)


def repeated_effects(cuts: Cuts, cut: int) -> tuple[frozenset[str], frozenset[int]]:
    """What code in front of a cut touches, which is run again behind it.

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
    """What every layer holds, with the parameters and buffers that this forward did not read.

    Those of experts that were not chosen, for example, go to the layer that their module began in, or the nearest one
    around it that was called; what no call says anything of goes to the first layer.
    """
    read = frozenset(name for names in holds for name in names)
    # By identity, for a tied tensor has several names, of which the forward may have read another.
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
