"""Deferred batch normalisation: running statistics of whole mini-batches, though each micro-batch runs alone.

In training every micro-batch is normalised by its own statistics. A plain `BatchNorm` would also update its running
statistics with each of them, and again where a micro-batch is recomputed. Here the sums over all micro-batches are
collected, and the running statistics are updated once per step with the mean and the unbiased variance of the whole
mini-batch: what the model in one piece would have done with the same inputs of the layer. (The idea is torchgpipe's,
which takes the biased variance.)

A layer finds its statistics in passing: while it runs, a scratch pair stands in the place of its running statistics,
with a momentum of one. Nothing is read twice. What it takes is counted by `planner.model.statistics`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from planner.core.errors import ModelError

__all__ = ["BatchStatistics"]


class BatchStatistics:
    """Collects for the batch normalisations among some modules; frozen ones (in evaluation mode) stay as they are.

    Args:
        modules: As for `watch`.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]] = ()) -> None:
        self.is_collecting = False
        self._calls: dict[tuple[nn.Module, int], _Call] = {}
        self._sums = torch.zeros(2, 0, dtype=torch.float64)
        self._counts: dict[tuple[int, ...], Tensor] = {}
        self.watch(modules)

    def watch(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Collects from now on for those among `modules`, too.

        Args:
            modules: By name; of a stage of a larger model also those that other stages run.

        Raises:
            ModelError: One of them is a `SyncBatchNorm`.
        """
        for name, module in modules:
            if isinstance(module, nn.SyncBatchNorm) and module.training:
                raise ModelError(
                    f'"{name}" is a SyncBatchNorm, which would wait for processes that run other layers',
                    hint="use a plain BatchNorm: here its running statistics are those of the whole mini-batch, too",
                )
            if isinstance(module, _BatchNorm) and module.running_mean is not None:
                vars(module)["forward"] = _Deferred(module, self)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Around one forward of a micro-batch that counts; any other leaves nothing behind."""
        self.is_collecting = True
        try:
            yield
        finally:
            self.is_collecting = False
        if any(call.new for call in self._calls.values()):
            self._add()

    def scratch_of(self, module: _BatchNorm, values: int) -> tuple[Tensor, Tensor]:
        """Where `module`, which is about to run, leaves mean and variance of its input.

        Args:
            module: The layer.
            values: How many it has per channel.
        """
        number = 0
        while (module, number) in self._calls and self._calls[module, number].new:
            number += 1
        call = self._calls.get((module, number))
        if call is None:
            call = self._calls[module, number] = _Call.of(module)
        call.new = values
        return call.mean, call.variance

    def commit(self, group: dist.ProcessGroup | None = None) -> None:
        """Updates running statistics with all that was collected since the last time.

        Args:
            group: The processes that run the same layers on other parts of the mini-batch, if there are any.
        """
        if not self._calls:
            return
        calls = list(self._calls.values())
        counts = [call.count for call in calls]
        if group is not None:
            counts = self._sum_over(group, counts)
        values = self._per_channel(counts, self._sums.device)
        mean = self._sums[0] / values
        variance = (self._sums[1] - self._sums[0] * mean) / (values - 1)
        sizes = [len(call.mean) for call in calls]
        for call, count, m, v in zip(calls, counts, mean.split(sizes), variance.split(sizes), strict=True):
            if count:
                call.update(m, v)
            call.count = 0
        self._sums.zero_()

    # Private methods

    def _add(self) -> None:
        """Adds what lies in the scratch pairs to the sums."""
        calls = list(self._calls.values())
        mean = torch.cat([call.mean for call in calls]).double()
        variance = torch.cat([call.variance for call in calls]).double()
        values = self._per_channel([call.new for call in calls], mean.device)
        new = torch.stack([mean * values, variance * (values - 1) + mean * mean * values])
        missing = new.shape[1] - self._sums.shape[1]
        if missing:  # in the first micro-batch, and where a layer runs that did not before
            self._sums = nn.functional.pad(self._sums.to(new.device), (0, missing))
        self._sums += new
        # By way of `data`: autograd keeps them beside what backward reads, and would take them for changed.
        torch._foreach_zero_([scratch.data for call in calls for scratch in (call.mean, call.variance)])
        for call in calls:
            call.count += call.new
            call.new = 0

    def _per_channel(self, counts: list[int], device: torch.device) -> Tensor:
        """`counts`, which are by call, for every channel; kept, as they are nearly always the same."""
        key = tuple(counts)
        if key not in self._counts:
            sizes = torch.tensor([len(call.mean) for call in self._calls.values()])
            self._counts[key] = torch.tensor(counts, dtype=torch.float64).repeat_interleave(sizes).to(device)
        return self._counts[key]

    def _sum_over(self, group: dist.ProcessGroup, counts: list[int]) -> list[int]:
        own = torch.tensor(counts, dtype=torch.float64, device=self._sums.device)
        both = torch.cat([self._sums.flatten(), own])
        dist.all_reduce(both, group=group)
        self._sums.copy_(both[: -len(counts)].view_as(self._sums))
        return [int(count) for count in both[-len(counts) :].tolist()]


@dataclass
class _Call:
    """One of the times that a layer is called in a forward; nearly always there is but one."""

    module: _BatchNorm
    mean: Tensor
    variance: Tensor
    """Unbiased; both are scratch, of the micro-batch that has just run."""
    new: int = 0
    """Values per channel that they are of; 0 before the layer has run."""
    count: int = 0
    """Values per channel in the sums."""

    @classmethod
    def of(cls, module: _BatchNorm) -> "_Call":
        assert module.running_mean is not None
        assert module.running_var is not None
        return cls(module, torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var))

    def update(self, mean: Tensor, variance: Tensor) -> None:
        """As `BatchNorm` does it, with the statistics of a whole mini-batch."""
        module = self.module
        assert module.running_mean is not None
        assert module.running_var is not None
        momentum = module.momentum
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1 / float(module.num_batches_tracked)
        assert momentum is not None
        module.running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
        module.running_var.mul_(1 - momentum).add_(variance, alpha=momentum)


class _Deferred:
    """Stands for the forward of a batch normalisation, whatever class it is of."""

    def __init__(self, module: _BatchNorm, statistics: BatchStatistics) -> None:
        before = vars(module).get("forward")
        # A finished model may have been in another pipeline.
        self._forward: Callable[..., Any] = before._forward if isinstance(before, _Deferred) else module.forward
        self._module = module
        self._statistics = statistics

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if not module.training:
            return self._forward(*args, **kwargs)
        names = ("running_mean", "running_var", "num_batches_tracked")
        buffers, momentum = {name: module._buffers[name] for name in names}, module.momentum
        # Without running statistics a layer takes those of its input, and leaves them nowhere.
        scratch: tuple[Tensor | None, Tensor | None] = (None, None)
        if self._statistics.is_collecting:
            value: Tensor = args[0] if args else next(iter(kwargs.values()))
            scratch = self._statistics.scratch_of(module, value.numel() // value.shape[1])
        module._buffers.update(zip(names, (*scratch, None), strict=True))
        module.momentum = 1.0
        try:
            return self._forward(*args, **kwargs)
        finally:
            module._buffers.update(buffers)
            module.momentum = momentum
