"""Model to profile: traces the units, measures each distinct one, and writes down what every layer costs."""

import gc
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from planner.bridge.torchax_adapter import attached_tpu, check_installed, expect_no_tpu
from planner.core.cost.costs import saved_bytes
from planner.core.cost.planning import GENERATOR
from planner.core.errors import MeasurementError, ModelError, UsageError
from planner.core.values.cluster import ExecutorCost
from planner.core.values.devices import ACCELERATORS, accelerator
from planner.core.values.partial import Measurement, Partial
from planner.core.values.profile import Device, Environment, LayerProfile, MemoryDetail, Model, Profile
from planner.device.clock import Clock
from planner.device.kinds import DEVICE_KINDS, kind_of
from planner.device.machine import LARGE_BYTES, give_freed_memory_back, keep_freed_memory
from planner.device.meter import Meter
from planner.model.chain import Chain, Layer, chain_digest, tied_parameters
from planner.model.ghosts import NeedsValuesError
from planner.model.lean import fill
from planner.model.load import LoadedModel
from planner.model.precision import dtype_of
from planner.model.refusals import TooFewSamplesError, in_place_told
from planner.model.statistics import collecting_bytes
from planner.profile.backends.compiled import CompiledLayer, CompiledStep, Compiler
from planner.profile.backends.estimated import GhostMeter, RooflineClock, estimated_device, ghostly
from planner.profile.backends.rates import Rates, rates_of
from planner.profile.flops import forward_flops
from planner.profile.memory import measure_casts, measure_memory
from planner.profile.optimizer import OptimizerCost, measure_optimizer, peaks_add
from planner.profile.passing import passing_us
from planner.profile.regret import regret
from planner.profile.rewriting import rewritten_bytes
from planner.profile.sparse import check_ties, sparse_gradients
from planner.profile.structure import find_chain
from planner.profile.timing import Samples, Times, enough_to_leave_the_cache, measure_times, time_once, times_of
from planner.profile.units import Unit, UnitInput, trace_units, with_values

__all__ = ["InterruptedProfileError", "ProfileOptions", "profile_model"]

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, how much is done, and how much there is; larger micro-batches count for more."""

_REGRET = 0.01
"""Repeats suffice when others would lead to a plan that is slower by less than this."""

_ESTIMATE, _TPU = "estimate:", "tpu:"

_TPU_PRECISIONS = ("", "fp32", "bf16")

_MEMORY_PASSES = 6
"""How many timed passes a memory record takes, about."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """How to profile."""

    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    device: str = "cpu"
    threads: int = 1
    repeats: int = 10
    """At least so many timed repeats of every layer."""
    time_budget_s: float = 60.0
    """More repeats than that are begun only so long after the first; 0: none, and nothing is said about it."""
    until_memory_ends: bool = False
    """Whether sizes for which memory does not suffice, or that are too small for a layer, are left out, rather than an
    error."""


class InterruptedProfileError(KeyboardInterrupt):
    """Ctrl-C, with what had been measured by then."""

    def __init__(self, partial: Partial) -> None:
        super().__init__()
        self.partial = partial


def profile_model(
    loaded: LoadedModel,
    options: ProfileOptions,
    progress: Progress = lambda *_: None,
    *,
    warn: Callable[[str], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
    earlier: Partial | None = None,
) -> Profile:
    """Measures every layer of the model at every micro-batch size. The model is left as it was.

    Args:
        loaded: The model.
        options: How.
        progress: Called before each measurement.
        warn: Called with what the user should know.
        note: Called with defaults that were taken.
        earlier: What an interrupted run measured; used if it was of the same model in the same environment.

    Raises:
        ModelError: The model cannot be built, cut, or run on its example batch.
        UsageError: The device does not exist here.
        MeasurementError: Memory does not suffice.
        InterruptedProfileError: Ctrl-C.
    """
    target = _target_of(options.device)
    device = torch.device("cpu") if target is not None else device_of(options.device)
    torch.set_num_threads(options.threads)
    if not kind_of(device).has_own_memory:
        # A large model need not take the room of several before anything is timed.
        keep_freed_memory(below=LARGE_BYTES)
    if target is not None:
        target.check(loaded)
    chain, lean = find_chain(loaded, device)
    if target is not None and not lean and not target.tpu:
        raise ModelError(
            "the model cannot be estimated: its layers ask for the values of tensors",
            hint="measure it: `--device cuda` on the machine that has one, or `--device cpu`",
        )
    for text in () if chain.outline is None else (chain.outline.widened, chain.outline.prevented):
        if text:
            warn(text)
    model = chain.model
    described = kind_of(device).described() if target is None else target.described
    kept = _Kept(_header(loaded, model, chain, described, options.threads))
    if earlier is not None:
        kept.take_over(earlier, warn)
    try:
        with untouched(model), ghostly(chain) if target is not None and lean else nullcontext():
            make = _Measured if target is None else partial(target.layers, target=target)
            measured = make(loaded, chain, options, device, kept, lean=lean, progress=progress, warn=warn, note=note)
            layers = tuple(measured.layer(n) for n in range(len(chain.layers)))
    except KeyboardInterrupt as error:
        raise InterruptedProfileError(kept.partial()) from error
    return Profile(
        generator=GENERATOR,
        model=kept.header.model,
        device=kept.header.device,
        environment=kept.header.environment,
        optimizer=loaded.optimizer_name,
        optimizer_peak="sum" if measured.optimizer_peaks_add else "largest",
        micro_batch_sizes=tuple(measured.sizes),
        layers=layers,
    )


@dataclass(frozen=True, kw_only=True)
class _Target:
    """A device that is not here, or that only JAX can use."""

    described: Device
    rates: Rates
    tpu: bool = False
    chip: str = ""
    """Of a TPU that is not here; empty for one that is."""

    @property
    def layers(self) -> "type[_Estimated]":
        """What finds the costs of layers on it."""
        return _Compiled if self.tpu else _Estimated

    def check(self, loaded: LoadedModel) -> None:
        """Raises `UsageError` where the model cannot be profiled for it."""
        if self.tpu and loaded.precision not in _TPU_PRECISIONS:
            raise UsageError(
                f"`--dtype {loaded.precision}`: autocast is torch's own, and a TPU's programs have none",
                hint="use `--dtype bf16` or `--dtype fp32`",
            )


def _target_of(name: str) -> _Target | None:
    """The device called `name`, if torch does not run on it.

    Raises:
        UsageError: It is unknown, or the packages that it needs are not installed.
    """
    if name.startswith(_ESTIMATE):
        absent = accelerator(name.removeprefix(_ESTIMATE))
        rates = rates_of(absent.name)
        return _Target(described=estimated_device(absent, rates), rates=rates)
    if name != "tpu" and not name.startswith(_TPU):
        return None
    check_installed()
    if name == "tpu":
        reported, memory_bytes = attached_tpu()
        known = next(
            (known for known in ACCELERATORS if known.name.startswith(_TPU) and known.is_called(reported)), None
        )
        rates = rates_of("tpu:v2" if known is None else known.name)
        described = Device(kind="tpu", name=reported, memory_bytes=memory_bytes)
        return _Target(described=described, rates=rates, tpu=True)
    expect_no_tpu()
    absent = accelerator(name)
    rates = rates_of(absent.name)
    executor = ExecutorCost(overhead_us=0.0, link=rates.link)
    described = Device(
        kind="tpu", name=rates.full_name, memory_bytes=absent.memory_bytes, how="compiled", executor=executor
    )
    return _Target(described=described, rates=rates, tpu=True, chip=absent.name.removeprefix(_TPU))


def _header(loaded: LoadedModel, model: nn.Module, chain: Chain, device: Device, threads: int) -> Partial:
    return Partial(
        generator=GENERATOR,
        model=Model(
            source=loaded.source,
            settings=loaded.settings,
            inputs=loaded.inputs,
            granularity=loaded.granularity,
            uncut=loaded.uncut,
            digest=chain_digest(chain, loaded.settings, loaded.precision),
            parameters=sum(p.numel() for p in model.parameters()),
        ),
        device=device,
        environment=Environment(
            torch=str(torch.__version__),
            python=platform.python_version(),
            dtype=loaded.precision or dtype_of(model),
            threads=threads,
        ),
        optimizer=loaded.optimizer_name,
        measurements=(),
    )


def device_of(name: str) -> torch.device:
    """The torch device called `name`.

    Raises:
        UsageError: Unknown, or not on this machine.
    """
    kind, colon, number = name.partition(":")
    if kind not in DEVICE_KINDS or (colon and not (DEVICE_KINDS[kind].has_own_memory and number.isdecimal())):
        hint = "use `--device cpu`, `cuda` or `tpu`, or without the device itself `estimate:h100` or `tpu:v2`"
        raise UsageError(f"unknown device `{name}`", hint=hint)
    if not DEVICE_KINDS[kind].count():
        raise UsageError(
            f"no {DEVICE_KINDS[kind].title} device here for `--device {name}`",
            hint="profile on the machine that has it",
        )
    return torch.device(name)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Puts buffers, gradients and the random state back as they were."""
    holders = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            for module, buffers in holders:
                module._buffers.update(buffers)
            with torch.no_grad():
                for buffer, before in values:
                    buffer.copy_(before)
            for parameter, gradient in gradients:
                parameter.grad = gradient


class _Kept:
    """What takes long to measure, so that an interrupted run can hand it on."""

    def __init__(self, header: Partial) -> None:
        self.header = header
        self.memory: dict[tuple[str, int], MemoryDetail] = {}
        self.samples: Samples = {}

    def take_over(self, earlier: Partial, warn: Callable[[str], None]) -> None:
        """Uses what was measured before, if everything it depends on is the same."""
        differences = earlier.differences(self.header)
        if differences:
            warn(f"what an interrupted run measured is of no use ({', '.join(differences)} changed): starting over")
            return
        for one in earlier.measurements:
            key = (one.digest, one.micro_batch_size)
            self.memory[key] = one.memory
            self.samples[key] = list(zip(one.forward_us, one.backward_us, strict=True))

    def partial(self) -> Partial:
        """Everything so far, as a file holds it."""
        measurements = [
            Measurement(
                digest=digest,
                micro_batch_size=size,
                memory=memory,
                forward_us=tuple(forward for forward, _ in self.samples.get((digest, size), ())),
                backward_us=tuple(backward for _, backward in self.samples.get((digest, size), ())),
            )
            for (digest, size), memory in self.memory.items()
        ]
        return replace(self.header, measurements=tuple(measurements))


class _Measured:
    """All measurements of the distinct units of a chain."""

    def __init__(
        self,
        loaded: LoadedModel,
        chain: Chain,
        options: ProfileOptions,
        device: torch.device,
        kept: _Kept,
        *,
        lean: bool,
        progress: Progress,
        warn: Callable[[str], None],
        note: Callable[[str], None],
    ) -> None:
        self.chain = chain
        self.sizes: list[int] = []
        self.memory, self._samples = kept.memory, kept.samples
        self.units = tuple[Unit, ...]()
        self._distinct: dict[str, Unit] = {}
        self._lean = lean
        self._inputs: dict[tuple[str, int], UnitInput] = {}
        self._loaded, self._options, self._device = loaded, options, device
        self._progress, self._warn, self._note = progress, warn, note
        self._done = self._total = 0
        self._meter, self._clock = self._instruments()
        self.tied = tied_parameters(chain.layers)
        self._measure_memory()
        give_freed_memory_back()
        if not kind_of(device).has_own_memory:
            keep_freed_memory()
        self.saved = [saved_bytes([self.memory[unit.digest, size] for unit in self.units]) for size in self.sizes]
        check_ties(chain.layers, self.tied, lambda n: self._sparse(self.units[n].digest))
        self.optimizer: dict[str, OptimizerCost] = {}
        given = {digest: self._inputs[digest, self.sizes[0]] for digest in self._distinct}
        self.casts = {
            digest: measure_casts(unit, given[digest], self._meter) for digest, unit in self._distinct.items()
        }
        self.rewritten = self._measure_rewriting(given)
        self._measure_optimizer()
        give_freed_memory_back()
        self._measure_times()
        self.passing = passing_us(self._distinct, self._inputs, clock=self._clock, repeats=options.repeats)
        give_freed_memory_back()
        # Once more, at another time: its few steps in a row may all have met a busy machine.
        self._measure_optimizer()

    def _instruments(self) -> tuple[Meter, Clock]:
        kind = kind_of(self._device)
        return kind.meter(), kind.clock(self._options.threads)

    def _measure_memory(self) -> None:
        """Size by size, as far as memory suffices."""
        for size in self._options.micro_batch_sizes:
            failed = False
            try:
                inputs = self._records_at(size)
            except TooFewSamplesError as error:
                if not self._options.until_memory_ends or size == self._options.micro_batch_sizes[-1]:
                    raise
                self._warn(f"micro-batch size {size} is left out: {error.message}")
                continue
            except Exception as error:
                if not _out_of_memory(error):
                    raise
                failed = True
            if failed:
                # Behind the handler, where the error no longer holds on to the tensors of the failed attempt.
                self._without(size)
                return
            self._inputs |= inputs
            self.sizes.append(size)

    def _records_at(self, size: int) -> dict[tuple[str, int], UnitInput]:
        units, traced = trace_units(self.chain, self._loaded, (size,), self._device, ghosts=self._lean)
        if not self.units:
            self._know(units)
        # A unit is known by its trace at the first size.
        inputs: dict[tuple[str, int], UnitInput] = {}
        for known, now in zip(self.units, units, strict=True):
            if (known.digest, size) not in inputs:
                inputs[known.digest, size] = self._with_values(traced[now.digest, size])
        missing = [key for key in inputs if key not in self.memory]
        for digest, _ in self._steps(missing, passes=_MEMORY_PASSES):
            unit = self._distinct[digest]
            with in_place_told(f'layer "{unit.name}"'):
                self.memory[digest, size] = measure_memory(unit, inputs[digest, size], self._meter)
            # Layers of several sizes leave holes.
            give_freed_memory_back()
        return inputs

    def _know(self, units: tuple[Unit, ...]) -> None:
        for text in self._loaded.notes:  # they have run, so it is clear what the loss is
            self._note(text)
        self.units = units
        self._distinct = {unit.digest: unit for unit in reversed(units)}
        self._fill()

    def _fill(self) -> None:
        units = self.units
        measured = [unit.module for digest in self._distinct for unit in enough_to_leave_the_cache(units, digest)]
        fill(measured, self.chain.model, self._device)

    def _with_values(self, given: UnitInput) -> UnitInput:
        return with_values(given, self._device)

    def _without(self, size: int) -> None:
        gc.collect()
        kind_of(self._device).empty_cache()
        if not self.sizes:
            raise MeasurementError(
                f"out of memory at micro-batch size {size}, the smallest",
                hint="profile on a device with more memory, or a smaller model",
            )
        if not self._options.until_memory_ends:
            fitting = ",".join(map(str, self.sizes))
            raise MeasurementError(f"out of memory at micro-batch size {size}", hint=f"use `--batch-sizes {fitting}`")
        self._warn(f"out of memory at micro-batch size {size}: sizes up to {self.sizes[-1]} are measured")

    def _measure_rewriting(self, given: dict[str, UnitInput]) -> dict[str, int]:
        return {digest: rewritten_bytes(unit, given[digest]) for digest, unit in self._distinct.items()}

    def _measure_optimizer(self) -> None:
        build = self._loaded.build_optimizer
        first = self.sizes[0]
        self.flops: dict[str, int] = {}
        # Parameters and gradients of all layers.
        between_bytes = 2 * sum(p.nbytes for layer in self.chain.layers for p in layer.module.parameters())
        for digest, _ in self._steps([(digest, first) for digest in self._distinct]):
            cost = measure_optimizer(
                self._distinct[digest].module,
                build,
                meter=self._meter,
                clock=self._clock,
                repeats=self._options.repeats,
                between_bytes=between_bytes,
                sparse=self._sparse(digest),
            )
            known = self.optimizer.get(digest, cost)
            self.optimizer[digest] = replace(cost, step_us=min(cost.step_us, known.step_us))
            self.flops[digest] = forward_flops(self._distinct[digest], self._inputs[digest, first])
        largest = max(self._distinct.values(), key=lambda unit: sum(p.nbytes for p in unit.module.parameters()))
        self.optimizer_peaks_add = peaks_add(
            largest.module, build, meter=self._meter, sparse=self._sparse(largest.digest)
        )

    def _sparse(self, digest: str) -> dict[str, Tensor]:
        if not self.memory[digest, self.sizes[0]].sparse_gradient_bytes:
            return {}
        unit = self._distinct[digest]
        return sparse_gradients(unit, self._inputs[digest, self.sizes[0]])

    def _measure_times(self) -> None:
        started = time.monotonic()

        def doubtful() -> bool:
            if not self._options.time_budget_s:
                return False
            share = self._regret()
            if share >= _REGRET and time.monotonic() - started > self._options.time_budget_s:
                self._warn(_too_noisy(share, self._options.time_budget_s))
                return False
            return share >= _REGRET

        for key in self._inputs:
            self._samples.setdefault(key, [])
        measure_times(
            self.units,
            self._inputs,
            self._samples,
            clock=self._clock,
            repeats=self._options.repeats,
            doubtful=doubtful,
            progress=self._steps,
        )
        self.times = {key: times_of(self._samples[key], self._clock) for key in self._inputs}

    def _regret(self) -> float:
        chain = [unit.digest for unit in self.units]
        return regret(chain, {key: self._samples[key] for key in self._inputs}, self._clock.typical_us)

    def _steps(self, keys: Sequence[tuple[str, int]], passes: int = 1) -> Iterator[tuple[str, int]]:
        """Announces one measurement after the other."""
        self._total += passes * sum(size for _, size in keys)
        for digest, size in keys:
            self._progress(self._distinct[digest].name, self._done, self._total)
            yield digest, size
            self._done += passes * size

    def layer(self, n: int) -> LayerProfile:
        """What layer `n` costs."""
        unit, layer = self.units[n], self.chain.layers[n]
        times = [self.times[unit.digest, size] for size in self.sizes]
        details = self._details(n)
        optimizer = self.optimizer[unit.digest]
        tied, tied_bytes = self._ties(layer)
        return LayerProfile(
            name=layer.name,
            digest=unit.digest,
            modules=self.chain.modules(n),
            parameter_bytes=sum(p.nbytes for p in layer.module.parameters()),
            gradient_bytes=sum(p.nbytes for p in layer.module.parameters() if p.requires_grad),
            optimizer_bytes=optimizer.state_bytes,
            buffer_bytes=self._buffer_bytes(layer.module),
            cast_bytes=self.casts[unit.digest],
            rewritten_bytes=self.rewritten[unit.digest],
            tied=tied,
            tied_bytes=tied_bytes,
            optimizer_us=round(optimizer.step_us, 1),
            optimizer_peak_bytes=optimizer.peak_bytes,
            optimizer_sparse_peak=optimizer.sparse_peak,
            forward_us=tuple(
                round(max(0.0, t.forward_us - self.passing[unit.digest, size]), 1)
                for t, size in zip(times, self.sizes, strict=True)
            ),
            backward_us=tuple(round(t.backward_us, 1) for t in times),
            spread=tuple(round(t.spread, 4) for t in times),
            output_bytes=tuple(sum(t.bytes for t in d.outputs) for d in details),
            saved_bytes=tuple(self.saved[k][n] for k in range(len(self.sizes))),
            forward_peak_bytes=tuple(max(0, d.forward_peak_bytes - d.internal_bytes - _made(d)) for d in details),
            backward_peak_bytes=tuple(max(0, d.backward_peak_bytes - d.internal_bytes) for d in details),
            forward_flops=tuple(self.flops[unit.digest] * size // self.sizes[0] for size in self.sizes),
            detail=details,
        )

    def _buffer_bytes(self, module: nn.Module) -> int:
        return sum(buffer.nbytes for buffer in module.buffers()) + collecting_bytes(module)

    def _details(self, n: int) -> tuple[MemoryDetail, ...]:
        return tuple(self.memory[self.units[n].digest, size] for size in self.sizes)

    def _ties(self, layer: Layer) -> tuple[tuple[str, ...], int]:
        mine = {name: parameter for name, parameter in layer.parameter_names().items() if name in self.tied}
        others = [other for name in mine for other in self.tied[name] if other != layer.name]
        return tuple(dict.fromkeys(others)), sum(parameter.nbytes for parameter in mine.values())


class _Estimated(_Measured):
    """The same of layers that only seem to run."""

    def __init__(self, *args: Any, target: _Target, **kwargs: Any) -> None:
        self._target = target
        super().__init__(*args, **kwargs)

    def _instruments(self) -> tuple[Meter, Clock]:
        self._roofline = RooflineClock(self._target.rates)
        return GhostMeter(), self._roofline

    def _fill(self) -> None:
        """Ghosts have no values."""

    def _with_values(self, given: UnitInput) -> UnitInput:
        return given

    def _measure_times(self) -> None:
        self.times = {}
        for key in self._steps(list(self._inputs)):
            forward_us, backward_us = time_once(self._distinct[key[0]], self._inputs[key], self._clock)
            self.times[key] = Times(forward_us=forward_us, backward_us=backward_us, spread=0.0)

    def _measure_optimizer(self) -> None:
        one = self._loaded.build_optimizer(iter([nn.Parameter(torch.zeros(1))]))
        # On a GPU torch's optimizers take all parameters at once unless told otherwise; a copy of them is transient.
        self.optimizer_peaks_add = one.defaults.get("foreach", False) is None and not one.defaults.get("fused")
        self.flops = {}
        for digest, unit in self._distinct.items():
            cost = measure_optimizer(
                unit.module, self._loaded.build_optimizer, meter=self._meter, clock=self._clock, repeats=1
            )
            peak_bytes = sum(p.nbytes for p in unit.module.parameters() if p.requires_grad)
            self.optimizer[digest] = replace(cost, peak_bytes=peak_bytes) if self.optimizer_peaks_add else cost
            given = self._inputs[digest, self.sizes[0]]
            self._roofline.time_us(partial(_run, unit, given))
            self.flops[digest] = self._roofline.flops


class _Compiled(_Estimated):
    """The same by what the TPU's compiler says of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._compiled: dict[tuple[str, int], CompiledLayer] = {}
        super().__init__(*args, **kwargs)
        # What a stage's forward passes over is not part of its program.
        self.passing = dict.fromkeys(self.passing, 0.0)

    def layer(self, n: int) -> LayerProfile:
        """What layer `n` costs.

        With a record of programs in place of that of an allocator: gradients are there from begin to end, and so is
        what a loop over micro-batches keeps.
        """
        layer = super().layer(n)
        compiled = [self._compiled[self.units[n].digest, size] for size in self.sizes]
        programs = []
        for one, kept_bytes in zip(compiled, layer.saved_bytes, strict=True):
            program = one.program(kept_bytes - one.made_bytes)
            targets = one.inputs[len(one.inputs) - self._num_targets :] if n == len(self.units) - 1 else ()
            inputs = one.inputs[: len(one.inputs) - len(targets)] if n == 0 else ()
            if n == 0:
                program = replace(
                    program,
                    input_bytes=sum(inputs),
                    narrowed_input_bytes=one.narrowed_inputs_bytes,
                    laid_out_bytes=one.laid_out_bytes,
                )
            programs.append(replace(program, target_bytes=sum(targets)))
        flops = tuple(round(one.flops) for one in compiled)
        return replace(layer, forward_flops=flops, detail=(), program=tuple(programs))

    # Private methods

    def _measure_rewriting(self, given: dict[str, UnitInput]) -> dict[str, int]:
        """Nor does it write into any other buffer."""
        return dict.fromkeys(given, 0)

    def _buffer_bytes(self, module: nn.Module) -> int:
        """The program leaves running statistics alone."""
        return sum(buffer.nbytes for buffer in module.buffers())

    def _records_at(self, size: int) -> dict[tuple[str, int], UnitInput]:
        units, traced = trace_units(self.chain, self._loaded, (size,), self._device, ghosts=self._lean)
        if not self.units:
            self._know(units)
        inputs: dict[tuple[str, int], UnitInput] = {}
        jobs: list[tuple[Unit, UnitInput, int]] = []
        for known, now in zip(self.units, units, strict=True):
            if (known.digest, size) not in inputs:
                inputs[known.digest, size] = traced[now.digest, size]
                jobs.append((now, traced[now.digest, size], size))
        targets = tree_leaves(traced[units[-1].digest, size].targets)
        self._num_targets = sum(isinstance(target, Tensor) for target in targets)
        digests = list(inputs)
        self._total += size * len(jobs)
        self._progress(f"{len(jobs)} layers of {size} samples", self._done, self._total)
        for n, layer in self._compiler().compile(jobs):
            self._compiled[digests[n]] = layer
            self.memory[digests[n]] = layer.detail()
            self._done += size
            self._progress(jobs[n][0].name, self._done, self._total)
        return inputs

    def _measure_times(self) -> None:
        self.times = {
            key: Times(forward_us=layer.forward_us, backward_us=layer.backward_us, spread=0.0)
            for key, layer in self._compiled.items()
            if key in self._inputs
        }

    def _measure_optimizer(self) -> None:
        if self.optimizer:
            return  # no second opinion is needed
        # The compiler counts operations, and one program steps one array after the other.
        self.flops, self.optimizer_peaks_add = dict.fromkeys(self._distinct, 0), False
        self.optimizer = {digest: self._state_of(unit.module) for digest, unit in self._distinct.items()}
        for digest, step in self._compile_steps().items():
            cost = self.optimizer[digest]
            self.optimizer[digest] = replace(cost, step_us=step.step_us, peak_bytes=step.peak_bytes)

    def _state_of(self, module: nn.Module) -> OptimizerCost:
        measure = partial(measure_optimizer, build=self._loaded.build_optimizer, repeats=1)
        try:
            return measure(module, meter=self._meter, clock=self._clock)
        except NeedsValuesError:
            # Zeros that nobody writes take no memory, and of large parameters a part is enough.
            trained = (p for p in module.parameters() if p.requires_grad)
            values = nn.ParameterList([nn.Parameter(torch.zeros(p.shape, dtype=p.dtype)) for p in trained])
            kind = kind_of(self._device)
            return measure(values, meter=kind.meter(), clock=kind.clock(1))

    def _compile_steps(self) -> dict[str, CompiledStep]:
        """The optimizer's step of every distinct layer that has something to train."""
        trained = {d: [p for p in u.module.parameters() if p.requires_grad] for d, u in self._distinct.items()}
        digests = [digest for digest, parameters in trained.items() if parameters]
        steps = dict.fromkeys(self._distinct, CompiledStep(step_us=0.0, peak_bytes=0))
        untold = set()
        found = self._compiler().steps([trained[digest] for digest in digests], self._loaded.build_optimizer)
        for n, step in found:
            if isinstance(step, str):
                untold.add(step)
                step = self._one_pass(digests[n], trained[digests[n]])  # noqa: PLW2901
            steps[digests[n]] = step
        for reason in sorted(untold):
            self._note(
                f"the compiler cannot be asked about the optimizer's step ({reason}): taken to be one pass over "
                "parameters, gradients and state"
            )
        return steps

    def _one_pass(self, digest: str, trained: Sequence[Tensor]) -> CompiledStep:
        # Parameters and state are read and written, gradients read.
        bytes_ = 3 * sum(p.nbytes for p in trained) + 2 * self.optimizer[digest].state_bytes
        return CompiledStep(step_us=1e6 * bytes_ / self._target.rates.bytes_per_s, peak_bytes=0)

    def _compiler(self) -> Compiler:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpipe-plan", "tpu")
        return Compiler(self._target.chip, self._target.rates, folder, self._options.repeats)


def _run(unit: Unit, given: UnitInput) -> None:
    unit.run(given.fresh(), given)


def _made(detail: MemoryDetail) -> int:
    return sum(tensor.bytes for tensor in detail.outputs if tensor.alias < 0)


def _out_of_memory(error: BaseException | None) -> bool:
    """Whether it, or what caused it, is a device or the machine that has no more."""
    while error is not None:
        # torch's allocator on the CPU has no error of its own.
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
            return True
        error = error.__cause__
    return False


def _too_noisy(share: float, budget_s: float) -> str:
    return (
        f"this machine is too noisy to tell the best plan: that of another run may be {share:.1%} slower or faster; "
        f"end other programs, or allow more than `--time-budget {budget_s:g}s`"
    )
