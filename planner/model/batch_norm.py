"""Deferred batch normalization: running statistics of whole mini-batches, although each micro-batch runs alone.

In training every micro-batch is normalized by its own statistics. A plain `BatchNorm` would update its running
statistics with every micro-batch, and once more when a micro-batch is recomputed. This module updates them once per
step, with the mean and unbiased variance of the whole mini-batch. (Torchgpipe, the source, uses the biased variance.)

While a layer runs, a pair of scratch tensors (mean, variance) replaces its running statistics, with a momentum of one.
So torch's own kernel computes mean and variance, and no input is read twice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from planner.core.errors import ModelError
from planner.model.calling import restore_forward


def has_batch_norm(model: nn.Module) -> bool:
    """Return True if the model has a batch normalization in training mode."""
    return any(isinstance(module, _BatchNorm) and module.training for module in model.modules())


def uses_batch_in_evaluation(model: nn.Module) -> bool:
    """Return True if a batch normalization of the model has no running statistics."""
    return any(isinstance(module, _BatchNorm) and module.running_mean is None for module in model.modules())


@contextmanager
def defer_batch_norms(model: nn.Module) -> Iterator["BatchStatistics"]:
    """Collect batch normalization statistics in the `with` block, instead of updating running statistics.

    Raises:
        ModelError: The model has a `SyncBatchNorm` in training mode.
    """
    before = {module: vars(module).get("forward") for module in model.modules()}
    try:
        yield BatchStatistics(model.named_modules())
    finally:
        for module, forward in before.items():
            restore_forward(module, forward)


class BatchStatistics:
    """Collector of batch normalization statistics. Layers in evaluation mode are left unchanged."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]] = ()) -> None:
        self.is_collecting = False
        self._calls: dict[tuple[nn.Module, int], _NormCall] = {}
        self.watch(modules)

    def watch(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Collect the statistics of the batch normalizations in `modules` (pairs of path and module), too.

        Raises:
            ModelError: One of `modules` is a `SyncBatchNorm` in training mode.
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
        """Collect the statistics of one micro-batch, whose forward runs in the `with` block."""
        self.is_collecting = True
        try:
            yield
        finally:
            self.is_collecting = False
        # This line is not reached if the forward failed.
        if any(call.new for call in self._calls.values()):
            self._add()

    def scratch_of(self, module: _BatchNorm, num_values: int) -> tuple[Tensor, Tensor]:
        """Return two scratch tensors of shape (channels,) for the mean and variance of the next input of `module`.

        `num_values` is the number of values per channel in this input.
        """
        # A layer that is called again in the same forward has a scratch pair for each call.
        number = 0
        while (module, number) in self._calls and self._calls[module, number].new:
            number += 1
        call = self._calls.get((module, number))
        if call is None:
            call = self._calls[module, number] = _NormCall.of(module)
        call.new = num_values
        return call.mean, call.variance

    def update_running_statistics(self, group: dist.ProcessGroup | None = None) -> None:
        """Update the running statistics with the sums of this step, added over all ranks of `group`."""
        # The order is that of the first forward. It is equal in all replicas, so each sum meets its counterparts.
        calls = list(self._calls.values())
        if calls and group is not None:
            _sum_over(group, calls)
        for call in calls:
            call.update_running_statistics()

    def _add(self) -> None:
        calls_of: dict[int, list[_NormCall]] = {}
        for call in self._calls.values():
            if call.new:
                calls_of.setdefault(call.new, []).append(call)
        # Layers with equal numbers of values share one kernel; a convolutional network has a handful of such groups.
        for values, calls in calls_of.items():
            means, variances = [call.mean for call in calls], [call.variance for call in calls]
            torch._foreach_add_([call.sum for call in calls], means, alpha=values)
            # variance = (sum of squares - values * mean^2) / (values - 1), solved for the sum of squares.
            squares = [call.squares for call in calls]
            torch._foreach_add_(squares, variances, alpha=values - 1)
            torch._foreach_addcmul_(squares, means, means, value=values)
            # `data` hides the write from autograd, which saved these tensors and would report them as modified.
            torch._foreach_zero_([scratch.data for scratch in (*means, *variances)])
            for call in calls:
                call.count += values
                call.new = 0


@dataclass
class _NormCall:
    """Statistics of the n-th call of a batch norm in a forward: for the current micro-batch, and sums over the step."""

    module: _BatchNorm
    mean: Tensor
    """Mean per channel in the current micro-batch."""
    variance: Tensor
    """Unbiased variance per channel in the current micro-batch."""
    sum: Tensor
    """Sum of the values per channel over the step so far, in float64: the variance is a difference of large sums."""
    squares: Tensor
    """Sum of the squares of the input's values per channel, in float64."""
    new: int = 0
    """Number of values per channel from which `mean` and `variance` were computed; 0 before the layer has run."""
    count: int = 0
    """Number of values per channel in `sum` and `squares`."""

    @classmethod
    def of(cls, module: _BatchNorm) -> "_NormCall":
        assert module.running_mean is not None
        assert module.running_var is not None
        mean, variance = torch.zeros_like(module.running_mean), torch.zeros_like(module.running_var)
        total, squares = mean.new_zeros(2, len(mean), dtype=torch.float64)
        return cls(module, mean, variance, total, squares)

    def update_running_statistics(self) -> None:
        if self.count:
            mean = self.sum / self.count
            # `count` is at least 2, because torch refuses to train on a single value per channel.
            self._update(mean, (self.squares - self.sum * mean) / (self.count - 1))
        self.count = 0
        self.sum.zero_()
        self.squares.zero_()

    def _update(self, mean: Tensor, variance: Tensor) -> None:
        module = self.module
        assert module.running_mean is not None
        assert module.running_var is not None
        momentum = module.momentum
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
            # If momentum is None, torch averages over all mini-batches so far.
            if momentum is None:
                momentum = 1 / float(module.num_batches_tracked)
        assert momentum is not None
        module.running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
        module.running_var.mul_(1 - momentum).add_(variance, alpha=momentum)


def _sum_over(group: dist.ProcessGroup, calls: Sequence[_NormCall]) -> None:
    # One all-reduce serves all layers. It includes the counts, which are exact in float64.
    counts = calls[0].sum.new_tensor([call.count for call in calls])
    sums = [part for call in calls for part in (call.sum, call.squares)]
    flat = torch.cat([*sums, counts])
    dist.all_reduce(flat, group=group)
    *summed, counts = flat.split([*map(len, sums), len(calls)])
    for part, total in zip(sums, summed, strict=True):
        part.copy_(total)
    for call, count in zip(calls, counts.tolist(), strict=True):
        call.count = int(count)


class _Deferred:
    def __init__(self, module: _BatchNorm, statistics: BatchStatistics) -> None:
        before = vars(module).get("forward")
        # The model may have been part of another pipeline before, which left its own `_Deferred` there.
        self._forward: Callable[..., Any] = before._forward if isinstance(before, _Deferred) else module.forward
        self._module = module
        self._statistics = statistics

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if not module.training:
            return self._forward(*args, **kwargs)
        names = ("running_mean", "running_var", "num_batches_tracked")
        buffers, momentum = {name: module._buffers[name] for name in names}, module.momentum
        # A layer without running statistics normalizes by those of its input, and stores none.
        scratch: tuple[Tensor | None, Tensor | None] = (None, None)
        if self._statistics.is_collecting:
            value: Tensor = args[0] if args else next(iter(kwargs.values()))
            scratch = self._statistics.scratch_of(module, value.numel() // value.shape[1])
        module._buffers.update(zip(names, (*scratch, None), strict=True))
        # With momentum 1, the scratch tensors hold the statistics of this micro-batch alone.
        module.momentum = 1.0
        try:
            return self._forward(*args, **kwargs)
        finally:
            module._buffers.update(buffers)
            module.momentum = momentum
