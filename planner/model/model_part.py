"""Describe a stage's part of the model: begin, end, own tensors, and received and sent tensors."""

from collections.abc import Callable, Sequence

from torch import nn

from planner.model.functions import FunctionCall
from planner.model.outline import ModelOutline
from planner.model.recording import END, FunctionResult

_ResultsInGap = dict[FunctionCall, FunctionResult]
"""Results that are sent across cuts, by the function call that computes them between two submodule calls."""


class ModelPart:
    """Part of a model that a stage runs: the layers `first` to `end - 1`.

    Args:
        outline: Outline of this or another instance of the model.
        model: The model.
        first: Index of the first layer.
        end: Index of the last layer, plus 1.
    """

    def __init__(self, outline: ModelOutline, model: nn.Module, first: int, end: int) -> None:
        self.outline = outline
        self.model = model
        self.begin, self.stop = outline.start_and_end(first, end)
        self.received = outline.received(first) if first else ()
        self.sent = outline.received(end) if end <= len(outline.cuts) else ()
        self.model_tensors = sorted({name for layer in outline.model_tensors[first:end] for name in layer})
        repeated = outline.repeated_model_tensors[first - 1] if first else frozenset[str]()
        self.repeated = sorted(repeated.intersection(self.model_tensors))
        """Names of the stage's parameters and buffers that repeated code reads (`planner.model.repeated_code`)."""
        self.absent = sorted(repeated.difference(self.model_tensors))
        """Names of other stages' parameters and buffers that repeated code reads. This stage has stand-ins for them."""
        self.overwritten = outline.overwritten[first - 1] if first else frozenset()
        calls = outline.recording.calls
        self.leftovers = [
            c
            for call in calls
            for c in call.changes
            if c.contains_tensor or (call.exit < self.begin and not call.constant)
        ]
        """Attribute changes to undo after a forward: those with tensors, and those of calls in earlier stages only."""
        states = [state for state in outline.recording.states if self.begin <= state.first < self.stop]
        self.replaced = [state.name for state in states if state.is_replaced and state.name in self.model_tensors]
        """Buffers that the stage's forwards replace by other tensors."""
        self.kept = [state.attribute for state in states if state.attribute is not None]
        """Attributes whose tensors a forward of the stage sets and later forwards read."""
        # A stage that does not compute a table receives it in every forward.
        tables = outline.recording.reused_tables
        self.kept += [key for key, time in tables.items() if self.begin <= time < self.stop]
        self.missing = outline.missing[first - 1] if first and self.stop == END else frozenset()
        self.when_begun: Callable[[], None] = lambda: None
        self.when_done: Callable[[], None] = lambda: None
        self.when_layer_begins: Callable[[int], None] = lambda _layer: None
        self.layer_at: dict[int, int] = {}
        """For each position at which a layer begins, the layer's index in the stage; empty before `call_at_layers`."""
        self.earlier: list[tuple[int, int]] = []
        """For each layer before the stage: the position where it begins, and its index (-1 just before the stage)."""
        self.layers = range(first, end)
        self._cuts = [outline.start_and_end(layer, layer + 1)[0] for layer in self.layers]
        self._watch([self.begin, self.stop])

    def call_at_layers(self, listener: Callable[[int], None]) -> None:
        """Call `listener` in each forward when a layer begins (`ModelStage.call_at_layers`)."""
        self.when_layer_begins = listener
        if self.outline.recording.draws_on_host:  # earlier layers that run again must draw the same numbers
            first = self.layers.start
            self.earlier = [(self.outline.start_and_end(layer, layer + 1)[0], layer - first) for layer in range(first)]
        self.layer_at = {time: layer for layer, time in enumerate(self._cuts)}
        self._watch([*self._cuts, self.stop])

    def _watch(self, times: Sequence[int]) -> None:
        # Only calls that contain one of the positions `times` are followed inside. Other calls run as a whole, or not.
        calls = self.outline.recording.calls
        crossing = {*self.received, *self.sent}
        self.sent_results: dict[tuple[int, int], _ResultsInGap] = {}
        """Sent results by module call (its number) and gap (number of submodule calls that it makes before the gap)."""
        for result in self.outline.sent_results:
            if result.value in crossing or result.exit + 1 in times:
                self.sent_results.setdefault((result.call, result.gap), {})[result.called] = result
        self.open = frozenset(c.number for c in calls if any(c.enter < t <= c.exit for t in times)) | {0}
        self.called_modules = {
            child: self.model.get_submodule(calls[child].path)
            for number in sorted(self.open)
            for child in calls[number].children
        }
        """Modules that the calls in `open` call directly. Keys are the numbers of these direct calls."""
