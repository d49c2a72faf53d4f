"""CUDA GPUs as devices: times come from CUDA events, memory from the statistics of torch's caching allocator.

Some memory of a GPU is not available for tensors: CUDA's context, loaded kernels, and workspaces of libraries. This
memory is measured once and stored as the device's reserve. The measurement first runs matrix products (cuBLAS) and
convolutions (cuDNN), because libraries allocate memory on first use.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from planner.core.values.profile import Device
from planner.device.kind import DeviceKind, Peak
from planner.device.machine import CACHE_BYTES
from planner.device.meter import MemoryUsage

_SIDE = 256
"""Number of rows and columns of test matrices and images, large enough to use the same kernels as real layers."""

_CLOCK_TRIES = 4


class CudaClock:
    """Clock that measures, with CUDA events, the run time of a function's kernels on the current stream."""

    def time_us(self, work: Callable[[], object]) -> float:
        """Wait for all earlier work, run `work`, and return its run time on the GPU, in microseconds."""
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._is_stopped = False
        torch.cuda.synchronize()
        self.restart()
        work()
        if not self._is_stopped:
            self.stop()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e3

    def restart(self) -> float:
        self._start.record()
        return 0.0

    def stop(self) -> None:
        self._end.record()
        self._is_stopped = True


class CudaMemoryMeter:
    """Meter of the memory that a function uses, from the statistics of torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def measure(self, work: Callable[[], object]) -> MemoryUsage:
        torch.cuda.synchronize(self.device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        work()
        torch.cuda.synchronize(self.device)
        after = torch.cuda.memory_allocated(self.device)
        return MemoryUsage(torch.cuda.max_memory_allocated(self.device) - before, after - before)


class Cuda(DeviceKind):
    """CUDA GPU; or an AMD GPU, which torch's ROCm build also calls a CUDA device."""

    name, title = "cuda", "CUDA"
    communication = "nccl"
    transfers_overlap = has_own_memory = True

    @classmethod
    def device_count(cls) -> int:
        return torch.cuda.device_count()

    @classmethod
    def select_device_of_rank(cls, local_rank: int) -> torch.device:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)

    @classmethod
    def accelerator_in_use(cls) -> "Cuda | None":
        if not torch.cuda.is_initialized():
            return None
        return cls(torch.device("cuda", torch.cuda.current_device()))

    @property
    def model_name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    @property
    def generator(self) -> torch.Generator:
        torch.cuda.init()  # this creates the generators
        return torch.cuda.default_generators[self.device.index]

    def describe(self) -> Device:
        properties = torch.cuda.get_device_properties(self.device)
        return Device(
            kind="cuda",
            name=properties.name,
            memory_bytes=properties.total_memory,
            reserve_bytes=self.reserve_bytes(),
        )

    def reserve_bytes(self) -> int:
        """Measure the GPU memory that is not available for tensors, in bytes, including that of other programs."""
        workspaces_bytes = _new_workspaces_bytes(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        return max(0, total - free - torch.cuda.memory_reserved(self.device)) + workspaces_bytes

    def min_bytes_of_timed_layers(self) -> int:
        # Large layers of a fast GPU may take as little time as their launches, so several are needed in a row.
        return max(CACHE_BYTES, torch.cuda.get_device_properties(self.device).total_memory // 128)

    def clock(self, threads: int) -> CudaClock:  # noqa: ARG002 - the host's wait
        return CudaClock()

    def meter(self) -> CudaMemoryMeter:
        return CudaMemoryMeter(self.device)

    def peak_watch(self) -> "_StatisticsWatch":
        return _StatisticsWatch(self.device)

    def allocated_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.device))

    def current_moment(self) -> "_EventMoment":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return _EventMoment(event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def moment_with_host_time(self) -> "tuple[_EventMoment, int]":
        self.synchronize()
        tries = []
        for _ in range(_CLOCK_TRIES):
            before_ns, moment = time.perf_counter_ns(), self.current_moment()
            self.synchronize()
            tries.append((time.perf_counter_ns() - before_ns, before_ns, moment))
        # The shortest try is the most precise, because the host may have been interrupted during the others.
        took_ns, before_ns, moment = min(tries, key=itemgetter(0))
        return moment, before_ns + took_ns // 2

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()


class _EventMoment(NamedTuple):
    event: torch.cuda.Event

    def ns_since(self, earlier: Self) -> int:
        return round(float(earlier.event.elapsed_time(self.event)) * 1e6)


class _StatisticsWatch:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A plan has these bytes in its reserve, so they are no tensors here.
        self._workspaces_bytes = _new_workspaces_bytes(device)

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()  # the allocator sees every release

    def end(self) -> Peak:
        tensor_bytes = torch.cuda.max_memory_allocated(self._device) - self._workspaces_bytes
        free, total = torch.cuda.mem_get_info(self._device)
        return Peak(tensor_bytes, max(0, total - free - tensor_bytes))

    def close(self) -> None:
        return


def _new_workspaces_bytes(device: torch.device) -> int:
    """Let libraries allocate their workspaces in torch's allocator, and return the bytes of the new workspaces."""
    before_bytes = torch.cuda.memory_allocated(device)
    for dtype in (torch.float32, torch.float16):
        _use_libraries(device, dtype)
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return max(0, torch.cuda.memory_allocated(device) - before_bytes)


def _use_libraries(device: torch.device, dtype: torch.dtype) -> None:
    def ones(*shape: int) -> Tensor:
        return torch.ones(*shape, device=device, dtype=dtype, requires_grad=True)

    product = ones(_SIDE, _SIDE) @ ones(_SIDE, _SIDE)
    images = functional.conv2d(ones(1, 8, _SIDE, _SIDE), ones(8, 8, 3, 3), padding=1)
    (product.sum() + images.sum()).backward()
