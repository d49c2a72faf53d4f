"""Measure the links between neighboring processes of a pipeline, with torchrun.

Over gloo, a transfer occupies sender and receiver, and adds more time to a step than moving the bytes takes. The link
is therefore measured by timing training steps, as in `planner.executor.measure.calibrate`. Transfers over NCCL overlap
with computation. So a message is sent back and forth, and half of the time is the transfer time.
"""

import os
import platform
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from planner.core.errors import MeasurementError, UsageError
from planner.core.values.links import Links, MeasuredLink, fit_link
from planner.core.values.profile import THIS_TOOL, Device, Environment
from planner.device.clock import median_us
from planner.device.kinds import DEVICE_KINDS, kind_of
from planner.executor.measure.calibrate import MICRO_BATCHES, make_empty_step
from planner.executor.run.placement import gather_from_all_ranks

_SIZES = tuple(4**n * 1024 for n in range(8))
"""Message sizes in bytes: 1 KiB to 16 MiB."""

_WARM_UPS = 3
_ROUND_TRIPS = 20
_STEPS = 12
_TIMEOUT = timedelta(minutes=5)

Group = dist.ProcessGroup


def measure_links(device: str = "auto", progress: Callable[[str, int, int], None] = lambda *_: None) -> Links | None:
    """Measure the link from every process to the next one, pair by pair. Every process must call this function.

    Args:
        device: `cpu`, `cuda`, or `auto`: CUDA if every process of this machine has a separate device.
        progress: Function that is called with the pair, the number of finished pairs, and the number of all pairs.

    Returns:
        All links, in the first process; None in other processes.

    Raises:
        UsageError: This machine has fewer CUDA devices than processes.
        MeasurementError: The processes cannot reach each other.
    """
    on = _device(device)
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):  # all on one machine
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        # The processes exchange results over gloo, also if NCCL is measured.
        dist.init_process_group("gloo", timeout=_TIMEOUT)
        try:
            return _measured(on, progress)
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise MeasurementError(
            f"the processes did not reach each other: {first}",
            hint="see whether one of them failed before; else check that the hosts of `torchrun` reach each other, and "
            "set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME to the network interface",
        ) from error


def _measured(device: torch.device, progress: Callable[[str, int, int], None]) -> Links | None:
    rank, world = dist.get_rank(), dist.get_world_size()
    kind = kind_of(device)
    measured: MeasuredLink | None = None
    for sender in range(world - 1):
        progress(f"{sender} to {sender + 1}", sender, world - 1)
        one, both = (dist.new_group(ranks, backend=kind.communication) for ranks in ([sender], [sender, sender + 1]))
        if rank in (sender, sender + 1):
            if kind.transfers_overlap:
                times = [_round_trip_us(rank, sender, size, group=both, device=device) / 2 for size in _SIZES]
            else:
                times = _transfer_us_over_gloo(rank - sender, one, both)
            times = [round(time_us, 1) for time_us in times]
            if rank == sender:
                link = fit_link(_SIZES, times, blocking=not kind.transfers_overlap)
                measured = MeasuredLink(link=link, sample_bytes=_SIZES, sample_us=tuple(times))
        dist.barrier()
    everyones = gather_from_all_ranks(measured)
    if rank > 0:
        return None
    return Links(
        generator=THIS_TOOL,
        device=Device(kind=kind.name, name=kind.model_name),
        environment=Environment(torch=str(torch.__version__), python=platform.python_version()),
        backend=kind.communication,
        boundaries=tuple(link for link in everyones if link is not None),
    )


def _transfer_us_over_gloo(index: int, one: Group, both: Group) -> list[float]:
    """Return the transfer time of one micro-batch for each message size. Only the sender's result is valid.

    Args:
        index: Index of the stage that this process runs.
        one: Process group with this process alone.
        both: Process group of both stages.
    """
    # In a training step of two stages that compute nothing:
    #     o    executor's time per action
    #     t    transfer time of one micro-batch
    #     M    number of micro-batches
    # The second stage starts after the first forward of the first stage, which takes o. A transfer keeps the receiver
    # busy, so the second stage needs t + o for each forward. Forwards take o + M (t + o), and backwards as long.
    alone_us = _empty_step_us(0, 1, _SIZES[0] // 4, one) if index == 0 else 0.0
    overhead_us = alone_us / (2 * MICRO_BATCHES)
    steps_us = (_empty_step_us(index, 2, size // 4, both) for size in _SIZES)
    return [max(0.0, (step_us / 2 - overhead_us) / MICRO_BATCHES - overhead_us) for step_us in steps_us]


def _empty_step_us(index: int, num_stages: int, size: int, group: Group) -> float:
    step = make_empty_step(index, num_stages, size, group=group)
    times = []
    for _ in range(_WARM_UPS + _STEPS):
        begin = time.perf_counter_ns()
        step()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return median_us(times[_WARM_UPS:])


def _round_trip_us(rank: int, sender: int, size_bytes: int, *, group: Group, device: torch.device) -> float:
    is_sender = rank == sender
    peer = sender + 1 if is_sender else sender
    tensor, kind = torch.zeros(size_bytes // 4, device=device), kind_of(device)
    times = []
    for _ in range(_WARM_UPS + _ROUND_TRIPS):
        kind.synchronize()
        begin = time.perf_counter_ns()
        for move in (dist.send, dist.recv) if is_sender else (dist.recv, dist.send):
            move(tensor, peer, group=group)
        kind.synchronize()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return median_us(times[_WARM_UPS:])


def _device(name: str) -> torch.device:
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if name == "auto":
        # Prefer an accelerator if it has enough devices; the CPU, which is the first kind, always does.
        name = next(kind.name for kind in reversed(tuple(DEVICE_KINDS.values())) if kind.device_count() >= processes)
    kind = DEVICE_KINDS[name]
    if kind.device_count() < processes:
        raise UsageError(
            f"this machine has {kind.device_count()} {kind.title} devices for {processes} processes",
            hint="start as many processes as there are devices, or use `--device cpu`",
        )
    return kind.select_device_of_rank(int(os.environ.get("LOCAL_RANK", "0")))
