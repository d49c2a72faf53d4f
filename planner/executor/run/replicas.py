"""Gradients summed over the replicas of a pipeline, in buckets, while the last micro-batch's backward still runs.

Every process of the same stages does the same sums in the same order: buckets are filled in the order in which backward
makes gradients (from the last parameter to the first), and each goes out as soon as it and all before it are full.
The last W says beforehand to which gradients it adds: all others are there when it begins. Of a backward in one piece
it is learnt in the first step, from how often a parameter's gradient is added to in the last micro-batch: more than
once where two recomputed layers share it.
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


class ReplicaGradients:
    """Sums the gradients of one process over the replicas.

    Args:
        stages: The trainable parameters of every stage of this process, first stage first. What several of them share
            is sent behind the last backward of all: which of them ends last, only the schedule knows.
        group: The processes that run the same stages.
        keeps_earlier: Whether gradients that are there before a step, the same in all replicas, stay in this one: the
            sum counts them once.
    """

    def __init__(
        self, stages: Sequence[Iterable[nn.Parameter]], group: dist.ProcessGroup, *, keeps_earlier: bool
    ) -> None:
        self._group = group
        self._keeps_earlier = keeps_earlier
        self.is_last_part = True
        """Whether the micro-batches that run now are the last ones of the mini-batch."""
        self._stages: list[list[_Bucket]] = []
        """Behind those of the stages, what they share."""
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
        """What is known of the backward that runs now; see `last_backward`."""
        self._open: list[_Bucket] = []
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self._added)

    def begin(self) -> None:
        """Before the first forward of a mini-batch."""
        if not self._keeps_earlier:
            for parameter in self._bucket_of:
                parameter.grad = None

    @contextmanager
    def last_backward(self, stage: int, expected: Mapping[nn.Parameter, int] | None = None) -> Iterator[None]:
        """What the last backward, or half of one, of the process's `stage`-th stage runs in.

        Args:
            stage: Place among the stages of the process.
            expected: How often gradients are added to in it, where that is known before it runs: those of other
                parameters are complete.
        """
        if not self.is_last_part:
            yield
            return
        self._open, self._expected = self._stages[stage], expected
        for parameter in (p for bucket in self._open for p in bucket.parameters):
            self._additions[parameter] = 0
        if expected is not None:
            self._start_complete()
        yield
        self._open = []
        for bucket in self._stages[stage]:
            bucket.start()

    def finish(self) -> None:
        """After the last backward: waits until every gradient is the sum over all replicas."""
        if not self._bucket_of:
            return
        present = [parameter.grad is not None for parameter in self._bucket_of]
        device = next(iter(self._bucket_of)).device
        flags = torch.tensor(present, dtype=torch.int32, device=device)
        # Without a gradient in any replica there is none, as in the unpipelined model.
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
                "a parameter's gradient was added to more often than in the first step, after it had been sent",
                hint="a layer that checkpoints its own parts must use each parameter equally often in every step",
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
        # One that was not seen in the first step may come or not: its bucket waits for the end of the backward.
        return 0 < self._usual.get(parameter, 0) <= self._additions[parameter]


def is_of_replicas(hook: Callable[..., object]) -> bool:
    """Whether a hook on a parameter is one of `ReplicaGradients`: it counts, and begins to with the last backward."""
    return isinstance(getattr(hook, "__self__", None), ReplicaGradients)


class _Bucket:
    """Parameters whose gradients are summed in one message."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        self.parameters = parameters
        self._group = group
        self._sums: Sequence[Tensor] = ()
        self._work: dist.Work | None = None

    @property
    def is_started(self) -> bool:
        """Whether the gradients are on their way."""
        return self._work is not None

    def start(self) -> None:
        """Sends the gradients, unless they are on their way."""
        if self._work is not None:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        is_alone = len(gradients) == 1 and gradients[0].is_contiguous()
        flat = gradients[0].view(-1) if is_alone else torch.cat([gradient.flatten() for gradient in gradients])
        places = pairwise(accumulate((p.numel() for p in self.parameters), initial=0))
        self._sums = [flat[first:end].view_as(p) for p, (first, end) in zip(self.parameters, places, strict=True)]
        for parameter, total in zip(self.parameters, self._sums, strict=True):
            # The gradient is from here on where it is summed, so that there is never a second copy of all of them.
            parameter.grad = None if parameter.grad is None else total
        self._work = dist.all_reduce(flat, group=self._group, async_op=True)

    def finish(self, present: set[nn.Parameter]) -> None:
        """Waits, and gives their sums to those parameters that have a gradient in some replica."""
        self.start()
        assert self._work is not None
        self._work.wait()
        for parameter, total in zip(self.parameters, self._sums, strict=True):
            parameter.grad = total if parameter in present else None
        self._sums, self._work = (), None


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """`parameters` in order, as many of one dtype together as make a message."""
    some: list[nn.Parameter] = []
    for parameter in parameters:
        size = sum(p.nbytes for p in some) + parameter.nbytes
        if some and (size > BUCKET_BYTES or parameter.dtype != some[0].dtype):
            yield some
            some = []
        some.append(parameter)
    if some:
        yield some
