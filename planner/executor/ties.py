"""Parameters that several layers share, when the layers lie on different stages.

Every stage holds a copy. The copies start equal (same seed), and stay equal because each optimizer sees the same
gradient: the sum over all stages.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["TiedGradients"]


class TiedGradients:
    """Sums the gradients of tied parameters over the stages that hold them.

    Args:
        shared: (layer, name) of the parameters that lie in the same storage, as `shared_parameters` gives them.
        parameters: This stage's parameters by name.
        rank: This stage.
        stage_of: The stage of every layer.
    """

    def __init__(
        self,
        shared: Sequence[Sequence[tuple[int, str]]],
        parameters: Mapping[str, nn.Parameter],
        rank: int,
        stage_of: Sequence[int],
    ) -> None:
        self._groups: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self.counted_elsewhere: list[nn.Parameter] = []
        """Those of this stage that an earlier one has, too."""
        for owners in shared:
            ranks = sorted({stage_of[layer] for layer, _ in owners})
            if len(ranks) < 2:
                continue
            # Every rank must take part in making every group, its own or not.
            group = dist.new_group(ranks)
            if rank in ranks:
                name = next(name for layer, name in owners if stage_of[layer] == rank)
                self._groups.append((parameters[name], group))
                if rank != ranks[0]:
                    self.counted_elsewhere.append(parameters[name])

    def begin(self) -> None:
        """Before backward: of gradients that are there already, and the same on all, one copy stays to add to."""
        for parameter in self.counted_elsewhere:
            parameter.grad = None

    def sum(self) -> None:
        """After backward: every copy gets the sum of all copies' gradients."""
        for parameter, group in self._groups:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
