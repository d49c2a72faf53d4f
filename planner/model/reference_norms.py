"""Compute running statistics of batch normalization in the reference training loop, from inputs of the layers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def whole_mini_batch_statistics(model: nn.Module) -> Iterator[None]:
    """Update running statistics of batch normalization once, for all forwards of the `with` block together.

    At the end of the `with` block, each layer's statistics are updated with the mean and the unbiased variance of its
    inputs in the block, in all micro-batches.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.training and m.running_mean is not None]
    before = {norm: {name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms}
    seen: dict[_BatchNorm, list[Tensor]] = {norm: [] for norm in norms}
    forwards: list[None] = []

    def see(norm: Any, args: Any) -> None:
        if args:  # sums per channel, in float64
            values = args[0].detach().double().movedim(1, 0).flatten(1)
            sums = torch.stack([torch.full_like(values[:, 0], values.shape[1]), values.sum(1), values.square().sum(1)])
            seen[norm].append(sums)

    def count(_model: Any, _args: Any) -> None:
        forwards.append(None)

    hooks = [norm.register_forward_pre_hook(see) for norm in norms]
    hooks.append(model.register_forward_pre_hook(count))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    for norm in norms:
        for name, buffer in norm.named_buffers():
            buffer.copy_(before[norm][name])  # undoes the updates of the micro-batches
        # A layer that is called several times in a forward is updated once for each of these calls.
        num_calls = len(seen[norm]) // max(1, len(forwards))
        for call in range(num_calls):
            _update(norm, torch.stack(seen[norm][call::num_calls]).sum(0))


def _update(norm: _BatchNorm, sums: Tensor) -> None:
    """Update the running statistics of `norm`.

    Rows of `sums` are count, sum and sum of squares; columns are channels.
    """
    assert norm.running_mean is not None
    assert norm.running_var is not None
    count, mean = sums[0], sums[1] / sums[0]
    variance = (sums[2] - count * mean.square()) / (count - 1)
    momentum = norm.momentum
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked += 1
        momentum = 1 / float(norm.num_batches_tracked) if momentum is None else momentum
    for running, new in ((norm.running_mean, mean), (norm.running_var, variance)):
        running.lerp_(new.to(running.dtype), 0.0 if momentum is None else momentum)
