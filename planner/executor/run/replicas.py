"""Sum gradients over the replicas of a pipeline, in buckets, while the last micro-batch's backward still runs.

All processes of the same stages sum the same buckets in the same order. A bucket is a group of parameters whose
gradients are sent together. Buckets follow the order in which backward computes gradients, from the last parameter to
the first. A bucket is sent as soon as its gradients and those of all previous buckets are complete.

A weight-gradient pass (W) states which gradients it adds to; all other gradients are complete when the last W begins. A
whole backward does not state this, so the first step counts the additions to each gradient in the last micro-batch.
There is more than one addition if two recomputed layers share the parameter.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.core.cost.chain_costs import BUCKET_BYTES
from planner.core.errors import ModelError
from planner.executor.run.gradients import release_memory


class ReplicaGradients:
    """Gradients of one process, which it sums with those of the same stages in other replicas.

    Args:
        stages: Trainable parameters of every stage of this process, first stage first. Parameters that several stages
            share are sent after the last backward of all stages.
        group: Processes of all replicas that run the same stages.
        keeps_earlier: True if this replica keeps gradients that exist before a step. They are equal in all replicas, so
            only one replica may add them to the sum.
    """

    def __init__(
        self, stages: Sequence[Iterable[nn.Parameter]], group: dist.ProcessGroup, *, keeps_earlier: bool
    ) -> None:
        self._group = group
        self._keeps_earlier = keeps_earlier
        self.is_last_part = True
        """True if the current part of the mini-batch is the last one."""
        self._stages: list[list[_Bucket]] = []
        """Buckets of each stage, then the buckets of parameters that several stages share."""
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        parts = [dict.fromkeys(parameters) for parameters in stages]
        uses = Counter(parameter for part in parts for parameter in part)
        parts = [*({p: None for p in part if uses[p] == 1} for part in parts), {p: None for p in uses if uses[p] > 1}]
        for part in parts:
            buckets = [_Bucket(some, group) for some in _buckets([*part][::-1])]
            self._stages.append(buckets)
            self._bucket_of |= {parameter: bucket for bucket in buckets for parameter in bucket.parameters}
        self._additions = dict.fromkeys(self._bucket_of, 0)
        self._usual: dict[nn.Parameter, int] = {}
        self._expected: Mapping[nn.Parameter, int] | None = None
        """Number of additions to each gradient in the current backward; None if unknown."""
        self._open: list[_Bucket] = []
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._added)

    def drop_existing(self) -> None:
        """Drop existing gradients on all replicas except one, before the first forward of a mini-batch."""
        if not self._keeps_earlier:
            for parameter in self._bucket_of:
                parameter.grad = None

    @contextmanager
    def send_during_last_backward(
        self, stage: int, expected_additions: Mapping[nn.Parameter, int] | None = None
    ) -> Iterator[None]:
        """Send gradients while the `with` block runs the last backward (B or W) of a stage.

        If `is_last_part` is False, nothing is sent.

        Args:
            stage: Index of the stage among the stages of this process.
            expected_additions: For each parameter, how many times this backward adds to the gradient. The gradients of
                parameters that are not in the mapping are already complete. None if the numbers are unknown.
        """
        if not self.is_last_part:
            yield
            return
        self._open, self._expected = self._stages[stage], expected_additions
        for parameter in (p for bucket in self._open for p in bucket.parameters):
            self._additions[parameter] = 0
        if expected_additions is not None:
            self._start_complete()
        yield
        self._open = []
        for bucket in self._stages[stage]:
            bucket.start()

    def wait_for_sums(self) -> None:
        """Wait, after the last backward, until every gradient is the sum over all replicas."""
        if not self._bucket_of:
            return
        present = [parameter.grad is not None for parameter in self._bucket_of]
        device = next(iter(self._bucket_of)).device
        flags = torch.tensor(present, dtype=torch.int32, device=device)
        # A parameter without a gradient in all replicas gets no gradient, as in the unpartitioned model.
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group)
        somewhere = dict(zip(self._bucket_of, flags.tolist(), strict=True))
        for bucket in (bucket for buckets in self._stages for bucket in buckets):
            bucket.finish({parameter for parameter in bucket.parameters if somewhere[parameter]})
        self._usual = self._usual or dict(self._additions)

    def _added(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        if self._bucket_of[parameter] not in self._open:
            return
        self._additions[parameter] += 1
        if self._bucket_of[parameter].is_started:
            raise ModelError(
                "a backward added to a parameter's gradient more often than in the first step: the gradient had "
                "already been sent to the other replicas",
                hint="a layer that uses `torch.utils.checkpoint` must use each parameter equally often in every step",
            )
        self._start_complete()

    def _start_complete(self) -> None:
        for bucket in self._open:
            if not bucket.is_started:
                if not all(map(self._is_complete, bucket.parameters)):
                    return
                bucket.start()

    def _is_complete(self, parameter: nn.Parameter) -> bool:
        if self._expected is not None:
            return self._expected.get(parameter, 0) <= self._additions[parameter]
        # A gradient that did not occur in the first step may occur now: its bucket waits for the end of the backward.
        return 0 < self._usual.get(parameter, 0) <= self._additions[parameter]


def is_replica_hook(hook: Callable[..., object]) -> bool:
    """Return True if a hook on a parameter is one of `ReplicaGradients`."""
    return isinstance(getattr(hook, "__self__", None), ReplicaGradients)


class _Bucket:
    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = parameters
        self._group = group
        self._flat = torch.empty(0)
        """Gradients of the bucket in one tensor, to sum over replicas; empty before `start()` and after `finish()`."""
        self._sums: Sequence[Tensor] = ()
        self._work: dist.Work | None = None

    @property
    def is_started(self) -> bool:
        return self._work is not None

    def start(self) -> None:
        if self._work is not None:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        is_alone = len(gradients) == 1 and gradients[0].is_contiguous()
        flat = gradients[0].view(-1) if is_alone else torch.cat([gradient.flatten() for gradient in gradients])
        places = pairwise(accumulate((p.numel() for p in self.parameters), initial=0))
        self._sums = [flat[first:end].view_as(p) for p, (first, end) in zip(self.parameters, places, strict=True)]
        for parameter, total in zip(self.parameters, self._sums, strict=True):
            # The gradient becomes a view of the summed tensor, so that there is never a second copy of all gradients.
            parameter.grad = None if parameter.grad is None else total
        self._flat, self._work = flat, dist.all_reduce(flat, group=self._group, async_op=True)

    def finish(self, present: set[nn.Parameter]) -> None:
        # `present` are the parameters that have a gradient on any replica.
        self.start()
        assert self._work is not None
        self._work.wait()
        for parameter, total in zip(self.parameters, self._sums, strict=True):
            parameter.grad = total if parameter in present else None
        release_memory(self._flat)
        self._sums, self._work = (), None


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    # A bucket has at most `BUCKET_BYTES`, unless it has a single parameter.
    some: list[nn.Parameter] = []
    for parameter in parameters:
        size = sum(p.nbytes for p in some) + parameter.nbytes
        if some and (size > BUCKET_BYTES or parameter.dtype != some[0].dtype):
            yield some
            some = []
        some.append(parameter)
    if some:
        yield some
