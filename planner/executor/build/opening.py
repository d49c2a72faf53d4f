"""What a process needs before it joins the others: the planned model, its device, and names for the stages."""

import os
from pathlib import Path

import torch

from planner.core.errors import UsageError
from planner.core.values.balance import Balance
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
    if name != "cuda":
        return torch.device(name)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() <= local:
        raise UsageError(
            f"the plan is for CUDA, and this machine has {torch.cuda.device_count()} CUDA devices for rank {local}",
            hint="run on the machine it was planned for, or pass `--device cpu` to try it out",
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)
