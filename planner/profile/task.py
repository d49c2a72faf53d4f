"""What a profile is asked for: the model, how to measure it, whom to tell of progress, and what is known so far."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from planner.core.values.partial import Measurement, Partial
from planner.core.values.profile import MemoryDetail, SplitMemory
from planner.model.chain import Chain
from planner.model.load import LoadedModel
from planner.profile.timing import Samples
from planner.profile.units import Key

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, how much is done, and how much there is; larger micro-batches count for more."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """How to profile."""

    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    device: str = "cpu"
    threads: int = 1
    repeats: int = 10
    """At least so many timed repeats of every layer."""
    time_budget_s: float = 60.0
    """More repeats than that are begun only so long after the first; 0: none, and nothing is said about it."""
    until_memory_ends: bool = False
    """Whether sizes for which memory does not suffice, or that are too small for a layer, are left out, rather than an
    error."""


class Steps:
    """Counts measurements, in samples, and announces each before it is made."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done = self._total = 0

    def each(self, keys: Sequence[Key], names: Mapping[str, str], passes: int = 1) -> Iterator[Key]:
        """Passes measurements on, one after the other; each takes about so many timed passes over its samples.

        `names` has what to call a unit, by its digest.
        """
        self._total += passes * sum(size for _, size in keys)
        for digest, size in keys:
            self._progress(names[digest], self._done, self._total)
            yield digest, size
            self._done += passes * size

    def begin(self, text: str, samples: int) -> None:
        """Announces several measurements that end in any order."""
        self._total += samples
        self._progress(text, self._done, self._total)

    def end(self, text: str, samples: int) -> None:
        """Announces that one of them has ended."""
        self._done += samples
        self._progress(text, self._done, self._total)


@dataclass(kw_only=True)
class Kept:
    """What takes long to measure, so that an interrupted run can hand it on; filled in as it comes."""

    header: Partial
    """The file that would hold them, still empty: all that must be the same for them to be of use."""
    memory: dict[Key, MemoryDetail] = field(default_factory=dict)
    halves: dict[Key, SplitMemory] = field(default_factory=dict)
    """The records of backwards in halves."""
    samples: Samples = field(default_factory=dict)
    half_samples: Samples = field(default_factory=dict)

    def take_over(self, earlier: Partial, warn: Callable[[str], None]) -> None:
        """Uses what was measured before, if everything it depends on is the same."""
        differences = earlier.differences(self.header)
        if differences:
            warn(f"what an interrupted run measured is of no use ({', '.join(differences)} changed): starting over")
            return
        for one in earlier.measurements:
            key = (one.digest, one.micro_batch_size)
            self.memory[key] = one.memory
            self.samples[key] = list(zip(one.forward_us, one.backward_us, strict=True))
            if one.split is not None:
                self.halves[key] = one.split
            self.half_samples[key] = list(zip(one.backward_input_us, one.backward_weight_us, strict=True))

    def partial(self) -> Partial:
        """Everything so far, as a file holds it."""
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
    """A model to be measured."""

    loaded: LoadedModel
    chain: Chain
    lean: bool
    """Whether the model's parameters have no values yet: layers get them when they are measured."""
    buffer_bytes: Mapping[str, int]
    """Bytes of the buffers of every layer, by its name, before it runs: a forward may enlarge them."""
    options: ProfileOptions
    kept: Kept
    """What has been measured so far, also by an interrupted run."""
    steps: Steps
    warn: Callable[[str], None]
    """Called with what the user should know."""
    note: Callable[[str], None]
    """Called with defaults that were taken."""
