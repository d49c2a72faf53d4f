"""Find the code before a cut that runs again after it.

The code of a call runs again after every cut within the call. A constant call, whose result depends on no parameter,
input or random number, counts as part of the code around it: the call runs again if that code does.

    call 0           |---------------------------------------|
    call 1             |-------|                                   finished before both cuts: not run again
    call 2 (a mask)               |---|                            finished too, but constant: run again, with call 0
    call 3                                 |---------|             its code runs again after cut b
                                         a      b
"""

from planner.model.recording import ModuleCall, Recording


class RepeatedCode:
    """Rules that determine which code runs before a cut and again in the stage after it."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._runner_of = [self._runner(call) for call in recording.calls]

    def is_repeated(self, operator: int, cut: int) -> bool:
        """Return True if an operator runs before the cut and again after it; False for -1, which is no operator."""
        if operator < 0:
            return False
        run = self._recording.operators[operator]
        return run.time < cut <= self._exit_of(self._runner_of[run.call])

    def exposes_results(self, call: int, cut: int) -> bool:
        """Return True if a call ends before the cut, and code that runs again after the cut can read its results."""
        if call < 0:  # all code of the model may use its inputs
            return True
        maker = self._recording.calls[call]
        is_over = maker.exit < cut and self._runner_of[call] == call
        return is_over and cut <= self._exit_of(self._runner_of[maker.parent])

    def exposed_tensors(self, storage: int, cut: int) -> set[int]:
        """Return the tensors in a storage that are results of finished calls, and that repeated code can read.

        Tensors are given by their index in `Recording.values`. Repeated code runs both before and after the cut.
        """
        exposures = self._recording.exposures.get(storage, ())
        return {value for value, call in exposures if self.exposes_results(call, cut)}

    def _runner(self, call: ModuleCall) -> int:
        """Return the number of the call with which `call` is repeated.

        That is `call` itself, or, for a constant call, the innermost call around it that is not constant.
        """
        while call.constant and call.parent >= 0:
            call = self._recording.calls[call.parent]
        return call.number

    def _exit_of(self, call: int) -> int:
        return self._recording.calls[call].exit
