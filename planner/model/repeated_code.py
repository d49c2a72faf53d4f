"""Find the code that runs before a cut and again after the cut.

If a cut divides a call, the stage after the cut runs the code of the call again from its start. A constant call, which
depends on no parameter, floating-point input or random number, runs again together with its caller.

    call 0           |---------------------------------------|
    call 1             |-------|                                   finished before both cuts: not run again
    call 2 (a mask)               |---|                            finished too, but constant: run again, with call 0
    call 3                                 |---------|             its code runs again after cut b
                                         a      b
"""

from planner.model.recording import ModuleCall, Recording


class RepeatedCode:
    """Analysis of a recording that finds the code that runs before a cut and again after the cut."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._runner_of = [self._runner(call) for call in recording.calls]

    def is_repeated(self, operator: int, cut: int) -> bool:
        """Return True if an operator runs before the cut and again after the cut; False if `operator` is -1."""
        if operator < 0:
            return False
        run = self._recording.operators[operator]
        return run.time < cut <= self._exit_of(self._runner_of[run.call])

    def has_exposed_result(self, call: int, cut: int) -> bool:
        """Return True if the result of a call is available to the code that runs again after a cut."""
        if call < 0:  # all code of the model may use its inputs
            return True
        maker = self._recording.calls[call]
        is_over = maker.exit < cut and self._runner_of[call] == call
        return is_over and cut <= self._exit_of(self._runner_of[maker.parent])

    def exposed_tensors(self, storage: int, cut: int) -> set[int]:
        """Return the tensors in `storage` that are available to the code that runs again after a cut.

        Such a tensor is an input of the model, or a result of a call that ends before the cut and does not run again.
        The result counts only if the code that made the call runs again after the cut.

        Returns:
            Indices of the tensors in `Recording.values`.
        """
        exposures = self._recording.exposures.get(storage, ())
        return {value for value, call in exposures if self.has_exposed_result(call, cut)}

    def _runner(self, call: ModuleCall) -> int:
        # A constant call runs again with the innermost call around it that is not constant.
        while call.constant and call.parent >= 0:
            call = self._recording.calls[call.parent]
        return call.number

    def _exit_of(self, call: int) -> int:
        return self._recording.calls[call].exit
