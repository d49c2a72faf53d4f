"""Parameters that several layers share, when the layers lie on different stages.

Every stage holds a copy. The copies start equal (same seed), and stay equal because each optimizer sees the same
gradient: the sum over all stages.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from planner.model.chain import Layer

__all__ = ["TiedGradients"]


class TiedGradients:
    """Sums the gradients of tied parameters over the stages that hold them.

    Args:
        tied: Parameter name to the names it shares storage with, over the whole model.
        layers: This stage's layers.
        rank: This stage.
        owners: Layer name to stage.
    """

    def __init__(
        self, tied: Mapping[str, tuple[str, ...]], layers: Sequence[Layer], rank: int, owners: Mapping[str, int]
    ) -> None:
        mine = {name: parameter for layer in layers for name, parameter in layer.parameter_names().items()}
        self._groups: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        done: set[str] = set()
        for name in sorted(tied):
            if name in done:
                continue
            names = (name, *tied[name])
            done.update(names)
            ranks = sorted({_stage_of(each, owners) for each in names})
            if len(ranks) < 2:
                continue
            # Every rank must take part in making every group, its own or not.
            group = dist.new_group(ranks)
            if rank in ranks:
                self._groups.append((next(mine[each] for each in names if each in mine), group))

    def sum(self) -> None:
        """After backward: every copy gets the sum of all copies' gradients."""
        for parameter, group in self._groups:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)


def _stage_of(parameter_name: str, owners: Mapping[str, int]) -> int:
    layer = parameter_name
    while layer not in owners:
        layer = layer.rpartition(".")[0]
    return owners[layer]
