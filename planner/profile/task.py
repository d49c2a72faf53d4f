"""Describe a profiling task: the model, options, progress, and the measurements so far."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.core.values.partial import Measurement, PartialProfile
from planner.core.values.profile import MemoryDetail, SplitMemory
from planner.model.chain import Chain
from planner.model.load import LoadedModel
from planner.model.optimizers import WholeModelOptimizer
from planner.profile.units import LayerKey, TimeSamples

Progress = Callable[[str, int, int], None]
"""Function of (name of the next measurement, samples measured so far, samples to measure in total)."""


@dataclass(frozen=True, kw_only=True)
class ProfilerOptions:
    """Options of a profiling run."""

    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    device: str = "cpu"
    threads: int = 1
    repeats: int = 10
    """Minimum number of timed repeats of every layer."""
    time_budget_s: float = 60.0
    """Time in seconds after which no further repeats start. With 0, the profiler times the minimum number of repeats
    and does not warn that times are uncertain."""
    skip_failing_sizes: bool = False
    """True to leave out micro-batch sizes that do not fit in memory or are too small for a layer; False to refuse."""


class ProgressCounter:
    """Progress of the measurements. Each timed pass of a layer counts as many units as the micro-batch has samples."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done = self._total = 0

    def each(self, keys: Sequence[LayerKey], names: Mapping[str, str], passes: int = 1) -> Iterator[LayerKey]:
        """Yield the keys of measurements one by one. Before each key, report the progress.

        Args:
            keys: Digest and micro-batch size of each measurement.
            names: Name of each layer, by its digest.
            passes: Duration of one measurement, as a number of timed passes.
        """
        self._total += passes * sum(size for _, size in keys)
        for digest, size in keys:
            self._progress(names[digest], self._done, self._total)
            yield digest, size
            self._done += passes * size

    def begin(self, text: str, samples: int) -> None:
        """Report `text` at the start of a measurement that counts as `samples` units of progress."""
        self._total += samples
        self._progress(text, self._done, self._total)

    def end(self, text: str, samples: int) -> None:
        """Report `text` at the end of a measurement that counts as `samples` units, as passed to `begin`."""
        self._done += samples
        self._progress(text, self._done, self._total)


@dataclass(kw_only=True)
class Measurements:
    """Measurements so far, from which an interrupted run can continue."""

    header: PartialProfile
    """Model, device and versions for which the measurements are valid."""
    memory: dict[LayerKey, MemoryDetail] = field(default_factory=dict)
    split_memory: dict[LayerKey, SplitMemory] = field(default_factory=dict)
    """Memory of layers with a split backward."""
    samples: TimeSamples = field(default_factory=lambda: defaultdict(list))
    split_samples: TimeSamples = field(default_factory=lambda: defaultdict(list))
    entries_us: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Entry times (`LayerProfile.entry_us`), by layer name and micro-batch size. The file of an interrupted run lacks
    them, because the warm-up passes of each run measure them again."""

    def add_earlier(self, earlier: PartialProfile, warn: Callable[[str], None]) -> None:
        """Add measurements of an earlier run if its model and environment are equal; otherwise warn."""
        differences = earlier.differences(self.header)
        if differences:
            warn(f"measurements of an interrupted run cannot be used ({', '.join(differences)} changed): starting over")
            return
        for one in earlier.measurements:
            key = (one.digest, one.micro_batch_size)
            self.memory[key] = one.memory
            self.samples[key] = list(zip(one.forward_us, one.backward_us, strict=True))
            if one.split is not None:
                self.split_memory[key] = one.split
            self.split_samples[key] = list(zip(one.backward_input_us, one.backward_weight_us, strict=True))

    def as_partial_profile(self) -> PartialProfile:
        """Return all measurements so far, as content of a file."""
        return replace(self.header, measurements=tuple(map(self._measurement, self.memory)))

    def _measurement(self, key: LayerKey) -> Measurement:
        whole, split = self.samples.get(key, ()), self.split_samples.get(key, ())
        return Measurement(
            digest=key[0],
            micro_batch_size=key[1],
            memory=self.memory[key],
            split=self.split_memory.get(key),
            forward_us=tuple(forward for forward, _ in whole),
            backward_us=tuple(backward for _, backward in whole),
            backward_input_us=tuple(first for first, _ in split),
            backward_weight_us=tuple(second for _, second in split),
        )


@dataclass(frozen=True, kw_only=True)
class ProfilingTask:
    """Profiling task: the model, the options, and the measurements so far."""

    loaded: LoadedModel
    chain: Chain
    lean: bool
    """True if the model's parameters have no values yet; they get random values when their layers are measured."""
    buffer_bytes: Mapping[str, int]
    """For each layer name, the bytes of the layer's buffers before the first forward."""
    options: ProfilerOptions
    measurements: Measurements
    """Measurements so far, including those of an interrupted run."""
    steps: ProgressCounter
    warn: Callable[[str], None]
    """Function that is called with warnings for the user."""
    note: Callable[[str], None]
    """Function that is called with notes about defaults."""

    def whole_optimizer(self) -> WholeModelOptimizer:
        """Return the optimizer of the whole model."""
        return WholeModelOptimizer(self.loaded.build_optimizer, self.chain.model.parameters())
