"""What a process needs before it joins the others: the planned model, its device, and names for the stages."""

import os
from pathlib import Path

import torch

from planner.core.errors import UsageError
from planner.core.values.balance import Balance
from planner.device.kinds import DEVICE_KINDS
from planner.model.again import load_again
from planner.model.load import LoadedModel

__all__ = ["device_of_rank", "load_planned", "stage_name"]


def load_planned(balance: Balance, folder: Path) -> LoadedModel:
    """The model that a balance configuration in `folder` is for, in the precision planned."""
    path, colon, entry = balance.model.source.rpartition(":")
    source = f"{os.path.relpath(folder / path)}{colon}{entry}"
    return load_again(source, balance.model, balance.dtype, optimizer=balance.optimizer)


def stage_name(balance: Balance, stage: int) -> str:
    """What to call a stage in messages."""
    layers = balance.stages[stage].layers
    return f"stage {stage} (layer{f's {layers[0]} to' * (len(layers) > 1)} {layers[-1]})"


def device_of_rank(name: str) -> torch.device:
    """The device of this process, by the kind that was planned for.

    Raises:
        UsageError: This machine has none for it.
    """
    if name not in DEVICE_KINDS:  # a device by its number, say
        return torch.device(name)
    kind, local = DEVICE_KINDS[name], int(os.environ.get("LOCAL_RANK", "0"))
    if kind.count() <= local:
        raise UsageError(
            f"the plan is for {kind.title}, and this machine has {kind.count()} {kind.title} devices for rank {local}",
            hint="run on the machine it was planned for, or pass `--device cpu` to try it out",
        )
    return kind.of_rank(local)
