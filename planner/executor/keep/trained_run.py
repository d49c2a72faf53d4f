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
    """One process of a run; `planner.executor.Pipeline` says what each of these is."""

    balance: Balance
    seed: int
    place: Place
    device: torch.device
    watch: Watch | None
    position: Position
    at_end: list[Callable[[], None]]
    at_close: list[Callable[[], None]]

    @property
    def rank(self) -> int: ...
    @property
    def step_index(self) -> int: ...
    @property
    def first_names(self) -> Mapping[str, str]: ...
    @property
    def computation(self) -> Mapping[str, str]: ...
    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...
    def named_tensors(self) -> dict[str, Tensor]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
