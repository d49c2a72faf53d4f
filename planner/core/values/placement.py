"""Placement of stages on K devices, if each device of a pipeline runs V stages (chunks).

    K = 3, V = 2          loop                    v
    device 0              stages 0, 3             stages 0, 5
    device 1              stages 1, 4             stages 1, 4
    device 2              stages 2, 5             stages 2, 3

In a loop (Narayanan et al. 2021, arXiv:2104.04473) consecutive stages go through all devices from first to last, V
times. In a V (Qi et al. 2024, arXiv:2405.15362) the direction alternates, so that two consecutive stages share a device
at each turn. In both placements, chunk v of a device is one of the stages v K to (v + 1) K - 1.
"""

from typing import Literal

Placement = Literal["loop", "v"]


def device_of(stage: int, num_devices: int, placement: Placement = "loop") -> int:
    """Return the index of the device that runs `stage`.

    Args:
        stage: Index of the stage in the pipeline.
        num_devices: Number of devices.
        placement: Placement of the stages.
    """
    chunk, place = divmod(stage, num_devices)
    return num_devices - 1 - place if placement == "v" and chunk % 2 else place


def stages_on(device: int, num_devices: int, chunks: int = 1, placement: Placement = "loop") -> tuple[int, ...]:
    """Return the stages of `device`, one for each of its chunks, in pipeline order.

    Args:
        device: Index of the device, 0 to `num_devices` - 1.
        num_devices: Number of devices.
        chunks: Stages per device.
        placement: Placement of the stages.
    """
    turned = num_devices - 1 - device
    return tuple(
        chunk * num_devices + (turned if placement == "v" and chunk % 2 else device) for chunk in range(chunks)
    )


def rank_of(stage: int, replica: int, num_devices: int, placement: Placement = "loop") -> int:
    """Return the rank of the process that runs `stage` in a replica; each replica has `num_devices` consecutive ranks.

    Args:
        stage: Index of the stage in the pipeline.
        replica: Index of the replica.
        num_devices: Number of devices.
        placement: Placement of the stages.
    """
    return replica * num_devices + device_of(stage, num_devices, placement)
