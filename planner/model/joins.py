"""Joins: what a module's own code makes that is narrower than what it is made of, as the sum in `x = x + block(x)`.

Code in front of a cut is run again behind it, on what was received. For the sake of a sum, all that it is made of would
have to cross: for `x = x + block(x)` over many blocks, what every block returned. A join crosses itself instead. The
stage in front computes it; in the stages behind, the function that makes it returns what was received.

    x0 --+-- block 0 -- r0 --(+)-- x1 --+-- block 1 -- r1 --(+)-- x2 | -- block 2
         +--------------------+         +--------------------+      cut

At this cut without joins x0, r0 and r1 cross; with the joins x1 and x2 it is x2 alone.

That never makes a cut wider. What a join takes the place of are tensors that only it is made of, that nobody else reads
behind it, and that are larger together than it is; no two joins take the place of the same ones.
"""

from bisect import bisect_right
from collections.abc import Iterator

from planner.model.recording import Join, Recording
from planner.model.repetition import Repetition


def joins_of(recording: Recording, repetition: Repetition) -> dict[int, Join]:
    """The joins among `Recording.candidates`, by the operator that made each."""
    return _Finder(recording, repetition).joins


class _Finder:
    """Finds joins, one after the other: a later one may be made of earlier ones."""

    def __init__(self, recording: Recording, repetition: Repetition) -> None:
        self._recording = recording
        self._repetition = repetition
        self._flow = recording.flow.nodes
        self._times = [operator.time for operator in recording.operators]
        self._versions: dict[int, list[int]] = {}
        for version, data in self._flow.items():
            self._versions.setdefault(data["storage"], []).append(version)
        self.joins: dict[int, Join] = {}
        for candidate in recording.candidates:  # in the order in which they ended
            number = self._flow[candidate.version]["operator"]
            if self._is_pure(candidate) and self._is_narrower(candidate):
                self.joins[number] = candidate

    def _is_pure(self, candidate: Join) -> bool:
        """Whether nothing but the tensor comes of the call, and nobody writes into that."""
        # A stage that received the tensor does not run the function: it would lack whatever else that does.
        if len(self._versions[self._flow[candidate.version]["storage"]]) > 1:
            return False
        first, end = (bisect_right(self._times, time) for time in (candidate.enter, candidate.exit))
        inside = self._recording.operators[first:end]
        return not any(
            o.writes_held or o.decides or o.region >= 0 or self._writes_outside(o.writes, candidate.enter)
            for o in inside
        )

    def _writes_outside(self, versions: tuple[int, ...], time: int) -> bool:
        """Whether one of the versions is of a storage that was there before `time`."""
        storages = (self._flow[version]["storage"] for version in versions)
        return any(self._flow[self._versions[storage][0]]["created"] < time for storage in storages)

    def _is_narrower(self, candidate: Join) -> bool:
        """Whether it takes fewer bytes than what would cross for its sake alone, just behind it.

        As many will do if the stages behind would need parameters or buffers to make it.
        """
        cut = candidate.exit + 1
        replaced_bytes, needs_held = 0, False
        repeated = [self._flow[candidate.version]["operator"]]
        while repeated:
            number = repeated.pop()
            needs_held = needs_held or bool(self._recording.operators[number].holds)
            for data in map(self._flow.__getitem__, self._sources(number, cut)):
                maker = data["operator"]
                if maker < 0 or not self._repetition.repeats(maker, cut):
                    # A call that is over returned it, or it is an input: it would be sent.
                    replaced_bytes += sum(map(self._num_bytes, self._repetition.exposed(data["storage"], cut)))
                elif maker in self.joins:
                    replaced_bytes += self._num_bytes(self.joins[maker].value)
                else:
                    repeated.append(maker)
        return replaced_bytes + needs_held > self._num_bytes(candidate.value)

    def _sources(self, operator: int, cut: int) -> Iterator[int]:
        """The versions that an operator reads and nothing else that runs behind a cut."""
        # What something else reads there crosses anyway: the join would not take its place.
        for version in dict.fromkeys(self._recording.reads[operator]):
            if all(self._is_over(time, operator, cut) for time in self._flow[version]["uses"]):
                yield version

    def _is_over(self, time: int, operator: int, cut: int) -> bool:
        """Whether a use at `time` is the operator's own, or is not repeated behind the cut."""
        if time >= cut:
            return False
        number = bisect_right(self._times, time) - 1
        return number == operator or not self._repetition.repeats(number, cut)

    def _num_bytes(self, value: int) -> int:
        return self._recording.values[value][1].nbytes
