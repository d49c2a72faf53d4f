"""Parameters that several layers share, when the layers lie on different ranks.

Every rank holds a copy. The copies start equal (same seed), and stay equal because each optimizer sees the same
gradient: the sum over all ranks, those of the other replicas included. Stages of one rank share the parameter itself.
What is frozen has no gradient, and needs no sum: it stays as it is.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.executor.run.gradients import expect_dense
from planner.executor.run.placement import Place


class TiedGradients:
    """Sums the gradients of tied parameters over the ranks that hold them.

    Args:
        shared: (layer, name) of the parameters that lie in the same storage, as `shared_parameters` gives them.
        parameters: This rank's, by name.
        place: Where this rank is.
        stage_of: By layer, its stage.
        trained: The names of the parameters of all stages that are trained.

    Raises:
        ModelError: One is trained under one name and frozen under another, which another rank holds.
    """

    def __init__(
        self,
        shared: Sequence[Sequence[tuple[int, str]]],
        parameters: Mapping[str, nn.Parameter],
        place: Place,
        stage_of: Sequence[int],
        *,
        trained: Collection[str],
    ) -> None:
        self._groups: list[tuple[nn.Parameter, dist.ProcessGroup]] = []
        self._kept_elsewhere: list[nn.Parameter] = []
        self._summed: list[Tensor] = []
        """Until the next step: a thread of gloo's holds them a little longer than their sum takes. What that lets go of
        last, no recorder of this thread sees go."""
        self.counted_elsewhere: list[nn.Parameter] = []
        """What another rank of the replica has, too, and counts where each parameter must count once."""
        for owners in shared:
            stages = {stage_of[layer] for layer, _ in owners}
            if len({place.rank_of(stage) for stage in stages}) < 2:
                continue
            if not _is_trained([name for _, name in owners], trained):
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
        self._summed.clear()
        for parameter in self._kept_elsewhere:
            parameter.grad = None

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters here that other stages' ranks hold as well."""
        return (parameter for parameter, _ in self._groups)

    def sum(self) -> None:
        """After backward: every copy gets the sum of all copies' gradients."""
        for parameter, group in self._groups:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            expect_dense([parameter.grad], "ranks that share a parameter")
            dist.all_reduce(parameter.grad, group=group)
            self._summed.append(parameter.grad)


def _is_trained(names: Sequence[str], trained: Collection[str]) -> bool:
    frozen = [name for name in names if name not in trained]
    if frozen and len(frozen) < len(names):
        other = next(name for name in names if name in trained)
        raise ModelError(
            f'"{frozen[0]}" is frozen and lies in the memory of "{other}", which is trained on another rank: '
            "it would not follow",
            hint="make them one parameter, or keep their layers in one stage (`--together`)",
        )
    return not frozen
