"""Joins: what a module's own code makes that is narrower than what it is made of, as the sum in `x = x + block(x)`.

Code in front of a cut is run again behind it, on what was received. For the sake of a sum, all that it is made of would
have to cross: for `x = x + block(x)` over many blocks, what every block returned. A join crosses itself instead. The
stage in front computes it; in the stages behind, the function that makes it returns what was received.

That never makes a cut wider. What a join takes the place of are tensors that only it is made of, that nobody else reads
behind it, and that are larger together than it is; no two joins take the place of the same ones.
"""

from bisect import bisect_right
from collections.abc import Iterator

from planner.model.recording import Join, Recording
from planner.model.repetition import Repetition

__all__ = ["joins_of"]


def joins_of(recording: Recording, repetition: Repetition) -> dict[int, Join]:
    """The joins among `Recording.candidates`, by the operator that made each."""
    return _Finder(recording, repetition).joins


class _Finder:
    def __init__(self, recording: Recording, repetition: Repetition) -> None:
        self._recording = recording
        self._repetition = repetition
        self._flow = recording.flow.nodes
        self._times = [operator.time for operator in recording.operators]
        self._versions: dict[int, list[int]] = {}
        for version, data in self._flow.items():
            self._versions.setdefault(data["storage"], []).append(version)
        self.joins: dict[int, Join] = {}
        for made in recording.candidates:  # in the order in which they ended: one may be made of others
            number = self._flow[made.version]["operator"]
            if self._is_pure(made) and self._is_narrower(made):
                self.joins[number] = made

    def _is_pure(self, made: Join) -> bool:
        """Whether nothing but the tensor comes of the call, and nobody writes into that."""
        if len(self._versions[self._flow[made.version]["storage"]]) > 1:
            return False
        first, end = (bisect_right(self._times, time) for time in (made.enter, made.exit))
        inside = self._recording.operators[first:end]
        return not any(o.writes_held or o.decides or o.region >= 0 or self._writes_out(o.writes, made) for o in inside)

    def _writes_out(self, versions: tuple[int, ...], made: Join) -> bool:
        return any(self._flow[self._versions[self._flow[v]["storage"]][0]]["created"] < made.enter for v in versions)

    def _is_narrower(self, made: Join) -> bool:
        """Whether it takes fewer bytes than what would cross for its sake alone, just behind it.

        Or as many, if the stages behind would need parameters or buffers to make it.
        """
        cut = made.exit + 1
        replaced, holds = 0, False
        again = [self._flow[made.version]["operator"]]
        while again:
            number = again.pop()
            holds = holds or bool(self._recording.operators[number].holds)
            for data in map(self._flow.__getitem__, self._sources(number, cut)):
                maker = data["operator"]
                if maker < 0 or not self._repetition.repeats(maker, cut):
                    replaced += sum(map(self._num_bytes, self._repetition.exposed(data["storage"], cut)))
                elif maker in self.joins:
                    replaced += self._num_bytes(self.joins[maker].value)
                else:
                    again.append(maker)
        return replaced + holds > self._num_bytes(made.value)

    def _sources(self, operator: int, cut: int) -> Iterator[int]:
        """What an operator reads and nothing else that runs behind a cut."""
        for version in dict.fromkeys(self._recording.reads[operator]):
            if all(self._is_over(time, operator, cut) for time in self._flow[version]["uses"]):
                yield version

    def _is_over(self, time: int, operator: int, cut: int) -> bool:
        if time >= cut:
            return False
        number = bisect_right(self._times, time) - 1
        return number == operator or not self._repetition.repeats(number, cut)

    def _num_bytes(self, value: int) -> int:
        return self._recording.values[value][1].nbytes
