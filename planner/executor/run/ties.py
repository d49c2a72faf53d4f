"""Sum the gradients of tied parameters that layers on different ranks share.

Each of these ranks has a copy of the parameter. The copies start equal (`initial_values`), and stay equal because each
optimizer gets the same gradient: the sum over all copies, including those of other replicas. Stages on the same rank
share the parameter itself. Frozen parameters have no gradients, so they need no sum.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from planner.core.errors import TrainingError
from planner.executor.run.gradients import release_memory
from planner.executor.run.placement import ProcessPlace
from planner.model.layout import in_memory_order

_PIECE = 2**20  # on a CPU, torch first converts the elements to integers of 8 bytes
"""Number of elements whose bits are summed at a time."""

_ROUNDING = 1e-3
"""Largest rounding error of a parameter's copies on devices of different kinds, relative to its largest element."""


class TiedGradients:
    """Sum of the gradients of tied parameters over the ranks that have copies.

    Args:
        shared: Owners (layer, name) of each shared parameter, from `shared_parameters`.
        parameters: Parameters of this rank, by name.
        place: Place of this rank in the job.
        stage_of: Stage of each layer.
        trained: Names of the trained parameters of all stages.
    """

    def __init__(
        self,
        shared: Sequence[Sequence[tuple[int, str]]],
        parameters: Mapping[str, nn.Parameter],
        place: ProcessPlace,
        stage_of: Sequence[int],
        *,
        trained: Collection[str],
    ) -> None:
        self._names: dict[nn.Parameter, str] = {}
        self._groups: list[tuple[list[nn.Parameter], dist.ProcessGroup]] = []
        """For each set of ranks that share parameters: these parameters, and the process group of the ranks."""
        self._kept_elsewhere: list[nn.Parameter] = []
        self.counted_elsewhere: list[nn.Parameter] = []
        """Tied parameters that another rank counts in the norm of all gradients."""
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
                self._names[parameters[name]] = owners[0][1]
                if place.rank != ranks[0]:
                    self._kept_elsewhere.append(parameters[name])
                if place.rank != min(place.rank_of(stage) for stage in stages):
                    self.counted_elsewhere.append(parameters[name])
        for among, held in by_ranks.items():
            # torch requires every rank to create every group, even one that does not contain the rank.
            group = dist.new_group(list(among))
            if held:
                self._groups.append((held, group))

    def drop_copies(self) -> None:
        """Drop existing gradients of tied parameters, except those of one copy. Call this method before a backward."""
        for parameter in self._kept_elsewhere:
            parameter.grad = None

    @property
    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank that have copies on ranks of other stages."""
        return (parameter for parameters, _ in self._groups for parameter in parameters)

    def sum(self) -> None:
        """Sum the gradients of all copies after backward. A parameter without any gradient gets no gradient."""
        for parameters, group in self._groups:
            present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
            present = present.to(parameters[0].device)
            dist.all_reduce(present, op=dist.ReduceOp.MAX, group=group)
            for parameter in (p for p, is_somewhere in zip(parameters, present.tolist(), strict=True) if is_somewhere):
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                summed = parameter.grad.detach()
                dist.all_reduce(summed, group=group)
                release_memory(summed)

    def check_equal(self) -> None:
        """Check that the copies of each parameter have stayed equal. Every rank must call this method.

        Raises:
            TrainingError: Copies differ by more than a rounding error.
        """
        for parameters, group in self._groups:
            sums = torch.stack([_sum_of_bits(parameter) for parameter in parameters])
            lowest, highest = _lowest_and_highest(sums, group)
            changed = [p for p, is_equal in zip(parameters, (lowest == highest).tolist(), strict=True) if not is_equal]
            for parameter in changed:
                lowest, highest = _lowest_and_highest(_real(parameter), group)
                if bool(((highest - lowest).abs() > _ROUNDING * highest.abs().max()).any()):
                    raise TrainingError(
                        f'the copies of "{self._names[parameter]}", which layers on several ranks share, differ: the '
                        "script changed them in different ways",
                        hint="change parameters alike on every rank: random numbers for a parameter must depend on "
                        "its name, not on the order in which a rank draws them",
                    )


def _lowest_and_highest(tensor: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    lowest, highest = tensor.clone(), tensor.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    return lowest, highest


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Sum the bits of all elements, each read as an integer. The order of the elements does not change the sum."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    values = _real(tensor)
    pieces = values.view(integers[values.element_size()]).flatten().split(_PIECE)
    return torch.stack([piece.sum(dtype=torch.int64) for piece in pieces]).sum()


def _real(tensor: Tensor) -> Tensor:
    # Complex numbers become pairs of real numbers.
    values = tensor.detach()
    return in_memory_order(torch.view_as_real(values) if values.is_complex() else values)
