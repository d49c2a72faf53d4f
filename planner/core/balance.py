"""The balance configuration: what the executor needs of a plan. These are the values behind `balance.yaml`."""

from dataclasses import dataclass, field
from typing import Final, Literal

from planner.core.plan import Recompute, Schedule
from planner.core.precision import Precision
from planner.core.profile import Generator, Model

__all__ = ["BALANCE_SCHEMA", "Balance", "StageBalance"]

BALANCE_SCHEMA: Final = "gpipe-plan/balance/v1"

_FORBID = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBalance:
    """One stage: its layers by module path."""

    __pydantic_config__ = _FORBID
    index: int
    recompute: Recompute
    layers: tuple[str, ...]
    recomputed: tuple[str, ...] = ()
    """Those of `layers` that are recomputed, each on its own, where `recompute` is `layers`."""
    peak_bytes: int = 0
    """Memory that the plan predicts for it, to be told when there is too little; 0 where nothing is predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """The cuts by name, so that a model whose layers moved is caught, and how to run them."""

    __pydantic_config__ = _FORBID
    schema: Literal["gpipe-plan/balance/v1"] = BALANCE_SCHEMA
    generator: Generator | None = None
    plan_digest: str
    model: Model
    """`source` is relative to the folder of this file."""
    optimizer: str = ""
    dtype: Precision = ""
    """As `profile --dtype`; empty where the model runs as it is built."""
    device: str = "cpu"
    threads: int = 1
    schedule: Schedule
    batch: int
    micro_batches: int
    balance: tuple[int, ...]
    stages: tuple[StageBalance, ...] = field(default=())

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.balance)
