"""Which device runs which stages, where each device of a pipeline runs several: its chunks.

    K = 3, V = 2          loop                    v
    device 0              stages 0, 3             stages 0, 5
    device 1              stages 1, 4             stages 1, 4
    device 2              stages 2, 5             stages 2, 3

In a loop (Narayanan et al. 2021, arXiv:2104.04473) the chain passes all devices from first to last again and again; in
a V (Qi et al. 2024, arXiv:2405.15362) it turns round at either end, where two neighbours are on one device. Chunk v of
a device is in either case one of the stages v K to (v + 1) K - 1.
"""

from collections.abc import Sequence
from typing import Literal

Placement = Literal["loop", "v"]


def device_of(stage: int, num_devices: int, placement: Placement = "loop") -> int:
    """The device, 0 to K-1, that runs `stage`, counted along the chain."""
    chunk, place = divmod(stage, num_devices)
    return num_devices - 1 - place if placement == "v" and chunk % 2 else place


def stages_on(device: int, num_devices: int, chunks: int = 1, placement: Placement = "loop") -> tuple[int, ...]:
    """The stages that `device` runs, one for each of its V chunks, in the order of the chain."""
    turned = num_devices - 1 - device
    return tuple(
        chunk * num_devices + (turned if placement == "v" and chunk % 2 else device) for chunk in range(chunks)
    )


def rank_of(stage: int, replica: int, order: Sequence[int], placement: Placement = "loop") -> int:
    """The process that runs `stage` in a replica: replicas lie one behind the other, K processes each.

    `order` is the device of each place in the pipeline, first to last.
    """
    return replica * len(order) + order[device_of(stage, len(order), placement)]
