"""Estimate the costs of layers for a GPU that is not present: memory from ghosts, time from a roofline model.

A layer's forward and backward run on ghosts, tensors without values. The operators, and the sizes of their operands and
results, are those of a real run. From these follow

- memory: each storage counts from its creation to its release. Workspaces of kernels are not included.
- time: each operator takes the longest of three times. They are its FLOP divided by the GPU's FLOP/s, its bytes divided
by the peak bandwidth, and the time to launch a kernel.

The half-precision FLOP/s are the first of these figures that is known for the GPU:

1. FLOP/s measured for matrix products; left out if a layer has a grouped product (of experts)
2. FLOP/s that published training runs reached; with a grouped product, runs of models with experts are preferred
3. peak FLOP/s

Operators in float32 have the peak FLOP/s of float32.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from planner.core.errors import ModelError
from planner.core.values.devices import ASSUMED_RESERVE_BYTES, Accelerator
from planner.core.values.profile import Device
from planner.core.values.sustained import matmul_flops_per_s, sustained_rate
from planner.device.cuda import Cuda
from planner.device.meter import MemoryUsage
from planner.model.batch_norm import BatchStatistics
from planner.model.ghosts import storage_key, storage_of
from planner.model.load import LoadedModel
from planner.model.module_tensors import parameters_as_ghosts
from planner.model.nests import tensors_in
from planner.model.operators import OperatorWatch
from planner.model.optimizers import WholeModelOptimizer
from planner.model.split_backward import SplitBackward
from planner.model.stage import ModelStage
from planner.profile.backends.gpu_kernels import GpuSavedTensorsMode
from planner.profile.idle import parameters_with_gradients, parameters_without_gradients
from planner.profile.layers import BackendResult, MeasuredCosts, layer_profiles
from planner.profile.memory import measure_weight_casts
from planner.profile.optimizer import (
    OptimizerCost,
    first_of_same_cost,
    measure_optimizer,
    optimizer_boundary_peaks,
    trained_parameters,
)
from planner.profile.passes import SplitTimer, UnsplitBackwardTimer, time_once
from planner.profile.records import LayerRecords, MeasurementHooks, record_layers, record_memory
from planner.profile.rewriting import rewritten_bytes
from planner.profile.task import ProfilingTask
from planner.profile.timing import LayerTimes, measured_split_times
from planner.profile.units import LayerKey, LayerToMeasure, MeasurementInput

_LAUNCH_US = 3.0
"""Approximate time of a kernel that does almost no work on a GPU, in microseconds."""

_ROWS_ONLY = frozenset(("aten::embedding", "aten::index", "aten::index_select", "aten::gather", "aten::slice_backward"))
"""Operators that read only those rows of a table that they return."""

_GROUPED_PRODUCT = "aten::_grouped_mm"


class EstimatedBackend:
    """Backend that estimates the costs of layers for a GPU that this machine lacks."""

    device = torch.device("cpu")

    def __init__(self, absent: Accelerator) -> None:
        self._absent = absent

    def describe(self) -> Device:
        """Return the GPU as in its data sheet. `reserve_bytes`, the memory that tensors cannot use, is assumed."""
        return Device(
            kind=Cuda.name,
            name=self._absent.full_name,
            memory_bytes=self._absent.memory_bytes,
            reserve_bytes=ASSUMED_RESERVE_BYTES,
            how="estimated",
        )

    def clock(self, *, experts: bool = False) -> "RooflineClock":
        """Return a clock for the GPU. If `experts`, its FLOP/s are from training runs, preferably with experts."""
        sustained = sustained_rate(self._absent.name, experts=experts)
        rate = None if experts else matmul_flops_per_s(self._absent.name)
        if rate is None and sustained is not None:
            rate = sustained.flops_per_s
        return RooflineClock(self._absent if rate is None else replace(self._absent, half_flops_per_s=rate))

    def check(self, loaded: LoadedModel, *, lean: bool) -> None:  # noqa: ARG002
        """Check that the model runs on tensors without values, because an estimate needs such a run.

        Args:
            loaded: The model.
            lean: True if the model has run on tensors without values.

        Raises:
            ModelError: `lean` is False.
        """
        if not lean:
            raise ModelError(
                "the model cannot be estimated: its layers ask for the values of tensors",
                hint="measure it: `--device cuda` on the machine that has one, or `--device cpu`",
            )

    def measure(self, task: ProfilingTask) -> BackendResult:
        """Estimate the costs of layers at each micro-batch size."""
        meter, clock = GhostMeter(), self.clock()
        hooks = MeasurementHooks(device=self.device, record=partial(record_memory, task=task, meter=meter))
        with as_ghosts_if_lean(task), GpuSavedTensorsMode():
            records = record_layers(task, hooks)
            flops = records.measure_distinct(clock.flops_of)
            clock = self.clock(experts=clock.has_experts)
            updates_all_at_once = _updates_all_at_once(task)
            whole = task.whole_optimizer()
            units, idle = records.units, parameters_without_gradients(task, records)
            first = first_of_same_cost(units, whole)
            by_first = {
                n: _optimizer_cost(
                    units[n],
                    whole,
                    meter,
                    clock,
                    updates_all_at_once=updates_all_at_once,
                    idle=records.translate_parameter_names(n, idle[units[n].digest]),
                )
                for n in dict.fromkeys(first)
            }
            optimizer = [by_first[n] for n in first]
            stepped = parameters_with_gradients(records, idle)
            times, half_times_us = _times(task, records, clock)
            costs = MeasuredCosts(
                records=records,
                casts_bytes=records.measure_distinct(partial(measure_weight_casts, meter=meter)),
                rewritten_bytes=records.measure_distinct(rewritten_bytes),
                idle=idle,
                optimizer=optimizer,
                optimizer_boundary_peaks=optimizer_boundary_peaks(stepped, whole, device=self.device, meter=meter),
                flops=flops,
                times=times,
                half_times_us=half_times_us,
            )
            layers = layer_profiles(task, costs)
            return BackendResult(sizes=records.sizes, optimizer_peaks_add=updates_all_at_once, layers=layers)


@contextmanager
def as_ghosts_if_lean(task: ProfilingTask) -> Iterator[None]:
    """Replace parameters and buffers by ghosts (tensors without values) in the `with` block, if `task.lean` is True."""
    if not task.lean:
        yield
        return
    stages = [layer.module for layer in task.chain.layers if isinstance(layer.module, ModelStage)]
    with parameters_as_ghosts(task.chain.model):
        for stage in stages:
            stage.register_tensors_in(stage)
        yield
    for stage in stages:
        stage.register_tensors_in(stage)


class GhostMeter:
    """Meter of the memory that ghosts (tensors without values) would use."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def measure(self, work: Callable[[], object]) -> MemoryUsage:
        """Run `work` once and return the memory that it would use."""
        before = peak = self._live_bytes()

        def count(_func: Any, args: Any, kwargs: Any, result: Any) -> None:
            nonlocal peak
            for tensor in tensors_in((args, kwargs)):
                self._know(tensor, counts=False)
            for tensor in tensors_in(result):
                self._know(tensor, counts=True)
            peak = max(peak, self._live_bytes())

        with OperatorWatch(after=count):
            work()
        return MemoryUsage(peak - before, self._live_bytes() - before)

    def _know(self, tensor: Tensor, *, counts: bool) -> None:
        # A weak reference keeps the address from being reused.
        storage = storage_of(tensor)
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes() if counts else 0

    def _live_bytes(self) -> int:
        gone = [key for key, (storage, _) in self._storages.items() if storage.expired()]
        for key in gone:
            del self._storages[key]
        return sum(size for _, size in self._storages.values())


class RooflineClock:
    """Clock that adds up the times of operators, estimated from the rates of a device."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._total_us = 0.0
        self.flops = 0
        """Floating-point operations of the last measured function."""
        self.has_experts = False
        """True if a measured function has run a grouped product, which multiplies tokens by their experts' weights."""

    def time_us(self, work: Callable[[], object]) -> float:
        """Run `work` on tensors without values and return its estimated time in microseconds."""
        self.restart()
        self.flops = 0

        def add(func: Any, args: Any, kwargs: Any, result: Any) -> None:
            received, results = tensors_in((args, kwargs)), tensors_in(result)
            if _moves_nothing(func, received, results):
                return
            flops = _flops(func, args, kwargs, result)
            self.flops += flops
            self.has_experts |= func._schema.name == _GROUPED_PRODUCT
            half = bool(results) and results[0].is_floating_point() and results[0].element_size() < 4
            rate = self._accelerator.half_flops_per_s if half else self._accelerator.float32_flops_per_s
            moved = _moved_bytes(func, _read(func, args, received), results)
            self._total_us += max(_LAUNCH_US, 1e6 * flops / rate, 1e6 * moved / self._accelerator.bytes_per_s)

        with OperatorWatch(after=add):
            work()
        return self._total_us

    def restart(self) -> float:
        """Set the time to zero, and return 0."""
        self._total_us = 0.0
        return 0.0

    def stop(self) -> None:
        """Do nothing, because this clock counts operators and not elapsed time."""

    def flops_of(self, unit: LayerToMeasure, received: MeasurementInput) -> int:
        """Return the number of floating-point operations of a layer's forward."""
        self.time_us(lambda: unit.run(received.new_leaf_copies(), received))
        return self.flops


def _updates_all_at_once(task: ProfilingTask) -> bool:
    """Return True if the optimizer updates all parameters at once, as torch's optimizers do by default on a GPU."""
    one = task.whole_optimizer().build_for(())
    return one.defaults.get("foreach", False) is None and not one.defaults.get("fused")


def _optimizer_cost(
    unit: LayerToMeasure,
    whole: WholeModelOptimizer,
    meter: GhostMeter,
    clock: RooflineClock,
    *,
    updates_all_at_once: bool,
    idle: Collection[str],
) -> OptimizerCost:
    cost = measure_optimizer(unit.module, whole, meter=meter, clock=clock, repeats=1, idle=idle)
    # An optimizer that updates all parameters at once makes a temporary copy of them.
    copy_bytes = sum(p.nbytes for p in trained_parameters(unit.module, idle))
    return replace(cost, peak_bytes=copy_bytes) if updates_all_at_once else cost


def _times(
    task: ProfilingTask, records: LayerRecords, clock: RooflineClock
) -> tuple[dict[LayerKey, LayerTimes], dict[LayerKey, tuple[float, float]]]:
    times, half_times_us = {}, {}
    whole = UnsplitBackwardTimer(clock=clock, statistics=BatchStatistics())
    split_timer = SplitTimer(clock=clock, statistics=BatchStatistics(), split=SplitBackward())
    for key in task.steps.each(list(records.inputs), records.names):
        unit, received = records.distinct[key[0]], records.inputs[key]
        forward_us, backward_us = time_once(whole, unit, received)
        times[key] = LayerTimes(forward_us=forward_us, backward_us=backward_us, spread=0.0)
        half_times_us[key] = measured_split_times([time_once(split_timer, unit, received)], times[key])
    return times, half_times_us


def _moves_nothing(func: Any, received: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    if func._schema.is_mutable or not results:
        return not results
    storages = set(map(storage_key, received))
    return all(storage_key(tensor) in storages for tensor in results)


def _moved_bytes(func: Any, received: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    written = sum(map(_distinct_bytes, results))
    if func._schema.name in _ROWS_ONLY:
        return 2 * written
    return written + sum(map(_distinct_bytes, received))


def _read(func: Any, args: Any, received: Sequence[Tensor]) -> Sequence[Tensor]:
    if func is not torch.ops.aten.convolution_backward.default:
        return received
    gradient, x, weight, *_, (of_input, of_weight, _) = args
    return [gradient, *([x] if of_weight else []), *([weight] if of_input else [])]


def _distinct_bytes(tensor: Tensor) -> int:
    # The elements of an expanded tensor are read from memory once, and from a cache after that.
    return min(tensor.nbytes, storage_of(tensor).nbytes())


def _flops(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> int:
    if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return int(sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))
    if func._schema.name == _GROUPED_PRODUCT:
        return _grouped_flops(args[0], args[1])
    formula = flop_registry.get(func._overloadpacket)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _grouped_flops(a: Tensor, b: Tensor) -> int:
    if a.dim() == 3 and b.dim() == 2:
        return 2 * a.shape[-2] * b.numel()
    return 2 * a.numel() * b.shape[-1]
