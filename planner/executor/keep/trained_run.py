"""What a checkpoint asks of the run that it is of; the pipeline answers, which lies on a higher floor."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from planner.core.values.balance import Balance
from planner.executor.run.placement import Place
from planner.executor.watch.failure import Watch
from planner.executor.watch.position import Position

__all__ = ["TrainedRun"]


class TrainedRun(Protocol):
    """One process of a run."""

    balance: Balance
    seed: int
    place: Place
    device: torch.device
    watch: Watch | None
    position: Position
    at_end: list[Callable[[], None]]
    """What is yet to be done when the loop has ended."""
    at_close: list[Callable[[], None]]

    @property
    def rank(self) -> int:
        """The number of this process in the job."""

    @property
    def step_index(self) -> int:
        """Steps since training began."""

    @property
    def first_names(self) -> Mapping[str, str]:
        """By name in the model's state dict, the first of the names that its tensor has there."""

    @property
    def computation(self) -> Mapping[str, str]:
        """Digests of what the whole model computes."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters here under the names they have in the whole model; each once."""

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors here of the model's state dict, under their names there."""

    def state_dict(self) -> dict[str, Any]:
        """What is kept beside tensors."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state_dict`."""
