"""Parameters that several layers share, when the layers lie on different ranks.

Every rank holds a copy. The copies start equal (same seed), and stay equal because each optimizer sees the same
gradient: the sum over all ranks, those of the other replicas included. Stages of one rank share the parameter itself.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from planner.executor.placement import Place

__all__ = ["TiedGradients"]


class TiedGradients:
    """Sums the gradients of tied parameters over the ranks that hold them.

    Args:
        shared: (layer, name) of the parameters that lie in the same storage, as `shared_parameters` gives them.
        parameters: This rank's parameters by name.
        place: Where this rank is.
        stage_of: The stage of every layer.
    """

    def __init__(
        self,
        shared: Sequence[Sequence[tuple[int, str]]],
        parameters: Mapping[str, nn.Parameter],
        place: Place,
        stage_of: Sequence[int],
    ) -> None:
        self._groups: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self._kept_elsewhere: list[nn.Parameter] = []
        self.counted_elsewhere: list[nn.Parameter] = []
        """Those of this rank that another one of its replica has, too, and counts where each must count once."""
        for owners in shared:
            stages = {stage_of[layer] for layer, _ in owners}
            if len({place.rank_of(stage) for stage in stages}) < 2:
                continue
            ranks = sorted({place.rank_of(s, replica) for s in stages for replica in range(place.num_replicas)})
            # Every rank must take part in making every group, its own or not.
            group = dist.new_group(ranks)
            if place.rank in ranks:
                name = next(name for layer, name in owners if stage_of[layer] in place.stages)
                self._groups.append((parameters[name], group))
                if place.rank != ranks[0]:
                    self._kept_elsewhere.append(parameters[name])
                if place.rank != min(place.rank_of(stage) for stage in stages):
                    self.counted_elsewhere.append(parameters[name])

    def begin(self) -> None:
        """Before backward: of gradients that are there already, and the same on all, one copy stays to add to."""
        for parameter in self._kept_elsewhere:
            parameter.grad = None

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank that other stages' ranks hold as well."""
        return (parameter for parameter, _ in self._groups)

    def sum(self) -> None:
        """After backward: every copy gets the sum of all copies' gradients."""
        for parameter, group in self._groups:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
