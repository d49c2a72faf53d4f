"""Parameters that several layers share, when the layers lie on different ranks.

Every rank holds a copy. The copies start equal (`initial_values`), and stay equal because each optimizer sees the same
gradient: the sum over all ranks, those of the other replicas included. Stages of one rank share the parameter itself.
What is frozen has no gradient, and needs no sum: it stays as it is.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.executor.run.placement import Place


class TiedGradients:
    """Sums the gradients of tied parameters over the ranks that hold them.

    Args:
        shared: (layer, name) of the parameters that lie in the same storage, as `shared_parameters` gives them.
        parameters: This rank's, by name.
        place: Where this rank is.
        stage_of: By layer, its stage.
        trained: The names of the parameters of all stages that are trained.
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
        self._groups: list[tuple[list[nn.Parameter], dist.ProcessGroup]] = []
        """Parameters that the same ranks hold, and these ranks."""
        self._kept_elsewhere: list[nn.Parameter] = []
        self._summed: list[Tensor] = []
        """Until the next step: a thread of gloo's holds them a little longer than their sum takes. What that lets go of
        last, no recorder of this thread sees go."""
        self.counted_elsewhere: list[nn.Parameter] = []
        """What another rank of the replica has, too, and counts where each parameter must count once."""
        by_ranks: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for owners in shared:
            stages = {stage_of[layer] for layer, _ in owners}
            if len({place.rank_of(stage) for stage in stages}) < 2 or owners[0][1] not in trained:
                continue
            ranks = sorted({place.rank_of(s, replica) for s in stages for replica in range(place.num_replicas)})
            held = by_ranks.setdefault(tuple(ranks), [])
            if place.rank in ranks:
                name = next(name for layer, name in owners if stage_of[layer] in place.stages)
                held.append(parameters[name])
                if place.rank != ranks[0]:
                    self._kept_elsewhere.append(parameters[name])
                if place.rank != min(place.rank_of(stage) for stage in stages):
                    self.counted_elsewhere.append(parameters[name])
        for among, held in by_ranks.items():
            # Every rank must take part in making every group, its own or not.
            group = dist.new_group(list(among))
            if held:
                self._groups.append((held, group))

    def begin(self) -> None:
        """Before backward: of gradients that are there already, and the same on all, one copy stays to add to."""
        self._summed.clear()
        for parameter in self._kept_elsewhere:
            parameter.grad = None

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters here that other stages' ranks hold as well."""
        return (parameter for parameters, _ in self._groups for parameter in parameters)

    def sum(self) -> None:
        """Sum the gradients of all copies after backward; without a gradient on any rank there is none."""
        for parameters, group in self._groups:
            present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
            present = present.to(parameters[0].device)
            dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
            for parameter in (p for p, is_somewhere in zip(parameters, present.tolist(), strict=True) if is_somewhere):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=group)
                self._summed.append(parameter.grad)
