"""Where a recorded model can be cut, and what crosses each cut.

A cut is a time of the recording: what ran before it is in front. Calls that are over at a cut are not run again behind
it; what they returned is received where it is needed. What the code of the calls that are still open did in front of
the cut is done again behind it, on what was received; but for joins, which cross themselves.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
from torch import nn

from planner.core.values.profile import Granularity
from planner.model.joins import joins_of
from planner.model.recording import END, Call, Join, Operator, Recording
from planner.model.repetition import Repetition

__all__ = ["Crossing", "Cuts"]

_NEAR = 1.1
"""Cuts with up to so many times the bytes of the best one nearby are worth keeping."""

_WIDEST = 3.0
"""A cut inside a block may have so many times the bytes of those around it."""


@dataclass(frozen=True)
class Crossing:
    """What must cross a cut."""

    values: tuple[int, ...]
    """Numbers of tensors in `Recording.values`."""
    holds: frozenset[str]
    """Parameters and buffers that code in front of the cut, which is run again behind it, reads."""
    problem: str | None
    """Why the model cannot be cut here."""


class Cuts:
    """The cuts of a recording.

    Args:
        recording: The recording.
        model: The model it is of; only its structure counts.
    """

    def __init__(self, recording: Recording, model: nn.Module) -> None:
        self.recording = recording
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._repetition = Repetition(recording)
        self._joins = joins_of(recording, self._repetition)
        self._joins_in: dict[tuple[int, int], list[Join]] = {}
        for join in self._joins.values():
            self._joins_in.setdefault((join.call, join.gap), []).append(join)
        flow = recording.flow.nodes
        self._lives = [(v, data["created"], data["uses"][-1], data["uses"]) for v, data in flow.items() if data["uses"]]
        self._num_bytes: dict[tuple[int, bool], int] = {}
        self._cut_behind: dict[int, int] = {}
        self._creator: dict[int, int] = {}
        for data in flow.values():
            self._creator.setdefault(data["storage"], data["operator"])
        self._num_versions = Counter(data["storage"] for data in flow.values())
        trained = (o.time for o in recording.operators if any(map(self._is_parameter, o.holds)))
        self._last_trained = max(trained, default=0)
        self.num_tried = 0
        """Behind how many calls `choose` would have cut, if nothing prevented it there."""

    def crossing(self, cut: int, *, used_before: int = END + 1, with_unread: bool = False) -> Crossing:
        """What crosses `cut` for the sake of what happens between it and `used_before`, unread outputs left out."""
        live = [
            version
            for version, made, last, uses in self._lives
            if made < cut <= last and uses[bisect_left(uses, cut)] < used_before
        ]
        if with_unread:
            live += [
                version for version in self.recording.unread if self.recording.flow.nodes[version]["created"] < cut
            ]
        needs = _Needs(self, cut)
        needs.follow(live, strict=True)
        for number in self.recording.decisions:
            if self.repeated(number, cut):
                needs.follow(self.recording.reads[number], strict=False)
        through = (region.problem for region in self.recording.regions if region.holds(cut))
        return Crossing(tuple(sorted(needs.values)), frozenset(needs.holds), next(through, needs.problem))

    def num_bytes(self, cut: int, *, with_unread: bool = False) -> int:
        """Bytes that cross a cut."""
        key = cut, with_unread and bool(self.recording.unread)
        if key not in self._num_bytes:
            crossing = self.crossing(cut, with_unread=with_unread)
            self._num_bytes[key] = sum(self.recording.values[n][1].nbytes for n in crossing.values)
        return self._num_bytes[key]

    @property
    def joins(self) -> tuple[Join, ...]:
        """What the code between modules makes that crosses as it is, where that code is run again."""
        return tuple(self._joins.values())

    def repeated(self, operator: int, cut: int) -> bool:
        """Whether an operator in front of a cut is run again behind it."""
        return self._repetition.repeats(operator, cut)

    def exposed(self, storage: int, cut: int) -> set[int]:
        """The values in which a storage comes into sight of code that is run again behind a cut."""
        return self._repetition.exposed(storage, cut)

    def join(self, operator: int, cut: int) -> Join | None:
        """What an operator made that crosses a cut, though code that is run again behind it made it in front."""
        join = self._joins.get(operator)
        return join if join is not None and join.exit < cut and self.repeated(operator, cut) else None

    def parts(self, cut: int) -> tuple[int, int]:
        """How many tensors cross a cut only for code in front of it, which is run again, and how many that makes."""
        read = {self.recording.flow.nodes[v]["storage"] for v, _, last, _ in self._lives if last >= cut}
        crossing = {self.recording.values[value][0] for value in self.crossing(cut).values}
        made = (self.recording.flow.nodes[v]["operator"] for v, made, last, _ in self._lives if made < cut <= last)
        again = (number for number in made if number >= 0 and self.repeated(number, cut))
        return len(crossing - read), sum(self.join(number, cut) is None for number in again)

    def holds(self, first: int, end: int) -> frozenset[str]:
        """Parameters and buffers that must be there to run what lies between two cuts."""
        inside = (o.holds for o in self.recording.operators if first <= o.time < end)
        # What the last layer's end uses is the model's output.
        used_before = END + 1 if end == END else end
        crossing = self.crossing(first, used_before=used_before)
        return frozenset(name for names in inside for name in names) | crossing.holds

    def missing_outputs(self, cut: int, holds: frozenset[str]) -> frozenset[int]:
        """Leaves of the model's output that the loss does not read and that cannot be had behind `cut`.

        Args:
            cut: The cut.
            holds: Parameters and buffers that are there behind it.
        """
        unread = self.recording.unread
        if not unread:
            return frozenset()
        received = {self.recording.values[value][0] for value in self.crossing(cut).values}
        missing: set[int] = set()
        for version in self._behind_unread:
            data = self.recording.flow.nodes[version]
            number = data["operator"]
            if number >= 0 and self.join(number, cut) is not None:
                is_there = data["storage"] in received
            elif number >= 0 and (data["created"] >= cut or self.repeated(number, cut)):
                operator = self.recording.operators[number]
                is_there = holds.issuperset(operator.holds) and missing.isdisjoint(self.recording.reads[number])
            elif number < 0 and data["storage"] not in self.recording.exposures:
                is_there = version not in unread  # a parameter; what reads it says whether it must be there
            else:
                is_there = data["storage"] in received and self._num_versions[data["storage"]] == 1
            if not is_there:
                missing.add(version)
        return frozenset(leaf for leaf, version in enumerate(self.recording.outputs) if version in missing & unread)

    def choose(self, granularity: Granularity) -> tuple[list[int], list[str]]:
        """The cuts worth having, in order; and by call, blocks first, why there is none behind it."""
        calls = self.recording.calls
        members = [call for call in calls[1:] if self._is_member(call)]
        inside = {number for call in members for number in self._below(call)}
        others = [call for call in calls[1:] if call.number not in inside and not self._is_member(call)]
        problems: list[str] = []
        ends = set(self._no_wider_than_around(self._possible(members, problems), members))
        possible = self._no_wider_than_around(self._possible(others, problems), calls[1:])
        small = {self._behind(call) for call in others if not any(map(self._trains_itself, self._below(call)))}
        ends.update(cut for cut in possible if cut not in small)
        ends.update(self._narrowest([cut for cut in possible if cut in small], sorted(ends)))
        chosen = self._without_empty(sorted(ends))
        if not chosen and not problems:  # a block alone
            chosen = self._without_empty(self._possible(calls[1:], problems))
        self.num_tried = sum(map(self._is_tried, (*members, *others)))
        if granularity == "fine":
            every = [cut for cut in self._possible(calls[1:], []) if cut not in chosen]
            inner = self._narrowest(every, chosen, widest=_WIDEST)
            chosen = self._without_empty(sorted({*chosen, *inner}))
        return chosen, problems

    # Private methods

    @cached_property
    def _behind_unread(self) -> list[int]:
        """The outputs that the loss does not read and all that they were made of, in the order in which it was made."""
        unread = self.recording.unread
        return sorted(unread.union(*(nx.ancestors(self.recording.flow, version) for version in unread)))

    def _is_member(self, call: Call) -> bool:
        container, _, name = call.path.rpartition(".")
        holder = self._modules[container] if name else None
        return isinstance(holder, nn.ModuleList | nn.ModuleDict | nn.Sequential)

    def _below(self, call: Call) -> Iterator[int]:
        for child in call.children:
            yield child
            yield from self._below(self.recording.calls[child])

    def _possible(self, calls: Sequence[Call], problems: list[str]) -> list[int]:
        """Cuts behind calls, as far as there are parameters behind them."""
        possible = []
        for call in filter(self._is_tried, calls):
            cut = self._behind(call)
            problem = self.crossing(cut).problem
            if problem is None:
                possible.append(cut)
            else:
                problems.append(f'behind "{call.path}": {problem}')
        return sorted(set(possible))

    def _behind(self, call: Call) -> int:
        """The cut behind a call: at once, or behind what is joined there, where that is narrower."""
        if call.number not in self._cut_behind:
            parent = self.recording.calls[call.parent]
            gap = parent.children.index(call.number) + 1
            # Behind the last one its parent ends, and has a cut of its own.
            joins = self._joins_in.get((parent.number, gap), []) if gap < len(parent.children) else []
            cuts = [call.exit + 1, *(join.exit + 1 for join in joins)]
            fit = [cut for cut in cuts if self.crossing(cut).problem is None]
            self._cut_behind[call.number] = min(fit, key=self.num_bytes, default=cuts[0])
        return self._cut_behind[call.number]

    def _is_tried(self, call: Call) -> bool:
        return not call.constant and call.exit <= self._last_trained

    def _no_wider_than_around(self, cuts: list[int], calls: Sequence[Call]) -> list[int]:
        """The cuts that are hardly wider than those around each of `calls` that they cut in two.

        What a module is worth to the loss says nothing of how wide it is: that a model with its loss inside also
        returns its logits counts.
        """
        kept = []
        for cut in cuts:
            around = (call for call in calls if call.enter < cut <= call.exit)
            widest = (
                _NEAR * max(self.num_bytes(edge, with_unread=True) for edge in (call.enter, call.exit + 1))
                for call in around
            )
            if self.num_bytes(cut) <= min(widest, default=float("inf")):
                kept.append(cut)
        return kept

    def _narrowest(self, cuts: list[int], ends: list[int], *, widest: float = float("inf")) -> list[int]:
        """Of the cuts between each two of `ends`, those nearly as narrow as the narrowest, and `widest` times these."""
        kept = []
        for first, end in zip([0, *ends], [*ends, END], strict=True):
            here = {cut: self.num_bytes(cut) for cut in cuts if first < cut < end}
            around = max((self.num_bytes(cut) for cut in (first, end) if 0 < cut < END), default=float("inf"))
            most = min(_NEAR * min(here.values(), default=0), widest * around)
            kept += [cut for cut, size in here.items() if size <= most]
        return kept

    def _without_empty(self, cuts: list[int]) -> list[int]:
        """Without cuts that would leave a layer no parameters: of the two around it the wider one goes."""
        kept = list(cuts)
        n = 0
        while n <= len(kept) and kept:
            first, end = (kept[n - 1] if n else 0), (kept[n] if n < len(kept) else END)
            if self._trains(first, end):
                n += 1
                continue
            at_edge = n in (0, len(kept))
            drop = min(n, len(kept) - 1) if at_edge else n - (self.num_bytes(first) >= self.num_bytes(end))
            del kept[drop]
            n = max(0, n - 1)
        return kept

    def _trains_itself(self, call: int) -> bool:
        return bool(self._modules[self.recording.calls[call].path]._parameters)

    def _trains(self, first: int, end: int) -> bool:
        """Whether what runs between two cuts reads a parameter."""
        names = (name for o in self.recording.operators if first <= o.time < end for name in o.holds)
        return any(self._is_parameter(name) for name in names)

    def _is_parameter(self, name: str) -> bool:
        path, _, last = name.rpartition(".")
        return last in self._modules[path]._parameters


class _Needs:
    """What must be received, and held, to have certain versions of storages behind a cut."""

    def __init__(self, cuts: Cuts, cut: int) -> None:
        self._cuts = cuts
        self._cut = cut
        self._seen: set[int] = set()
        self.values: set[int] = set()
        self.holds: set[str] = set()
        self.problem: str | None = None

    def follow(self, versions: Iterable[int], *, strict: bool) -> None:
        """Adds what `versions` need; a strict need must have the very numbers that were drawn, if any were."""
        recording = self._cuts.recording
        flow = recording.flow
        todo = [version for version in versions if version not in self._seen]
        while todo:
            version = todo.pop()
            if version in self._seen:
                continue
            self._seen.add(version)
            data = flow.nodes[version]
            exposed = self._cuts.exposed(data["storage"], self._cut)
            self.values.update(exposed)
            number = data["operator"]
            if number < 0:
                continue
            join = self._cuts.join(number, self._cut)
            if join is not None:
                self.values.add(join.value)
                continue
            done = recording.operators[number]
            if not self._cuts.repeated(number, self._cut):
                self._received(done, data["storage"], is_exposed=bool(exposed))
                continue
            self._repeat(done, strict=strict)
            self.holds.update(done.holds)
            todo.extend(recording.reads[number])

    def _received(self, done: Operator, storage: int, *, is_exposed: bool) -> None:
        """Notes what is wrong with having the result of an operator sent."""
        where = self._name_of(done)
        if not is_exposed and done.region >= 0 and self._cuts.recording.regions[done.region].function:
            self._fail(self._cuts.recording.regions[done.region].problem)
        elif not is_exposed:
            self._fail(f"a tensor made in {where} ({done.name}) is used behind it, and nobody returned it")
        elif self._was_made_outside(storage):
            self._fail(f"{where} writes into a tensor ({done.name}) that the code around it goes on using")

    def _repeat(self, done: Operator, *, strict: bool) -> None:
        """Notes what is wrong with running an operator again."""
        where = self._name_of(done)
        if done.region >= 0:
            self._fail(f"{where} computes it ({done.name}), and {self._cuts.recording.regions[done.region].problem}")
        if done.random and strict:
            self._fail(f"random numbers are drawn ({done.name}) by the code of {where} between modules")
        if done.writes_held:
            self._fail(f"the code of {where} writes into a parameter or buffer ({done.name})")
        if any(not self._is_repeated(old) for old in done.writes):
            self._fail(f"the code of {where} writes into what a module returned ({done.name})")

    def _name_of(self, done: Operator) -> str:
        return self._cuts.recording.calls[done.call].path or "the model itself"

    def _was_made_outside(self, storage: int) -> bool:
        maker = self._cuts._creator[storage]
        return maker >= 0 and self._cuts.repeated(maker, self._cut)

    def _is_repeated(self, version: int) -> bool:
        made = self._cuts.recording.flow.nodes[version]["operator"]
        return made >= 0 and self._cuts.repeated(made, self._cut)

    def _fail(self, problem: str) -> None:
        self.problem = self.problem or problem
