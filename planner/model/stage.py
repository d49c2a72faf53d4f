"""A stage of a model that is no Sequential: the model's own forward, of which only some layers really run.

Modules in front of the stage are not run: they return what was received, or, where nobody needs it, an absent ghost.
Neither are functions between them that made a join (`joins.py`). Parameters of other stages that the model's own code
touches on its way are absent ghosts, too. Whatever reaches an output or the next stage is checked to be made of none.
The forward ends behind the stage's last module, or the join behind that. Modules are changed only while a stage runs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from planner.core.errors import ModelError
from planner.model.attributes import left_behind, put_back, without_leftovers
from planner.model.calling import arguments_of, wrapped
from planner.model.functions import Called, FunctionWatch
from planner.model.ghosts import absent, expect_present
from planner.model.leaves import Constant, Counted, Held, Leaf, Passed, Value
from planner.model.nests import ABSENT, aligned, leaf_names, put_together, take_apart
from planner.model.outline import Outline
from planner.model.recording import END, Call, Join
from planner.model.regions import without_reentrance
from planner.model.unread import stand_in

__all__ = ["ModelStage"]


class ModelStage(nn.Module):
    """Layers `first`..`end - 1` of `model`; parameters and buffers have the names they have in the model.

    The first stage takes the model's inputs; the others, a tuple of the tensors of `Outline.received`. The last
    returns the model's output, with stand-ins for what the loss does not read and is not at hand; the others, the
    tuple that the next one takes.
    """

    def __init__(self, outline: Outline, model: nn.Module, first: int, end: int) -> None:
        super().__init__()
        # All in one attribute, and none of them a module: the names of what the model holds are free.
        self._part = _Part(outline, model, first, end)
        self.share_with(self)

    def forward(self, given: Any) -> Any:
        """See above."""
        return _Run(self._part, given).result()

    def pass_over(self, given: Any) -> None:
        """Runs what lies in front of the stage's own modules, and nothing of these."""
        if self._part.begin:
            _Run(self._part, given, own=False).result()

    def share_with(self, root: nn.Module) -> None:
        """Makes this stage's parameters and buffers those of `root` too, under the names they have in the model."""
        for name in self._part.held:
            *path, last = name.split(".")
            owner, holder = self._part.model.get_submodule(".".join(path)), _holder(root, path)
            if last in owner._parameters:
                holder._parameters[last] = owner._parameters[last]
            else:
                holder._buffers[last] = owner._buffers[last]

    def call_when_begun(self, listener: Callable[[], None]) -> None:
        """Has `listener` called in each forward when all that lies in front of the stage has been passed over."""
        self._part.when_begun = listener

    def call_at_layers(self, listener: Callable[[int], None]) -> None:
        """Has `listener` called in each forward where one of its layers begins: 0 for the stage's first, and so on."""
        self._part.listen(listener)

    @property
    def holders(self) -> list[nn.Module]:
        """The modules of the model whose own parameters and buffers the stage needs."""
        paths = sorted({name.rpartition(".")[0] for name in self._part.held})
        return [self._part.model.get_submodule(path) for path in paths]

    @property
    def needed_to_pass_over(self) -> list[Tensor]:
        """Parameters and buffers that code in front of the stage reads, for what the stage needs of it."""
        return [_held(self._part.model, name) for name in self._part.repeated]

    @property
    def model(self) -> nn.Module:
        """The whole model, which the stage runs its part of."""
        return self._part.model


class _Part:
    """What a stage knows."""

    def __init__(self, outline: Outline, model: nn.Module, first: int, end: int) -> None:
        self.outline = outline
        self.model = model
        self.begin, self.stop = outline.times(first, end)
        self.received = outline.received(first) if first else ()
        self.sent = outline.received(end) if end <= len(outline.cuts) else ()
        self.when_begun: Callable[[], None] = _nothing
        self.held = sorted({name for layer in outline.holds[first:end] for name in layer})
        self._cuts = [outline.times(layer, layer + 1)[0] for layer in range(first, end)]
        self.layer_at: dict[int, int] = {}
        self.when_layer_begins: Callable[[int], None] = _no_layer
        self._watch([self.begin, self.stop])
        repeated = outline.repeated_holds[first - 1] if first else frozenset[str]()
        self.repeated = sorted(repeated.intersection(self.held))
        self.absent = sorted(repeated.difference(self.held))
        self.overwritten = outline.overwritten[first - 1] if first else frozenset()
        self.leftovers = [c for call in outline.recording.calls for c in call.changes if c.holds_tensors]
        self.missing = outline.missing[first - 1] if first and self.stop == END else frozenset()

    def listen(self, listener: Callable[[int], None]) -> None:
        """Watches the cuts within the stage, too."""
        self.when_layer_begins = listener
        self.layer_at = {time: layer for layer, time in enumerate(self._cuts)}
        self._watch([*self._cuts, self.stop])

    def _watch(self, times: Sequence[int]) -> None:
        calls = self.outline.recording.calls
        wanted = {*self.received, *self.sent}
        self.joins: dict[tuple[int, int], dict[Called, Join]] = {}
        for join in self.outline.joins:
            if join.value in wanted or join.exit + 1 in times:
                self.joins.setdefault((join.call, join.gap), {})[join.called] = join
        self.open = frozenset(c.number for c in calls if any(c.enter < t <= c.exit for t in times)) | {0}
        self.watched = [
            self.model.get_submodule(calls[child].path)
            for number in sorted(self.open)
            for child in calls[number].children
        ]


class _Finished(BaseException):
    """The stage's last module is done. No `Exception`: the model's own handlers are not to stop it."""


class _Run:
    """One forward of a stage."""

    def __init__(self, stage: _Part, given: Any, *, own: bool = True) -> None:
        self._stage = stage
        self._own = own
        self._calls = stage.outline.recording.calls
        self._stack = [0]
        self._next = {0: 0}
        self._inside = False
        self._watch = FunctionWatch()
        self._awaited: dict[Called, Join] = {}
        """Joins of the gap that the code is in."""
        self._tensors: dict[int, Tensor] = {}
        self._begun = stage.begin == 0
        if self._begun:
            self._inputs = given
            leaves = take_apart(given)[0]
            if len(leaves) != len(stage.outline.recording.inputs):
                raise ModelError("the model's inputs have another structure than those of `example_batch`")
            recorded = stage.outline.recording.inputs
            self._keep(leaves, recorded)
            pairs = [(known.number, t) for known, t in zip(recorded, leaves, strict=True) if isinstance(known, Value)]
            self._size = stage.outline.size_of([number for number, _ in pairs], [t for _, t in pairs])
        else:
            self._tensors.update(zip(stage.received, given, strict=True))
            self._size = stage.outline.size_of(stage.received, given)
        self._device = given[0].device if stage.received else torch.device("cpu")
        self._with_ghosts = self._device.type != "jax"
        if not self._with_ghosts:
            # Torchax's tensors lie nowhere that torch knows, and take no ghosts beside them. They take zeros, which
            # nothing notices here: that stages are right is found when the model is profiled, which runs them in torch.
            self._device = torch.device("cpu")
        if not self._begun:
            recording = stage.outline.recording
            self._inputs = self._rebuilt(recording.inputs, recording.input_nest, [])

    def result(self) -> Any:
        """What crosses the cut behind the stage, or the model's output."""
        args, kwargs = arguments_of(self._inputs)
        with ExitStack() as stack:
            stack.enter_context(self._without_absent())
            stack.enter_context(without_reentrance())
            stack.enter_context(without_leftovers(self._stage.model, self._stage.leftovers))
            stack.enter_context(wrapped(self._stage.watched, self._run))
            stack.callback(self._watch.end_gap)
            if self._begun:
                self._begin_layer(0)
            try:
                output = self._stage.model(*args, **kwargs)
                self._end_gap()
            except _Finished:
                if not self._own:
                    return None
                if not self._tensors.keys() >= set(self._stage.sent):
                    raise _another_path("it did not return what the next stage needs") from None
                sent = tuple(self._tensors[value] for value in self._stage.sent)
                expect_present(sent, "what is sent to the next stage")
                return sent
        if self._stage.stop != END:
            raise _another_path("it ended early")
        unread = self._stage.outline.recording.unread
        if self._stage.begin == 0:
            return output
        if unread:
            output = self._without_missing(output)
        expect_present(take_apart(output)[0], "the model's output")
        return output

    # Private methods

    def _run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inside:
            return forward(*args, **kwargs)
        self._end_gap()
        call = self._expected(module)
        if call.exit < self._stage.begin and not call.constant:
            result = self._passed_over(call, take_apart((args, kwargs))[0])
        elif call.number in self._stage.open:
            self._stack.append(call.number)
            self._next[call.number] = 0
            result = forward(*args, **kwargs)
            self._end_gap()
            self._stack.pop()
        else:
            self._inside = True
            try:
                result = forward(*args, **kwargs)
            finally:
                self._inside = False
        if call.exit >= self._stage.begin:
            leaves = take_apart(result)[0]
            if len(leaves) != len(call.leaves):
                if not (self._stage.begin and call.number in self._stage.open):
                    raise _another_path(f'"{call.path}" returned something else')
                # What it collects from within modules that are passed over is not all there.
                leaves = aligned(result, call.nest)
            self._keep(leaves, call.leaves)
            self._expect_constants(call, leaves)
            self._keep_changes(call)
        self._reach(call.exit + 1)
        self._begin_gap()
        return result

    def _function(self, called: Called, run: Callable[[], Any]) -> Any:
        """One call of a torch function in a gap with joins."""
        join = self._awaited.pop(called, None)
        if join is None:
            return run()
        if join.exit < self._stage.begin and join.value in self._tensors:
            result = self._tensors[join.value]
        else:
            result = run()
            if join.value in self._stage.sent:
                self._tensors[join.value] = result
        self._reach(join.exit + 1)
        return result

    def _begin_gap(self) -> None:
        """The code of the call at work goes on, behind a submodule."""
        joins = self._stage.joins.get((self._stack[-1], self._next[self._stack[-1]]))
        if joins:
            self._awaited = dict(joins)
            self._watch.begin_gap(self._function)

    def _end_gap(self) -> None:
        """It calls the next submodule, or ends."""
        self._watch.end_gap()
        if self._awaited:
            path = self._calls[self._stack[-1]].path
            name, _ = next(iter(self._awaited))
            where = f'"{path}"' if path else "its own code"
            raise _another_path(f"{where} did not call `{name}` between its modules")

    def _reach(self, time: int) -> None:
        """What begins or ends at a time of the recording does so."""
        if time == self._stage.begin:
            self._stage.when_begun()
            if not self._own:
                raise _Finished
        self._begin_layer(time)
        if time == self._stage.stop:
            raise _Finished

    def _without_missing(self, output: Any) -> Any:
        """The model's output with stand-ins for what is not to be had in this stage, and is not read."""
        recording = self._stage.outline.recording
        leaves = aligned(output, recording.output_nest)
        missing = self._stage.missing | {n for n, leaf in enumerate(leaves) if leaf is ABSENT}
        if not missing:
            return output
        names = leaf_names(recording.output_nest)
        for n in missing:
            if isinstance(leaves[n], Tensor):
                leaves[n] = stand_in(names[n], leaves[n].shape, leaves[n].dtype, leaves[n].device)
            elif leaves[n] is ABSENT:
                leaves[n] = self._absent_output(n, names[n])
        return put_together(leaves, recording.output_nest)

    def _absent_output(self, number: int, name: str) -> Any:
        outline = self._stage.outline
        recording = outline.recording
        known = self._calls[0].leaves[number] if self._calls[0].nest == recording.output_nest else None
        if isinstance(known, Constant):
            return known.value
        if (
            isinstance(known, Value)
            and recording.outputs[number] in recording.unread
            and known.number in outline.shapes
        ):
            return stand_in(name, outline.shape(known.number, self._size), known.meta.dtype, self._device)
        raise _another_path(f'it did not return "{name}"')

    def _begin_layer(self, time: int) -> None:
        layer = self._stage.layer_at.get(time)
        if layer is not None:
            self._stage.when_layer_begins(layer)

    def _expected(self, module: nn.Module) -> Call:
        parent = self._calls[self._stack[-1]]
        position = self._next[parent.number]
        self._next[parent.number] = position + 1
        if position >= len(parent.children):
            raise _another_path("a module more was called")
        call = self._calls[parent.children[position]]
        if self._stage.model.get_submodule(call.path) is not module:
            raise _another_path(f'"{call.path}" was to be called')
        return call

    def _keep(self, leaves: Sequence[Any], recorded: Sequence[Leaf]) -> None:
        for leaf, known in zip(leaves, recorded, strict=True):
            if isinstance(known, Value) and known.number in self._stage.sent and leaf is not ABSENT:
                self._tensors[known.number] = leaf

    def _expect_constants(self, call: Call, leaves: Sequence[Any]) -> None:
        """What is no tensor is not sent: the stages behind take it to be what it was when the layers were found."""
        for leaf, known in zip(leaves, call.leaves, strict=True):
            if not isinstance(known, Constant | Counted) or not isinstance(leaf, int | float | str | torch.Size):
                continue
            expected = known.of(self._size) if isinstance(known, Counted) else known.value
            if leaf != expected:
                raise ModelError(
                    f'"{call.path}" returned {leaf!r} where it returned {expected!r} when its layers were found: only '
                    "tensors are sent to the stages behind, which would go on with the old one",
                    hint="return it as a tensor, and give inputs of the same shape as those of `example_batch`",
                )

    def _keep_changes(self, call: Call) -> None:
        """Keeps what a call left behind in attributes, as far as it is sent."""
        for change in call.changes:
            if not any(isinstance(leaf, Value) and leaf.number in self._stage.sent for leaf in change.leaves):
                continue
            try:
                self._keep(left_behind(self._stage.model, change), change.leaves)
            except LookupError:
                raise _another_path(f'"{call.path}" left something else behind') from None

    def _passed_over(self, call: Call, given: Sequence[Any]) -> Any:
        """What a call that does not run returns; what it would leave behind is put where it would be."""
        for change in call.changes:
            try:
                put_back(self._stage.model, change, [self._leaf(leaf, given) for leaf in change.leaves])
            except LookupError:
                raise _another_path(f'"{call.path}" cannot leave anything behind') from None
        return self._rebuilt(call.leaves, call.nest, given)

    def _rebuilt(self, recorded: Sequence[Leaf], nest: Any, given: Sequence[Any]) -> Any:
        return put_together([self._leaf(leaf, given) for leaf in recorded], nest)

    def _leaf(self, leaf: Leaf, given: Sequence[Any]) -> Any:
        match leaf:
            case Value():
                received = self._tensors.get(leaf.number)
                return self._not_received(leaf.number) if received is None else received
            case Passed():
                return given[leaf.argument]
            case Held():
                return _held(self._stage.model, leaf.name)
            case Constant():
                return leaf.value
            case Counted():
                return leaf.of(self._size)

    def _not_received(self, value: int) -> Tensor:
        recording = self._stage.outline.recording
        storage, meta = recording.values[value]
        shape = self._stage.outline.shape(value, self._size)
        # What stands in for a tensor is no work of the model's: nobody who watches its operators is to see it.
        with _disable_current_modes(), torch.no_grad():
            if not self._with_ghosts:
                if storage in self._stage.overwritten:
                    return torch.zeros(shape, dtype=meta.dtype, device=self._device)
                return torch.zeros((), dtype=meta.dtype, device=self._device).expand(shape)
            like = torch.empty(shape, dtype=meta.dtype, device="meta")
            call = recording.exposures[storage][0][1]
            return absent(like, self._device, "an input of the model" if call < 0 else recording.calls[call].path)

    @contextmanager
    def _without_absent(self) -> Iterator[None]:
        """Absent ghosts take the place of parameters that are touched on the way to the stage, but not needed there."""
        before: list[tuple[dict[str, Any], str, Any]] = []
        for full in self._stage.absent:
            path, _, name = full.rpartition(".")
            owner = self._stage.model.get_submodule(path)
            held: dict[str, Any] = owner._parameters if name in owner._parameters else owner._buffers
            before.append((held, name, held[name]))
            held[name] = self._absent(full, held[name])
        try:
            yield
        finally:
            for held, name, tensor in before:
                held[name] = tensor

    def _absent(self, name: str, tensor: Tensor) -> Tensor:
        with _disable_current_modes(), torch.no_grad():
            if self._with_ghosts:
                return absent(tensor, self._device, name)
            return torch.zeros((), dtype=tensor.dtype, device=self._device).expand(tensor.shape)


def _another_path(what: str) -> ModelError:
    return ModelError(
        f"the model took another path than when its layers were found: {what}",
        hint="a pipeline needs the same layers for every batch; switch off what skips layers by chance or by the data",
    )


def _held(model: nn.Module, full: str) -> Any:
    """The parameter or buffer of that name."""
    path, _, name = full.rpartition(".")
    return getattr(model.get_submodule(path), name)


def _holder(root: nn.Module, path: Sequence[str]) -> nn.Module:
    """The module at `path` below `root`, made where it is missing."""
    for part in path:
        below = root._modules.get(part)
        if below is None:
            root._modules[part] = below = nn.Module()
        root = below
    return root


def _nothing() -> None:
    """Nobody waits."""


def _no_layer(_layer: int) -> None:
    """Nobody waits."""
