"""Losses and metrics without gradients, in between the steps of a training."""

from collections.abc import Sequence

from torch import Tensor

from planner.executor.build.assembly import Assembly
from planner.executor.feeding import Feeding
from planner.executor.job import Job, Peers
from planner.executor.run.evaluation import Evaluation, ForwardOnly, Metrics, Observed
from planner.executor.run.losses import sum_of
from planner.executor.run.parts import Part, micro_batches_of
from planner.executor.run.random_state import keeping_random_state
from planner.model.load import Batch

__all__ = ["Evaluator"]


class Evaluator:
    """Evaluates the stages of one process.

    Args:
        job: What the process is to do.
        peers: The processes that it talks with.
        assembly: Its stages.
        feeding: What they are fed with.
    """

    def __init__(self, job: Job, peers: Peers, assembly: Assembly, feeding: Feeding) -> None:
        self._job, self._peers, self._assembly, self._feeding = job, peers, assembly, feeding

    def evaluate(self, batch: Batch, metrics: Metrics | None, *, outputs: bool) -> Evaluation:
        """Loss and metrics of a batch of any size, on every rank: see `Pipeline.evaluate`."""
        parts = self._feeding.parts_of_any_size(batch)
        self._job.position.at("the evaluation")
        weights = self._feeding.weights(parts)
        observed = Observed(metrics, keeps_outputs=outputs)
        losses: list[Tensor] = []
        first = 0
        with keeping_random_state():
            for part in parts:
                losses += self._forward(part, weights[first : first + part.micro_batches], observed)
                first += part.micro_batches
        names = self._peers.relay.names(list(observed.sums)) if metrics is not None else []
        numbers = [sum_of(losses), observed.samples, *(observed.sums.get(name, 0.0) for name in names)]
        loss, samples, *sums = self._peers.relay.everywhere(numbers, len(numbers))
        self._job.position.at("between steps")
        means = {name: total / samples for name, total in zip(names, sums, strict=True)}
        return Evaluation(loss=loss, metrics=means, outputs=observed.outputs())

    # Private methods

    def _forward(self, part: Part, weights: Sequence[float], observed: Observed) -> list[Tensor]:
        """With the last stage, what each loss adds to that of the batch."""
        place, modules = self._job.place, self._assembly.modules
        forward = ForwardOnly(
            modules=modules,
            device=self._job.device,
            precision=self._job.balance.dtype,
            before=[None if stage == 0 else place.rank_of(stage - 1) for stage in place.stages],
            behind=[None if stage == place.num_stages - 1 else place.rank_of(stage + 1) for stage in place.stages],
            num_devices=place.num_devices,
        )
        self._assembly.expect(part, training=False)
        last = modules[-1]
        last.targets, last.seen = self._feeding.targets(part, weights), observed.see if place.is_last else None
        observed.expect(part, self._feeding.targets(part, [1.0] * len(weights)))
        try:
            losses = forward.run(micro_batches_of(self._feeding.input_tensors(part), part.micro_batches))
        finally:
            last.targets, last.seen = [], None
        return [loss * weight for loss, weight in zip(losses, weights, strict=True)]
