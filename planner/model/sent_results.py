"""Find results of a module's own code that are sent across a cut, as in `x = x + block(x)`.

If a cut divides a module's code, this code runs again after the cut, on the received tensors. To repeat a sum, a stage
would have to receive all operands: for `x = x + block(x)` over many blocks, the results of every block. Instead, the
stage before the cut sends the sum. In later stages, the addition is replaced by the received tensor.

    x0 --+-- block 0 -- r0 --(+)-- x1 --+-- block 1 -- r1 --(+)-- x2 | -- block 2
         +--------------------+         +--------------------+      cut

Without sent results, x0, r0 and r1 would cross this cut. With x1 and x2 as sent results, only x2 crosses it.

Random numbers are always sent. Any other result is sent only if fewer bytes then cross the cut, or equally many and the
later stages need fewer parameters and buffers.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from planner.model.recording import FunctionResult, RecordedOperator, Recording
from planner.model.repeated_code import RepeatedCode


class SentResultFinder:
    """Search for function results that are sent across cuts."""

    def __init__(self, recording: Recording, repeated_code: RepeatedCode) -> None:
        self._recording = recording
        self._repeated_code = repeated_code
        self._flow = recording.flow.nodes
        self._times = [operator.time for operator in recording.operators]
        self._versions: dict[int, list[int]] = {}
        self._made: dict[int, list[int]] = {}
        """Storage versions that each operator created. Keys are operator numbers."""
        for version, data in self._flow.items():
            self._versions.setdefault(data["storage"], []).append(version)
            self._made.setdefault(data["operator"], []).append(version)
        self.sent_results: dict[int, FunctionResult] = {}
        """Function results that are sent across cuts. Keys are the numbers of the operators that computed them."""
        for candidate in recording.candidates:  # in order of creation
            number = self._flow[candidate.version]["operator"]
            first, end = (bisect_right(self._times, time) for time in (candidate.enter, candidate.exit))
            inside = recording.operators[first:end]
            # Stages would draw different random numbers, so these are sent whatever their size.
            is_needed = any(operator.random for operator in inside) or self._is_cheaper(candidate)
            if self._is_pure(candidate, inside) and is_needed:
                self.sent_results[number] = candidate

    def _is_pure(self, candidate: FunctionResult, inside: Sequence[RecordedOperator]) -> bool:
        # A stage that receives the result does not run the function, so other effects would be missing.
        own = self._flow[candidate.version]["storage"]
        is_new_draw = any(operator.random for operator in inside) and self._fills_new_tensor(candidate)
        if len(self._versions[own]) > 1 and not is_new_draw:
            return False
        allowed = {own} if is_new_draw else set[int]()
        return not any(
            o.writes_model_tensor
            or o.decides
            or o.region >= 0
            or self._writes_outside(o.writes, candidate.enter, allowed)
            for o in inside
        )

    def _fills_new_tensor(self, candidate: FunctionResult) -> bool:
        """Return True if the function fills a new tensor, as in `torch.empty(3).normal_()`.

        Earlier operators that wrote the tensor must read no tensor. Later operators must not write it.
        """
        *earlier, last = self._versions[self._flow[candidate.version]["storage"]]
        makers = [self._flow[version]["operator"] for version in earlier]
        return last == candidate.version and all(n >= 0 and not self._recording.reads[n] for n in makers)

    def _writes_outside(self, versions: tuple[int, ...], time: int, allowed: set[int]) -> bool:
        storages = {self._flow[version]["storage"] for version in versions} - allowed
        return any(self._flow[self._versions[storage][0]]["created"] < time for storage in storages)

    def _is_cheaper(self, candidate: FunctionResult) -> bool:
        """Return True if sending the candidate takes fewer bytes than sending its operands."""
        # With equally many bytes, it is sent if later stages would need parameters or buffers to compute it.
        cut = candidate.exit + 1
        replaced_bytes, needs_held = 0, False
        repeated = [self._flow[candidate.version]["operator"]]
        while repeated:
            number = repeated.pop()
            needs_held = needs_held or bool(self._recording.operators[number].model_tensors)
            for data in map(self._flow.__getitem__, self._sources(number, cut)):
                maker = data["operator"]
                if not self._repeated_code.is_repeated(maker, cut):
                    # The tensor is an input or the result of a finished call, so it would be sent.
                    exposed = self._repeated_code.exposed_tensors(data["storage"], cut)
                    replaced_bytes += sum(map(self._num_bytes, exposed))
                elif maker in self.sent_results:
                    replaced_bytes += self._num_bytes(self.sent_results[maker].value)
                else:
                    repeated.append(maker)
        return replaced_bytes + needs_held > self._num_bytes(candidate.value)

    def _sources(self, operator: int, cut: int) -> Iterator[int]:
        # A tensor that other code reads after the cut is sent anyway, so the result would not replace it.
        for version in dict.fromkeys(self._recording.reads[operator]):
            if self._is_over(version, operator, cut):
                yield version

    def _is_over(self, version: int, operator: int, cut: int) -> bool:
        """Return True if no code after `cut` needs the version, except to run `operator` again."""
        times, seen = list(self._flow[version]["uses"]), {operator}
        while times:
            time = times.pop()
            if time >= cut:
                return False
            number = bisect_right(self._times, time) - 1
            if number in seen or not self._repeated_code.is_repeated(number, cut):
                continue
            if self._recording.operators[number].decides:
                return False
            # In `x + block(norm(x))`, `norm` is repeated after the cut, but only the finished call reads its result.
            seen.add(number)
            times += [later for made in self._made.get(number, ()) for later in self._flow[made]["uses"]]
        return True

    def _num_bytes(self, value: int) -> int:
        return self._recording.values[value][1].nbytes
