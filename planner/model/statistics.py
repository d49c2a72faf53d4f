"""What running statistics of batch normalisations take beside themselves, where they are those of whole mini-batches.

The executor collects them over the micro-batches (`planner.executor.run.batch_norm`), and the profile counts what it
collects in.
"""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from planner.model.stage import ModelStage

__all__ = ["collecting_bytes", "collecting_layers"]

_SUM_BYTES = 16
"""Per channel, in float64: sums of values and of their squares."""


def collecting_layers(module: nn.Module) -> list[_BatchNorm]:
    """The batch normalisations in `module` whose running statistics training changes."""
    parts = module.holders if isinstance(module, ModelStage) else module.modules()
    norms = (part for part in parts if isinstance(part, _BatchNorm))
    return [norm for norm in norms if norm.training and norm.running_mean is not None]


def collecting_bytes(module: nn.Module) -> int:
    """Bytes held all through training to collect the running statistics of the batch normalisations in `module`.

    For every channel a mean and a variance of the micro-batch that runs, in the precision of the running statistics,
    and the sums. A layer that is called several times in a forward takes them as often; once is counted.
    """
    means = [layer.running_mean for layer in collecting_layers(module) if layer.running_mean is not None]
    return sum(2 * mean.nbytes + _SUM_BYTES * mean.numel() for mean in means)
