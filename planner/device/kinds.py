"""Supported kinds of devices, by `torch.device.type`."""

from collections.abc import Mapping
from typing import Final

import torch

from planner.device.cpu import Cpu
from planner.device.cuda import Cuda
from planner.device.kind import DeviceKind

DEVICE_KINDS: Final[Mapping[str, type[DeviceKind]]] = {kind.name: kind for kind in (Cpu, Cuda)}


def kind_of(device: torch.device) -> DeviceKind:
    """Return the `DeviceKind` object for a torch device."""
    return DEVICE_KINDS[device.type](device)


def accelerator_in_use() -> DeviceKind | None:
    """Return the accelerator that this process already uses; None if the process uses only the CPU."""
    for kind in DEVICE_KINDS.values():
        if (device := kind.accelerator_in_use()) is not None:
            return device
    return None
