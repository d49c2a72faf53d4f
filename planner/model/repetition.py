"""What the code in front of a cut does again behind it.

The code of a call runs again behind every cut that lies within the call. A call whose result depends on nothing that a
stage could lack, a constant one, is no end in itself: whoever runs the code around it runs it, too.

    call 0           |---------------------------------------|
    call 1             |-------|                                   over at both cuts: not run again
    call 2 (a mask)               |---|                            over too, but constant: run again, with call 0
    call 3                                 |---------|             its code runs again behind cut b
                                         a      b
"""

from planner.model.recording import Call, Recording


class Repetition:
    """Which operators of a recording are run again behind a cut, and what comes into sight of them."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._runner_of = [self._runner(call) for call in recording.calls]

    def repeats(self, operator: int, cut: int) -> bool:
        """Whether an operator in front of a cut is run again behind it."""
        run = self._recording.operators[operator]
        return run.time < cut <= self._exit_of(self._runner_of[run.call])

    def exposes(self, call: int, cut: int) -> bool:
        """Whether the results of a call come into sight of code that is run again behind a cut."""
        if call < 0:  # inputs of the model are in sight of all its code
            return True
        maker = self._recording.calls[call]
        is_over = maker.exit < cut and self._runner_of[call] == call
        return is_over and cut <= self._exit_of(self._runner_of[maker.parent])

    def exposed(self, storage: int, cut: int) -> set[int]:
        """The values in which a storage comes into sight of code that is run again, as calls returned them."""
        exposures = self._recording.exposures.get(storage, ())
        return {value for value, call in exposures if self.exposes(call, cut)}

    def _runner(self, call: Call) -> int:
        """The call whose end decides whether what `call` does is done again: a constant one always is, with it."""
        while call.constant and call.parent >= 0:
            call = self._recording.calls[call.parent]
        return call.number

    def _exit_of(self, call: int) -> int:
        return self._recording.calls[call].exit
