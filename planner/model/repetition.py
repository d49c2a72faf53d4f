"""What the code in front of a cut does again behind it."""

from planner.model.recording import Call, Recording

__all__ = ["Repetition"]


class Repetition:
    """Which operators of a recording are run again behind a cut, and what comes into sight of them.

    Args:
        recording: The recording.
    """

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._running = [self._runner(call) for call in recording.calls]

    def repeats(self, operator: int, cut: int) -> bool:
        """Whether an operator in front of a cut is run again behind it."""
        done = self._recording.operators[operator]
        return done.time < cut <= self._recording.calls[self._running[done.call]].exit

    def exposes(self, call: int, cut: int) -> bool:
        """Whether the results of a call come into sight of code that is run again behind a cut."""
        if call < 0:
            return True
        made = self._recording.calls[call]
        return made.exit < cut and self._running[call] == call and cut <= self._exit_of(self._running[made.parent])

    def exposed(self, storage: int, cut: int) -> set[int]:
        """The values in which a storage comes into sight of that code, as calls returned them."""
        there = self._recording.exposures.get(storage, ())
        return {value for value, call in there if self.exposes(call, cut)}

    # Private methods

    def _runner(self, call: Call) -> int:
        """The call whose end decides whether what `call` does is done again: a constant one always is, with it."""
        while call.constant and call.parent >= 0:
            call = self._recording.calls[call.parent]
        return call.number

    def _exit_of(self, call: int) -> int:
        return self._recording.calls[call].exit
