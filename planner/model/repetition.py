"""Find the code before a cut that runs again after it.

The code of a call runs again after every cut within the call. A constant call, whose result depends on nothing that a
stage could lack, counts as part of the code around it: it runs again if that code does.

    call 0           |---------------------------------------|
    call 1             |-------|                                   finished before both cuts: not run again
    call 2 (a mask)               |---|                            finished too, but constant: run again, with call 0
    call 3                                 |---------|             its code runs again after cut b
                                         a      b
"""

from planner.model.recording import Call, Recording


class Repetition:
    """Operators of a recording that run again after a cut, and the values that they can use."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._runner_of = [self._runner(call) for call in recording.calls]

    def repeats(self, operator: int, cut: int) -> bool:
        """Return True if an operator before a cut runs again after it."""
        run = self._recording.operators[operator]
        return run.time < cut <= self._exit_of(self._runner_of[run.call])

    def exposes(self, call: int, cut: int) -> bool:
        """Return True if code that runs again after a cut can use the results of a call."""
        if call < 0:  # inputs of the model are in sight of all its code
            return True
        maker = self._recording.calls[call]
        is_over = maker.exit < cut and self._runner_of[call] == call
        return is_over and cut <= self._exit_of(self._runner_of[maker.parent])

    def exposed(self, storage: int, cut: int) -> set[int]:
        """Return the values with this storage, as calls returned them, that code running again after a cut can use."""
        exposures = self._recording.exposures.get(storage, ())
        return {value for value, call in exposures if self.exposes(call, cut)}

    def _runner(self, call: Call) -> int:
        """Return the call whose end decides whether `call` runs again: for a constant call, the code around it."""
        while call.constant and call.parent >= 0:
            call = self._recording.calls[call.parent]
        return call.number

    def _exit_of(self, call: int) -> int:
        return self._recording.calls[call].exit
