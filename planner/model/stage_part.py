"""What a stage knows of its part of the model before it runs: from where to where, and what comes in and goes out."""

from collections.abc import Callable, Sequence

from torch import nn

from planner.model.functions import Called
from planner.model.outline import Outline
from planner.model.recording import END, Join

_Joins = dict[Called, Join]
"""The joins of one gap, by the call of a torch function that makes each."""


class Part:
    """Layers `first`..`end - 1` of a model; the outline may be that of another instance of it."""

    def __init__(self, outline: Outline, model: nn.Module, first: int, end: int) -> None:
        self.outline = outline
        self.model = model
        self.begin, self.stop = outline.times(first, end)
        self.received = outline.received(first) if first else ()
        self.sent = outline.received(end) if end <= len(outline.cuts) else ()
        self.held = sorted({name for layer in outline.holds[first:end] for name in layer})
        repeated = outline.repeated_holds[first - 1] if first else frozenset[str]()
        self.repeated = sorted(repeated.intersection(self.held))
        """Parameters and buffers that code in front of the stage reads, and that the stage has."""
        self.absent = sorted(repeated.difference(self.held))
        """Those that only other stages have: nothing of what the stage makes may depend on them."""
        self.overwritten = outline.overwritten[first - 1] if first else frozenset()
        self.leftovers = [c for call in outline.recording.calls for c in call.changes if c.holds_tensors]
        self.missing = outline.missing[first - 1] if first and self.stop == END else frozenset()
        self.when_begun: Callable[[], None] = lambda: None
        self.when_done: Callable[[], None] = lambda: None
        self.when_layer_begins: Callable[[int], None] = lambda _layer: None
        self.layer_at: dict[int, int] = {}
        """By time: which layer of the stage begins; empty while nobody listens."""
        self._cuts = [outline.times(layer, layer + 1)[0] for layer in range(first, end)]
        self._watch([self.begin, self.stop])

    def listen(self, listener: Callable[[int], None]) -> None:
        """Has `listener` called where a layer begins: cuts within the stage are watched, too."""
        self.when_layer_begins = listener
        self.layer_at = {time: layer for layer, time in enumerate(self._cuts)}
        self._watch([*self._cuts, self.stop])

    def _watch(self, times: Sequence[int]) -> None:
        """Chooses the calls, and the joins, that a forward must follow to notice that it passes these times.

        A call is open if one of the times lies within it: its code runs, and its children are met one by one. All other
        calls run, or are passed over, as a whole.
        """
        calls = self.outline.recording.calls
        crossing = {*self.received, *self.sent}
        self.joins: dict[tuple[int, int], _Joins] = {}
        """By call and gap in it."""
        for join in self.outline.joins:
            if join.value in crossing or join.exit + 1 in times:
                self.joins.setdefault((join.call, join.gap), {})[join.called] = join
        self.open = frozenset(c.number for c in calls if any(c.enter < t <= c.exit for t in times)) | {0}
        self.watched = [
            self.model.get_submodule(calls[child].path)
            for number in sorted(self.open)
            for child in calls[number].children
        ]
