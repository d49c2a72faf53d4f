"""Describe a profiling task: the model, options, progress, and the measurements so far."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.core.values.partial import Measurement, Partial
from planner.core.values.profile import MemoryDetail, SplitMemory
from planner.model.chain import Chain
from planner.model.load import LoadedModel
from planner.profile.timing import Samples
from planner.profile.units import Key

Progress = Callable[[str, int, int], None]
"""Function called with the name of a measurement, the work done, and all work; larger micro-batches count for more."""


@dataclass(frozen=True, kw_only=True)
class ProfilerOptions:
    """Options of a profile."""

    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    device: str = "cpu"
    threads: int = 1
    repeats: int = 10
    """Minimum of timed repeats of every layer."""
    time_budget_s: float = 60.0
    """Time limit in seconds for starting further repeats; 0: no further repeats, and no message."""
    until_memory_ends: bool = False
    """True to leave out sizes that exceed memory or are too small for a layer; otherwise they are errors."""


class Steps:
    """Progress counter of measurements, in samples; each is announced before it is made."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done = self._total = 0

    def each(self, keys: Sequence[Key], names: Mapping[str, str], passes: int = 1) -> Iterator[Key]:
        """Yield measurements one after another, and announce each.

        Args:
            keys: The measurements.
            names: Name of each unit, by its digest.
            passes: Approximate number of timed passes of each.
        """
        self._total += passes * sum(size for _, size in keys)
        for digest, size in keys:
            self._progress(names[digest], self._done, self._total)
            yield digest, size
            self._done += passes * size

    def begin(self, text: str, samples: int) -> None:
        """Announce several measurements that end in any order."""
        self._total += samples
        self._progress(text, self._done, self._total)

    def end(self, text: str, samples: int) -> None:
        """Announce that one of the measurements has ended."""
        self._done += samples
        self._progress(text, self._done, self._total)


@dataclass(kw_only=True)
class Measurements:
    """Measurements that take long, kept so that an interrupted run can be continued."""

    header: Partial
    """Conditions under which the measurements are valid: the content of their file, without the measurements."""
    memory: dict[Key, MemoryDetail] = field(default_factory=dict)
    halves: dict[Key, SplitMemory] = field(default_factory=dict)
    """Records of split backwards."""
    samples: Samples = field(default_factory=dict)
    half_samples: Samples = field(default_factory=dict)

    def take_over(self, earlier: Partial, warn: Callable[[str], None]) -> None:
        """Use earlier measurements, if all of their conditions are the same."""
        differences = earlier.differences(self.header)
        if differences:
            warn(f"measurements of an interrupted run cannot be used ({', '.join(differences)} changed): starting over")
            return
        for one in earlier.measurements:
            key = (one.digest, one.micro_batch_size)
            self.memory[key] = one.memory
            self.samples[key] = list(zip(one.forward_us, one.backward_us, strict=True))
            if one.split is not None:
                self.halves[key] = one.split
            self.half_samples[key] = list(zip(one.backward_input_us, one.backward_weight_us, strict=True))

    def partial(self) -> Partial:
        """Return all measurements so far, as a file holds them."""
        return replace(self.header, measurements=tuple(map(self._measurement, self.memory)))

    def _measurement(self, key: Key) -> Measurement:
        whole, halves = self.samples.get(key, ()), self.half_samples.get(key, ())
        return Measurement(
            digest=key[0],
            micro_batch_size=key[1],
            memory=self.memory[key],
            split=self.halves.get(key),
            forward_us=tuple(forward for forward, _ in whole),
            backward_us=tuple(backward for _, backward in whole),
            backward_input_us=tuple(first for first, _ in halves),
            backward_weight_us=tuple(second for _, second in halves),
        )


@dataclass(frozen=True, kw_only=True)
class Task:
    """Model to be profiled."""

    loaded: LoadedModel
    chain: Chain
    lean: bool
    """True if the model's parameters have no values yet: layers get them when they are measured."""
    buffer_bytes: Mapping[str, int]
    """Bytes of the buffers of every layer, by its name, before it runs: a forward may enlarge them."""
    options: ProfilerOptions
    measurements: Measurements
    """Measurements so far, including those of an interrupted run."""
    steps: Steps
    warn: Callable[[str], None]
    """Function called with warnings for the user."""
    note: Callable[[str], None]
    """Function called with notes about defaults."""
