"""Check that all ranks begin the same phase: a step, an evaluation, a checkpoint, or the end of their loops.

    position 0 -> position 1 -> ... -> position K - 1    phase, step, sizes and checksums of the mini-batches, and
                                                         changes that the script has made to weights and gradients
    last stages of replicas 0 to R - 1, all-reduce       phase, step, number of samples or tokens in the loss

K is the number of devices of a pipeline, R the number of replicas. Between ranks in different phases, a transfer would
fail, often on a rank without fault, or never end. So each rank first compares a few numbers with the previous rank, and
the first rank that differs reports the difference.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from planner.core.errors import TrainingError
from planner.core.values.units import pluralize
from planner.executor.run.placement import ProcessGroups, ProcessPlace
from planner.executor.run.same_batch import NO_CHECKSUMS, BatchChecksums
from planner.executor.run.script_changes import NO_CHANGES, ScriptChangeRecorder, ScriptChanges
from planner.executor.run.transfers import wait_for_all
from planner.executor.watch.activity import ANY, RankActivity

Phase = Literal["step", "evaluation", "evaluation with metrics", "checkpoint", "end"]

_DOING: Final[dict[Phase, str]] = {
    "step": "the start",
    "evaluation": "the evaluation",
    "evaluation with metrics": "the evaluation",
    "checkpoint": "a checkpoint",
    "end": "the end of the loop",
}
"""Name of each phase in messages about a rank that waits."""

_PHASES: Final = tuple(_DOING)
_NUM_SIZES = 6
"""Number of mini-batch sizes in a message; the last one is the sum of all remaining sizes."""


class _BegunPhase(NamedTuple):
    phase: Phase
    step: int
    sizes: tuple[int, ...] = ()  # number of samples in each mini-batch; gradient accumulation has several
    checksums: BatchChecksums = NO_CHECKSUMS

    @classmethod
    def read(cls, numbers: Sequence[float]) -> "_BegunPhase":
        phase, step, *sizes = map(int, numbers[: 2 + _NUM_SIZES])
        inputs, targets, is_whole = map(int, numbers[2 + _NUM_SIZES :])
        checksums = BatchChecksums(inputs, targets, bool(is_whole))
        return cls(_PHASES[phase], step, tuple(size for size in sizes if size), checksums)

    @property
    def without_batch(self) -> "_BegunPhase":
        return self._replace(sizes=(), checksums=NO_CHECKSUMS)

    @property
    def numbers(self) -> list[float]:
        sizes = [*self.sizes[: _NUM_SIZES - 1], sum(self.sizes[_NUM_SIZES - 1 :])]
        return [_PHASES.index(self.phase), self.step, *sizes, *[0.0] * (_NUM_SIZES - len(sizes)), *self.checksums]

    @property
    def description(self) -> str:
        if self.phase == "step":
            named = "a mini-batch" if len(self.sizes) == 1 else "mini-batches"
            samples = " and ".join(map(str, self.sizes))
            return f"at step {self.step}" + (f" with {named} of {samples} samples" if samples else "")
        after = f"after {pluralize(self.step, 'step')}"
        if self.phase == "end":
            return f"at the end of its loop {after}"
        if self.phase == "checkpoint":
            return f"at a checkpoint {after}"
        metrics = " with metrics" if self.phase != "evaluation" else ""
        return f"at an evaluation{f' of {sum(self.sizes)} samples' if self.sizes else ''}{metrics} {after}"


class PhaseAgreement:
    """Comparison of the phases that all ranks begin: a step, an evaluation, a checkpoint, or the end of the loop.

    Args:
        place: Place of this process in the job.
        groups: Process groups of this process.
        device: Device of the tensors that ranks exchange.
        activity: Activity of this rank, for error messages.
        script: Record of what the training script has done on this rank, to compare with other ranks.
    """

    def __init__(
        self,
        place: ProcessPlace,
        groups: ProcessGroups,
        device: torch.device,
        activity: RankActivity,
        *,
        script: ScriptChangeRecorder,
    ) -> None:
        self._place, self._groups, self._activity, self._script = place, groups, activity, script
        length = 2 + _NUM_SIZES + len(NO_CHECKSUMS) + len(NO_CHANGES)
        self._own = torch.zeros(length, dtype=torch.float64, device=device)
        self._received = torch.zeros_like(self._own)
        self._sending: list[dist.Work] = []
        self.has_ended = False
        """True if the last phase was the end of the loop."""

    def check_and_sum(
        self,
        phase: Phase,
        step: int,
        sizes: Sequence[int] = (),
        *,
        checksums: BatchChecksums = NO_CHECKSUMS,
        count: float = 0.0,
    ) -> float:
        """Check that all ranks begin the same phase, and sum `count` over the replicas. All ranks must call this.

        Args:
            phase: Phase that begins.
            step: Number of steps since training began.
            sizes: Number of samples in each mini-batch.
            checksums: Checksums of the inputs and targets that this rank has.
            count: On the last stage, number of samples or tokens in the loss of this replica.

        Returns:
            On the last stage, the sum of `count` over all replicas.

        Raises:
            TrainingError: Another rank begins another phase, step, or mini-batch, or its script has done something
                else in earlier steps.
        """
        if self._place.num_devices * self._place.num_replicas == 1:
            return count
        self.has_ended = phase == "end"
        begun = _BegunPhase(phase, step, tuple(sizes), checksums)
        self._compare_along_pipeline(begun)
        total = self._compare_replicas(begun, count)
        if self.has_ended:
            # Without this, a rank could exit normally before another rank detects the difference.
            self._activity.begin(_DOING[phase], waits_for=ANY)
            dist.all_reduce(self._received)
            self.wait_until_sent()
        return total

    def wait_until_sent(self) -> None:
        """Wait until the next rank has received this rank's last message."""
        wait_for_all(self._sending)
        self._sending = []

    def _compare_along_pipeline(self, begun: _BegunPhase) -> None:
        place, group = self._place, self._groups.pipeline
        self._script.end_step()
        self._activity.begin(_DOING[begun.phase], waits_for=place.position - 1 if place.position else None)
        if place.position > 0:
            previous = place.rank_of(place.position - 1)  # stage k < K is on device k, in a loop and in a V
            wait_for_all(_start_transfer(dist.irecv, self._received, previous, group))
            *numbers, count, options, gradients, added, weights = self._received.tolist()
            received = _BegunPhase.read(numbers)
            if received._replace(checksums=begun.checksums) != _BegunPhase.read(begun.numbers):
                raise self._disagreement(begun, received, previous, has_more=place.position > 1)
            if received.checksums.differ_from(begun.checksums):
                raise self._other_batch_error(begun.step, "a rank before it")
            begun = begun._replace(checksums=begun.checksums.completed_by(received.checksums))
            self._script.compare(
                ScriptChanges(int(count), int(options), gradients, added, weights), place.rank, previous
            )
        if place.position + 1 < place.num_devices:
            self.wait_until_sent()  # the previous message, which the next rank has received by now
            self._own.copy_(torch.tensor([*begun.numbers, *self._script.changes], dtype=torch.float64))
            self._sending = _start_transfer(dist.isend, self._own, place.rank_of(place.position + 1), group)

    def _compare_replicas(self, begun: _BegunPhase, count: float) -> float:
        place, group = self._place, self._groups.replicas
        if group is None or not place.is_last:
            return count
        self._activity.begin(_DOING[begun.phase], waits_for=ANY)
        # A replica may have one sample less than another: sizes are not compared.
        phase, step, *_ = begun.numbers
        checksums = begun.checksums if begun.checksums.is_whole else NO_CHECKSUMS
        own = torch.tensor([phase, step, count, *checksums[:2]], dtype=torch.float64, device=self._own.device)
        gathered = [torch.empty_like(own) for _ in range(place.num_replicas)]
        dist.all_gather(gathered, own, group=group)
        rows: list[list[float]] = torch.stack(gathered).tolist()
        for replica, row in enumerate(rows):
            rank, other = place.rank_of(place.num_stages - 1, replica), _BegunPhase(_PHASES[int(row[0])], int(row[1]))
            if other != begun.without_batch:
                raise self._disagreement(begun.without_batch, other, rank)
            if checksums.differ_from(BatchChecksums(int(row[3]), int(row[4]))):
                raise self._other_batch_error(begun.step, f"rank {rank}")
        return sum(row[2] for row in rows)

    def _disagreement(
        self, begun: _BegunPhase, other: _BegunPhase, rank: int, *, has_more: bool = False
    ) -> TrainingError:
        others = f"rank {rank}{' and all ranks before it are' if has_more else ' is'}"
        hint = "run the same steps, evaluations and checkpoints on every rank, and end all loops after the same step"
        if begun.without_batch == other.without_batch:
            hint = "give every rank the same mini-batches: from the same files, in the same order"
        return TrainingError(
            f"rank {self._place.rank} is {begun.description}, but {others} {other.description}", hint=hint
        )

    def _other_batch_error(self, step: int, other: str) -> TrainingError:
        return TrainingError(
            f"rank {self._place.rank} has another mini-batch at step {step} than {other}: inputs and targets would "
            "belong to different samples",
            hint="use no sampler that splits the data over ranks, and pass the loader to `pipeline.batches`, so that "
            "all ranks draw the same random numbers for it",
        )


def _start_transfer(
    operation: Callable[..., Any], numbers: Tensor, rank: int, group: dist.ProcessGroup | None
) -> list[dist.Work]:
    # As a batch of one operation, because NCCL then needs no communicator, and no memory, for this pair of ranks.
    works: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(operation, numbers, rank, group=group)])
    return works
