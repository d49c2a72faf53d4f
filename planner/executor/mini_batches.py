"""Mini-batches of a run: this process's part of each mini-batch, and the tensors that enter its stages."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, starmap
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from planner.core.errors import UsageError
from planner.core.schedule import schedule_of
from planner.executor.job import RankJob
from planner.executor.run.loader import (
    ResumableLoader,
    check_loader_state,
    does_sampler_split_data,
    repeat_train_batches,
    restore_generators,
    seeded_batches,
)
from planner.executor.run.losses import UNCOUNTED, loss_counts
from planner.executor.run.parts import (
    MiniBatchPart,
    count_samples,
    micro_batches_of,
    mini_batch_parts,
    tensors_in_value,
)
from planner.executor.run.same_batch import NO_CHECKSUMS, BatchChecksums
from planner.model.label_counts import label_count
from planner.model.load import Batch, LoadedModel, to_device
from planner.model.precision import to_precision
from planner.model.seeding import example_mini_batch

_META = torch.device("meta")


class MiniBatches:
    """Training data of a process: the model's own data, example mini-batches, or a user's loader."""

    def __init__(self, job: RankJob, model: LoadedModel) -> None:
        self._job, self._model = job, model
        self._loader: ResumableLoader | None = None
        self._loader_state: Mapping[str, Any] | None = None
        """Loader state of a checkpoint, until `batches_of_steps` draws from a loader."""
        self._last_loader: Iterable[Any] | None = None
        """Latest loader that `batches_of_steps` has received."""
        self._num_loaders = 0
        """Number of loaders that `batches_of_steps` has received, such as one for each epoch or training phase."""
        self._is_first = True
        """True until this process draws a mini-batch, or skips a finished training phase that uses no loader."""
        self._checksums: BatchChecksums | None = None
        """Checksums of the next step's whole mini-batch if `own_part` got it, else of this replica's part."""
        self._is_compared = False
        """True if the ranks have compared all elements of a mini-batch since the start or the resume of the run."""

    def batches_of_steps(self, begin: int, end: int, loader: Iterable[Any] | None = None) -> Iterator[Batch]:
        """Yield this rank's parts of the mini-batches of steps `begin` to `end - 1`.

        Args:
            begin: First step.
            end: Step after the last step.
            loader: User's loader; None for the model's data.

        Raises:
            UsageError: A resumed run continues within the epoch of a loader, but `loader` is None or differs from it.
        """
        drawn: Iterator[Any]
        own_part = self.own_part
        if loader is not None and loader is not self._last_loader:
            self._last_loader, self._num_loaders = loader, self._num_loaders + 1
        if begin >= end:
            self._skip_finished(loader)
            return
        if loader is not None:
            if does_sampler_split_data(loader, self._job.place):
                own_part = self._without_unneeded
            drawn = islice(self._begun(loader, begin), end - begin)
        elif self._loader_state is not None:
            raise UsageError(
                "the checkpoint was written in the middle of a loader's epoch, but `batches` got no loader",
                hint="pass the same loader as before: `pipeline.batches(given.steps, loader)`",
            )
        elif self._model.train_batches is None:
            drawn = map(self.example_batch, range(begin, end))
        else:
            drawn = islice(
                seeded_batches(repeat_train_batches(self._model, self._job.balance.batch), self._job.seed), begin, end
            )
        self._is_first = False
        # No variable may hold a whole mini-batch through its step.
        yield from starmap(own_part, map(_checked_pair, drawn))

    def example_batch(self, step: int) -> Batch:
        """Return the example mini-batch of a step. It depends only on the seed and the step."""
        return example_mini_batch(self._model, self._job.balance.batch, seed=self._job.seed, step=step)

    def own_part(self, inputs: Any, targets: Any) -> Batch:
        """Return the samples of this process's replica. Every process passes the same mini-batch."""
        place = self._job.place
        batch = Batch(inputs, targets)
        self._note(batch, is_whole=True)
        size, replica, replicas = count_samples(batch), place.replica, place.num_replicas
        if replicas > 1 and size is not None:
            if size < replicas:
                raise UsageError(
                    f"got a mini-batch of {size} samples for {replicas} replicas",
                    hint="drop the last mini-batch (`drop_last=True`), or choose a batch that fits the data",
                )
            first, end = size * replica // replicas, size * (replica + 1) // replicas
            # Copy, because views would keep the other replicas' samples in memory.
            batch = Batch(*tree_map_only(Tensor, lambda t: t[first:end].clone(), tuple(batch)))
        return self._without_unneeded(*batch)

    def _without_unneeded(self, inputs: Any, targets: Any) -> Batch:
        place = self._job.place
        self._note(Batch(inputs, targets), is_whole=False)
        if not place.is_first:
            # The last stage counts labels, which are among the inputs of a model that computes its own loss.
            kept = {"labels": inputs["labels"]} if place.is_last and self._counts_labels(inputs) else None
            inputs = to_device(inputs, _META)
            inputs = inputs if kept is None else {**inputs, **kept}
        return Batch(inputs, targets if place.is_last else to_device(targets, _META))

    def take_checksums(self) -> BatchChecksums:
        """Return the checksums of the next step's mini-batch, to compare over the ranks.

        In the first step, and in the first one after a resume, they are checksums of all elements.
        """
        checksums, self._checksums, self._is_compared = self._checksums or NO_CHECKSUMS, None, True
        return checksums

    def parts(self, batch: Batch) -> Iterator[MiniBatchPart]:
        """Yield the parts of this replica's mini-batch. The micro-batches of a part have equal sizes.

        Raises:
            UsageError: The mini-batch is larger than planned.
        """
        balance = self._job.balance
        self._note(batch, is_whole=False)
        planned = balance.replica_batch
        size = count_samples(batch) or planned
        if planned < size <= balance.batch:
            raise UsageError(
                f"got a mini-batch of {size} samples, but each of the {balance.replicas} pipelines gets {planned}",
                hint="give each pipeline its own part: `inputs, targets = pipeline.own_part(inputs, targets)`",
            )
        if size > planned:
            raise UsageError(
                f"got a mini-batch of {size} samples, the plan is for {planned}",
                hint="plan for this batch, or pass it in pieces to `accumulate`",
            )
        per_round = schedule_of(balance.schedule).micro_batch_multiple(self._job.place.num_devices)
        yield from mini_batch_parts(batch, size, self._job.micro_batch_size, micro_batches_per_round=per_round)

    def parts_of_any_size(self, batch: Batch) -> list[MiniBatchPart]:
        """Return the parts of a batch for evaluation. The batch may be larger than the planned mini-batch."""
        size = count_samples(batch) or self._job.balance.replica_batch
        return list(mini_batch_parts(batch, size, self._job.micro_batch_size))

    def loss_item_counts(self, parts: Sequence[MiniBatchPart]) -> list[float]:
        """Return, for each micro-batch, the number of items that its loss averages over.

        Items are samples, labels, or what `loss_count` counts. On ranks without the last stage, the list is empty.
        """
        if not self._job.place.is_last:
            return []
        if self._model.loss_count is not None:
            targets = [t for part in parts for t in micro_batches_of(part.batch.targets, part.micro_batches)]
            return loss_counts(self._model.loss_count, targets, self._model.source)
        if all(self._counts_labels(part.batch.inputs) for part in parts):
            inputs = [x for part in parts for x in micro_batches_of(part.batch.inputs, part.micro_batches)]
            return [float(label_count(each, self._model.counted_labels)) for each in inputs]
        return [float(part.micro_batch_size) for part in parts for _ in range(part.micro_batches)]

    def input_tensors(self, part: MiniBatchPart) -> list[Tensor]:
        """Return the model's input tensors on the device, in the planned precision.

        The list is empty on ranks that do not run the first stage.
        """
        if not self._job.place.is_first:
            return []
        return tensors_in_value(to_precision(to_device(part.batch.inputs, self._job.device), self._job.balance.dtype))

    def targets(self, part: MiniBatchPart, weights: Sequence[float]) -> list[Any]:
        """Return the targets of every micro-batch; an empty list on ranks without the last stage.

        If the loss of a micro-batch has the weight 0, its targets become a placeholder.
        """
        if not self._job.place.is_last:
            return []
        targets = micro_batches_of(to_device(part.batch.targets, self._job.device), part.micro_batches)
        return [target if weight else UNCOUNTED for target, weight in zip(targets, weights, strict=True)]

    def state_dict(self) -> Mapping[str, Any] | None:
        """Return the state of the loader for a checkpoint; None if there is no loader."""
        return self._loader.state_dict() if self._loader is not None else self._loader_state

    def load_state_dict(self, state: Any) -> None:
        """Keep the state of a data loader from a checkpoint until the loader is known.

        The state is loaded when `batches_of_steps` gets the data loader as an argument.
        """
        self._loader_state = check_loader_state(state)
        self._checksums, self._is_compared = None, False

    def _note(self, batch: Batch, *, is_whole: bool) -> None:
        # Other ranks use neither inputs nor targets.
        reads = self._job.place.is_first or self._job.place.is_last
        if reads and (is_whole or self._checksums is None):
            self._checksums = BatchChecksums.of(batch, is_whole=is_whole, reads_all=not self._is_compared)

    def _counts_labels(self, inputs: Any) -> bool:
        return bool(self._model.counted_labels) and isinstance(inputs, dict) and "labels" in inputs

    def _skip_finished(self, loader: Iterable[Any] | None) -> None:
        """Skip a training phase whose steps were completed before the resume.

        If the checkpoint has the state of this phase's loader, restore the loader's random generators.
        """
        if loader is None:
            self._is_first = False  # the next loader begins at its first batch
        elif self._loader_state is not None and self._loader_state.get("number") == self._num_loaders:
            restore_generators(loader, self._loader_state["now"])  # a later loader may draw from the same generator

    def _begun(self, loader: Iterable[Any], begin: int) -> Iterator[Any]:
        if self._loader is None or self._loader.loader is not loader:
            previous, state = self._loader, self._loader_state
            self._loader = ResumableLoader(loader, self._job.seed, number=self._num_loaders)
            if state is None and previous is not None:
                self._loader.begin_after(previous.state_dict())
            elif state is None and begin and self._is_first:
                # The checkpoint was written without a loader: skip the batches of earlier steps.
                next(islice(self._loader, begin - 1, None), None)
            elif state is not None and state.get("number", self._num_loaders) < self._num_loaders:
                self._loader.begin_after(state)
            elif state is not None:
                self._loader.load_state_dict(state)
            self._loader_state = None
        return iter(self._loader)


def _checked_pair(batch: Any) -> Any:
    """Return a mini-batch of a loader if it is a pair of inputs and targets; else raise UsageError."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch
    what = f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, (tuple, list)) else type(batch).__name__
    raise UsageError(
        f"got a {what} as mini-batch, expected a pair (inputs, targets)",
        hint="if the model computes its loss from its inputs, use `(inputs, None)`",
    )
