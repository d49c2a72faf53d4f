"""Find where a recorded model can be cut, and which tensors cross each cut.

A cut is a position in the recorded forward. Later stages receive the results of calls that ended before the cut. Of
these calls, only constant ones, such as a call that creates a mask, run again (`planner.model.repeated_code`). A call
that has begun but not ended, such as the model's own `forward`, runs again in the next stage from its start, on the
received tensors. Some results of its code are sent, not computed again (`planner.model.sent_results`).

    def forward(self, x):
        a = self.first(x)
        b = self.second(a)
        c = a + b                  # the model's own code
        ----------------------     the cut: after `second`, or after the sum if the sum is sent
        return self.third(c) + a

After the cut, the code reads c and a. If the sum is sent, c and a cross. Otherwise a and b cross, and the stage after
the cut computes c again.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
from torch import nn

from planner.core.values.profile import Granularity
from planner.model.carried_state import reason_against_cut
from planner.model.recording import END, FunctionResult, ModuleCall, RecordedOperator, Recording
from planner.model.regions import Region
from planner.model.repeated_code import RepeatedCode
from planner.model.sent_results import SentResultFinder

_NEAR = 1.1
"""Largest ratio of the bytes across a chosen cut to the bytes across nearby cuts."""

_WIDEST = 3.0
"""Limit on the bytes across a cut that granularity `fine` adds, as a multiple of the bytes across the wider of the two
adjacent `coarse` cuts."""

_Life = tuple[int, int, int, list[int]]
"""Version of a storage: number of the version, and positions of its creation, its last use and all its uses."""


@dataclass(frozen=True)
class CutCrossing:
    """Tensors that must cross a cut."""

    values: tuple[int, ...]
    """Indices of the tensors in `Recording.values`."""
    model_tensors: frozenset[str]
    """Names of the parameters and buffers that the next stage needs for code that runs again after the cut."""
    problem: str | None
    """Reason why the model cannot be cut here; None if it can."""
    has_effect: bool
    """True if the loss depends on all tensors that cross the cut and require gradients."""


class PossibleCuts:
    """Possible cuts of a recorded model. A cut is a position in the recording (`planner.model.recording`)."""

    def __init__(self, recording: Recording, model: nn.Module) -> None:
        self.recording = recording
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self.repeated_code = RepeatedCode(recording)
        self._sent_results = SentResultFinder(recording, self.repeated_code).sent_results
        self._sent_results_in: dict[tuple[int, int], list[FunctionResult]] = {}
        for result in self._sent_results.values():
            self._sent_results_in.setdefault((result.call, result.gap), []).append(result)
        flow = recording.flow.nodes
        self._lives: list[_Life] = [
            (v, data["created"], data["uses"][-1], data["uses"]) for v, data in flow.items() if data["uses"]
        ]
        # The widths are cached: many modules end at the same times, and every choice below needs the same widths.
        self._num_bytes: dict[tuple[int, bool], int] = {}
        self._cut_after_call: dict[int, int] = {}
        # Versions are in order of creation, so the first version of a storage names the operator that created it.
        self._creator: dict[int, int] = {}
        for data in flow.values():
            self._creator.setdefault(data["storage"], data["operator"])
        self._num_versions = Counter(data["storage"] for data in flow.values())
        used = [version for version, _, last, _ in self._lives if last == END]
        self._used_by_loss = frozenset(used).union(*(nx.ancestors(recording.flow, version) for version in used))
        trained = (o.time for o in recording.operators if any(map(self._is_parameter, o.model_tensors)))
        self._last_trained = max(trained, default=0)
        self._states = {state.storage: state.name for state in recording.states}
        self.num_tried = 0
        """Number of calls after which `choose` tried a cut. They are calls of blocks or of modules outside blocks."""

    def crossing(self, cut: int, *, used_before: int = END + 1, with_unread_outputs: bool = False) -> CutCrossing:
        """Return the tensors that cross `cut`, because code between `cut` and `used_before` uses them.

        Args:
            cut: Position of the cut in the recording.
            used_before: Uses at this position or later are ignored.
            with_unread_outputs: True to include outputs of the model that the loss does not read.
        """
        # Uses are in order, so the first one after the cut decides whether the version is used before `used_before`.
        live = [
            version
            for version, created, last, uses in self._lives
            if created < cut <= last and uses[bisect_left(uses, cut)] < used_before
        ]
        if with_unread_outputs:
            live += [
                version for version in self.recording.unread if self.recording.flow.nodes[version]["created"] < cut
            ]
        needs = _Needs(self, cut)
        needs.follow(live, strict=True)
        # Repeated code branches again on values (`if x.sum() > 0`), which it needs even if nothing else reads them.
        for number in self.recording.decisions:
            if self.repeated_code.is_repeated(number, cut):
                needs.follow(self.recording.reads[number], strict=False)
        through = (region.problem for region in self.recording.regions if region.contains(cut))
        problem = reason_against_cut(self.recording.states, cut) or next(through, needs.problem)
        return CutCrossing(
            tuple(sorted(needs.values)), frozenset(needs.model_tensors), problem, has_effect=needs.have_effect
        )

    def num_bytes(self, cut: int, *, with_unread_outputs: bool = False) -> int:
        """Return the bytes of the tensors that cross a cut, for the recorded batch."""
        key = cut, with_unread_outputs and bool(self.recording.unread)
        if key not in self._num_bytes:
            crossing = self.crossing(cut, with_unread_outputs=with_unread_outputs)
            self._num_bytes[key] = sum(self.recording.values[n][1].nbytes for n in crossing.values)
        return self._num_bytes[key]

    @property
    def sent_results(self) -> tuple[FunctionResult, ...]:
        """Results of the model's own code that may be sent across a cut."""
        return tuple(self._sent_results.values())

    def sent_result(self, operator: int, cut: int) -> FunctionResult | None:
        """Return the operator's result if it is sent across the cut; else None."""
        result = self._sent_results.get(operator)
        is_sent = result is not None and result.exit < cut and self.repeated_code.is_repeated(operator, cut)
        return result if is_sent else None

    def count_operands_and_results(self, cut: int) -> tuple[int, int]:
        """Count the operands and results of code that runs on both sides of a cut.

        Returns:
            The number of operands, then the number of results. Operands are the tensors that cross the cut only for
            this code. Results are the tensors that this code computes again because later code uses them.
        """
        flow = self.recording.flow.nodes
        read_after = {flow[v]["storage"] for v, _, last, _ in self._lives if last >= cut}
        crossing = {self.recording.values[value][0] for value in self.crossing(cut).values}
        makers = (flow[v]["operator"] for v, created, last, _ in self._lives if created < cut <= last)
        repeated = (number for number in makers if self.repeated_code.is_repeated(number, cut))
        return len(crossing - read_after), sum(self.sent_result(number, cut) is None for number in repeated)

    def model_tensors(self, first: int, end: int) -> frozenset[str]:
        """Return the names of the parameters and buffers that the stage between the cuts `first` and `end` needs."""
        inside = (o.model_tensors for o in self.recording.operators if first <= o.time < end)
        # The model's output is used at the end of the last layer.
        used_before = END + 1 if end == END else end
        crossing = self.crossing(first, used_before=used_before)
        returned = self.recording.returned_model_tensors if end == END else frozenset()
        return frozenset(name for names in inside for name in names) | crossing.model_tensors | returned

    def missing_outputs(self, cut: int, model_tensors: frozenset[str]) -> frozenset[int]:
        """Return the indices of the model's outputs that the loss does not read and later stages cannot compute.

        Later stages are the stages after `cut`. They have the parameters and buffers `model_tensors`.
        """
        unread = self.recording.unread
        if not unread:
            return frozenset()
        received = {self.recording.values[value][0] for value in self.crossing(cut).values}
        missing: set[int] = set()
        for version in self._ancestors_of_unread:
            data = self.recording.flow.nodes[version]
            number = data["operator"]
            if self.sent_result(number, cut) is not None:
                is_there = data["storage"] in received
            elif number >= 0 and (data["created"] >= cut or self.repeated_code.is_repeated(number, cut)):
                # This version is computed after the cut, if its operands are available there.
                operator = self.recording.operators[number]
                is_there = model_tensors.issuperset(operator.model_tensors) and missing.isdisjoint(
                    self.recording.reads[number]
                )
            elif number < 0 and data["storage"] not in self.recording.exposures:
                # For a parameter, `model_tensors` is checked at the operators that read it.
                is_there = version not in unread
            else:
                # A finished call made this version. The storage crosses in its state at the cut, maybe a later version.
                is_there = data["storage"] in received and self._num_versions[data["storage"]] == 1
            if not is_there:
                missing.add(version)
        return frozenset(leaf for leaf, version in enumerate(self.recording.outputs) if version in missing & unread)

    def choose(self, granularity: Granularity) -> tuple[list[int], list[str]]:
        """Return the useful cuts in order, and reasons against other cuts.

        The model is cut at these places, if possible:

        - after each block (a member of a ModuleList, ModuleDict or Sequential)
        - outside of blocks, after modules that contain modules with parameters
        - between these cuts, after other modules, where few bytes cross
        - within blocks, where few bytes cross, if `granularity` is `fine`
        """
        calls = self.recording.calls
        # Boundaries between blocks are natural cuts. Any other cut is useful only if few bytes cross it.
        blocks = [call for call in calls[1:] if self._is_member(call)]
        inside = {number for call in blocks for number in self._below(call)}
        outside = [call for call in calls[1:] if call.number not in inside and not self._is_member(call)]
        parts = {call.number for call in blocks if call.number in inside and not self._modules[call.path]._modules}
        larger = [call for call in blocks if call.number not in parts]
        problems: list[str] = []
        minor: list[str] = []  # reasons inside blocks, which matter only if the model cannot be cut around the blocks
        possible = {*self._possible(larger, problems), *self._possible((calls[n] for n in parts), minor)}
        ends = set(self._no_wider_than_around(sorted(possible), blocks))
        around = self._no_wider_than_around(self._possible(outside, problems), calls[1:])
        training = {call.number for call in calls if self._modules[call.path]._parameters}
        small = {self._cut_after(call) for call in outside if training.isdisjoint(self._below(call))}
        ends.update(cut for cut in around if cut not in small)
        ends.update(self._narrowest([cut for cut in around if cut in small], sorted(ends)))
        chosen = self._without_empty(sorted(ends))
        if not chosen and not problems and not minor:
            # The model is a single block, so all possible cuts are inside the block.
            chosen = self._without_empty(self._possible(calls[1:], problems))
        self.num_tried = sum(map(self._is_tried, (*larger, *outside)))
        if granularity == "fine":
            every = [cut for cut in self._possible(calls[1:], []) if cut not in chosen]
            inner = self._narrowest(every, chosen, widest=_WIDEST)
            chosen = self._without_empty(sorted({*chosen, *inner}))
        return chosen, problems if chosen else [*problems, *minor]

    @cached_property
    def _ancestors_of_unread(self) -> list[int]:
        unread = self.recording.unread
        return sorted(unread.union(*(nx.ancestors(self.recording.flow, version) for version in unread)))

    def _is_member(self, call: ModuleCall) -> bool:
        container, _, name = call.path.rpartition(".")
        holder = self._modules[container] if name else None
        return isinstance(holder, nn.ModuleList | nn.ModuleDict | nn.Sequential)

    def _below(self, call: ModuleCall) -> Iterator[int]:
        for child in call.children:
            yield child
            yield from self._below(self.recording.calls[child])

    def _possible(self, calls: Iterable[ModuleCall], problems: list[str]) -> list[int]:
        possible = []
        for call in filter(self._is_tried, calls):
            cut = self._cut_after(call)
            crossing = self.crossing(cut)
            if crossing.problem is not None:
                problems.append(f'after "{call.path}": {crossing.problem}')
            # Without effect, the next stage would return zeros for a gradient that is None in a plain loop.
            elif crossing.has_effect:
                possible.append(cut)
        return sorted(set(possible))

    def _cut_after(self, call: ModuleCall) -> int:
        if call.number not in self._cut_after_call:
            parent = self.recording.calls[call.parent]
            gap = parent.children.index(call.number) + 1
            # After the last child, the parent call ends, and the cut after the parent is considered separately.
            results = self._sent_results_in.get((parent.number, gap), []) if gap < len(parent.children) else []
            results = [result for result in results if not self._draws_after(result)]
            cuts = [call.exit + 1, *(result.exit + 1 for result in results)]
            possible = [cut for cut in cuts if self.crossing(cut).problem is None]
            self._cut_after_call[call.number] = min(possible, key=self.num_bytes, default=cuts[0])
        return self._cut_after_call[call.number]

    def _draws_after(self, result: FunctionResult) -> bool:
        """Return True if random numbers are drawn after `result`, before the next submodule is called."""
        parent = self.recording.calls[result.call]
        next_enter = self.recording.calls[parent.children[result.gap]].enter
        return any(
            operator.random and result.exit < operator.time < next_enter for operator in self.recording.operators
        )

    def _is_tried(self, call: ModuleCall) -> bool:
        # After the last operator that reads a parameter there would be nothing to train.
        return not call.constant and call.exit <= self._last_trained

    def _no_wider_than_around(self, cuts: list[int], calls: Sequence[ModuleCall]) -> list[int]:
        narrow = []
        for cut in cuts:
            around = (call for call in calls if call.enter < cut <= call.exit)
            # With outputs that the loss does not read, the limit is the same for every loss.
            limits = (
                _NEAR * max(self.num_bytes(edge, with_unread_outputs=True) for edge in (call.enter, call.exit + 1))
                for call in around
            )
            if self.num_bytes(cut) <= min(limits, default=float("inf")):
                narrow.append(cut)
        return narrow

    def _narrowest(self, cuts: list[int], ends: list[int], *, widest: float = float("inf")) -> list[int]:
        narrow: list[int] = []
        for first, end in zip([0, *ends], [*ends, END], strict=True):
            between = {cut: self.num_bytes(cut) for cut in cuts if first < cut < end}
            around = max((self.num_bytes(cut) for cut in (first, end) if 0 < cut < END), default=float("inf"))
            most = min(_NEAR * min(between.values(), default=0), widest * around)
            narrow += [cut for cut, size in between.items() if size <= most]
        return narrow

    def _without_empty(self, cuts: list[int]) -> list[int]:
        left = list(cuts)
        layer = 0  # between cuts `layer - 1` and `layer`; the first and last layer have only one cut
        while layer <= len(left) and left:
            first, end = (left[layer - 1] if layer else 0), (left[layer] if layer < len(left) else END)
            if self._trains(first, end):
                layer += 1
                continue
            is_at_edge = layer in (0, len(left))
            wider = layer - (self.num_bytes(first) >= self.num_bytes(end))
            del left[min(layer, len(left) - 1) if is_at_edge else wider]
            # The layer was merged with a neighbor, perhaps with the previous layer: continue there.
            layer = max(0, layer - 1)
        return left

    def _trains(self, first: int, end: int) -> bool:
        names = (name for o in self.recording.operators if first <= o.time < end for name in o.model_tensors)
        return any(self._is_parameter(name) for name in names)

    def _is_parameter(self, name: str) -> bool:
        path, _, last = name.rpartition(".")
        return last in self._modules[path]._parameters


class _Needs:
    """Tensors, parameters and buffers that a stage needs to run the code after a cut."""

    # Each tensor that the code reads is traced back to tensors that can be sent. The operators in between run again.

    def __init__(self, cuts: PossibleCuts, cut: int) -> None:
        self._cuts = cuts
        self._cut = cut
        self._seen: set[int] = set()
        self.values: set[int] = set()
        self.model_tensors: set[str] = set()
        self.problem: str | None = None
        self.have_effect = True
        """True if the loss depends on all tensors in `values` that require gradients."""

    def follow(self, versions: Iterable[int], *, strict: bool) -> None:
        recording = self._cuts.recording
        flow = recording.flow
        open_versions = [version for version in versions if version not in self._seen]
        while open_versions:
            version = open_versions.pop()
            if version in self._seen:
                continue
            self._seen.add(version)
            data = flow.nodes[version]
            exposed = self._cuts.repeated_code.exposed_tensors(data["storage"], self._cut)
            self._send(exposed, version)
            number = data["operator"]
            if number < 0:  # an input of the model (among `exposed`) or a parameter (among `model_tensors`)
                continue
            result = self._cuts.sent_result(number, self._cut)
            if result is not None:
                self._send({result.value}, version)
                continue
            operator = recording.operators[number]
            if not self._cuts.repeated_code.is_repeated(number, self._cut):
                self._check_sent(operator, data["storage"], is_exposed=bool(exposed))
                continue
            self._check_repeated(operator, recording.reads[number], strict=strict)
            self.model_tensors.update(operator.model_tensors)
            open_versions.extend(recording.reads[number])

    def _send(self, values: set[int], version: int) -> None:
        self.values |= values
        has_gradient = any(self._cuts.recording.values[value][1].requires_grad for value in values)
        self.have_effect &= version in self._cuts._used_by_loss or not has_gradient

    def _check_sent(self, operator: RecordedOperator, storage: int, *, is_exposed: bool) -> None:
        where = self._name_of(operator)
        region = self._region_of(operator)
        if not is_exposed and region is not None and region.function:
            self._fail(region.problem)
        elif not is_exposed:
            self._fail(f"a tensor made in {where} ({operator.name}) is used after it, but is not returned")
        elif self._cuts.repeated_code.is_repeated(self._cuts._creator[storage], self._cut):
            # The code around the call would make the tensor again, without the values that the call wrote.
            self._fail(f"{where} writes into a tensor ({operator.name}) that the code around it uses afterwards")

    def _check_repeated(self, operator: RecordedOperator, reads: Sequence[int], *, strict: bool) -> None:
        where, name = self._name_of(operator), operator.name
        if (region := self._region_of(operator)) is not None:
            self._fail(f"{where} computes it ({name}), and {region.problem}")
        if operator.random and strict:  # each stage would draw different numbers
            remedy = "draw them into a new tensor, as `torch.randn_like` does, and do not change it in place"
            self._fail(f"random numbers are drawn ({name}) by the code of {where} between modules ({remedy})")
        if operator.writes_model_tensor:  # each stage that holds the tensor would repeat the write
            self._fail(f"the code of {where} writes into a parameter or buffer ({name}; use a module that returns it)")
        for version in reads:
            kept = self._cuts._states.get(self._cuts.recording.flow.nodes[version]["storage"])
            if kept is not None:  # only one stage changes this state
                remedy = "let the module that changes it return its value"
                self._fail(f'the code of {where} reads "{kept}" ({name}), which forward changes ({remedy})')
        makers = (self._cuts.recording.flow.nodes[old]["operator"] for old in operator.writes)
        if not all(self._cuts.repeated_code.is_repeated(maker, self._cut) for maker in makers):
            # The received tensor already contains the result of this write.
            self._fail(f"the code of {where} writes into what a module returned ({name})")

    def _region_of(self, operator: RecordedOperator) -> Region | None:
        region = self._cuts.recording.regions[operator.region] if operator.region >= 0 else None
        return region if region is not None and region.calls_modules else None

    def _name_of(self, operator: RecordedOperator) -> str:
        return self._cuts.recording.calls[operator.call].path or "the model itself"

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or problem  # the first one is reported
