"""Model to profile: traces the units, measures each distinct one, and writes down what every layer costs."""

import copy
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from planner.core.costs import saved_bytes
from planner.core.errors import UsageError
from planner.core.planning import GENERATOR
from planner.core.precision import Precision
from planner.core.profile import Device, Environment, LayerProfile, MemoryDetail, Model, Profile
from planner.model.chain import Chain, Layer, chain_digest, chain_of, tied_parameters
from planner.model.load import LoadedModel
from planner.model.machine import cpu_name, keep_freed_memory
from planner.model.meter import meter_for
from planner.model.precision import convert, converts
from planner.profile.clocks import clock_for
from planner.profile.flops import forward_flops
from planner.profile.memory import measure_casts, measure_memory
from planner.profile.optimizer import OptimizerCost, measure_optimizer, peaks_add
from planner.profile.timing import Times, measure_times
from planner.profile.units import Unit, trace_units

__all__ = ["ProfileOptions", "profile_model"]

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, how many measurements are done, and how many there are."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """How to profile."""

    micro_batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    device: str = "cpu"
    threads: int = 1
    repeats: int = 10


def profile_model(loaded: LoadedModel, options: ProfileOptions, progress: Progress = lambda *_: None) -> Profile:
    """Measures every layer of the model at every micro-batch size. The model is left as it was.

    Raises:
        ModelError: The model cannot be built, cut, or run on its example batch.
        UsageError: The device does not exist here.
    """
    device = device_of(options.device)
    torch.set_num_threads(options.threads)
    if device.type == "cpu":
        keep_freed_memory()
    model = _converted(loaded.build(), loaded.precision).to(device)
    chain = chain_of(model)
    with untouched(model):
        measured = _Measured(loaded, chain, options, device, progress)
        layers = tuple(measured.layer(n) for n in range(len(chain.layers)))
    return Profile(
        generator=GENERATOR,
        model=Model(
            source=loaded.source,
            settings=loaded.settings,
            inputs=loaded.inputs,
            digest=chain_digest(chain, loaded.settings, loaded.precision),
            parameters=sum(p.numel() for p in model.parameters()),
        ),
        device=describe_device(device),
        environment=Environment(
            torch=str(torch.__version__),
            python=platform.python_version(),
            dtype=loaded.precision or dtype_of(model),
            threads=options.threads,
        ),
        optimizer=loaded.optimizer_name,
        optimizer_peak="sum" if measured.optimizer_peaks_add else "largest",
        micro_batch_sizes=options.micro_batch_sizes,
        layers=layers,
    )


def dtype_of(model: nn.Module) -> str:
    """What most of a model's parameters are; only one is asked."""
    return str(next((p.dtype for p in model.parameters()), torch.float32)).removeprefix("torch.")


def _converted(model: nn.Module, precision: Precision) -> nn.Module:
    # What the file built may be the user's own, finished model: that one stays as it is.
    return convert(copy.deepcopy(model), precision) if converts(model, precision) else model


def device_of(name: str) -> torch.device:
    """The torch device called `name`.

    Raises:
        UsageError: Unknown, or not on this machine.
    """
    if re.fullmatch(r"cpu|cuda(:\d+)?", name) is None:
        raise UsageError(f"unknown device `{name}`", hint="use `--device cpu` or `--device cuda`")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"no CUDA device here for `--device {name}`", hint="profile on the machine that has it")
    return torch.device(name)


def describe_device(device: torch.device) -> Device:
    """Name and memory of a device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(kind="cuda", name=properties.name, memory_bytes=properties.total_memory)
    return Device(kind="cpu", name=cpu_name())


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


class _Measured:
    """All measurements of the distinct units of a chain."""

    def __init__(
        self, loaded: LoadedModel, chain: Chain, options: ProfileOptions, device: torch.device, progress: Progress
    ) -> None:
        self.chain = chain
        self.sizes = options.micro_batch_sizes
        self.tied = tied_parameters(chain.layers)
        self.units, inputs = trace_units(chain, loaded, self.sizes, device)
        distinct: Sequence[Unit] = list({unit.digest: unit for unit in self.units}.values())
        total = len(inputs) + len(distinct) + len(inputs) * (options.repeats + 2)
        done = iter(range(total + 1))
        meter, clock = meter_for(device), clock_for(device, options.threads)

        def step(what: str) -> None:
            progress(what, next(done), total)

        self.memory: dict[tuple[str, int], MemoryDetail] = {}
        by_digest = {unit.digest: unit for unit in distinct}
        for key, given in inputs.items():
            step(by_digest[key[0]].name)
            self.memory[key] = measure_memory(by_digest[key[0]], given, meter)
        self.saved = [saved_bytes([self.memory[unit.digest, size] for unit in self.units]) for size in self.sizes]
        self.optimizer: dict[str, OptimizerCost] = {}
        self.flops: dict[str, int] = {}
        self.casts: dict[str, int] = {}
        for unit in distinct:
            step(unit.name)
            self.optimizer[unit.digest] = measure_optimizer(
                unit.module, loaded.build_optimizer, meter=meter, clock=clock, repeats=options.repeats
            )
            self.flops[unit.digest] = forward_flops(unit, inputs[unit.digest, self.sizes[0]])
            self.casts[unit.digest] = measure_casts(unit, inputs[unit.digest, self.sizes[0]], meter)
        largest = max(distinct, key=lambda unit: sum(p.nbytes for p in unit.module.parameters()))
        self.optimizer_peaks_add = peaks_add(largest.module, loaded.build_optimizer, meter=meter)
        self.times: dict[tuple[str, int], Times] = measure_times(
            distinct, inputs, clock=clock, repeats=options.repeats, progress=step
        )

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
            parameter_bytes=sum(p.nbytes for p in layer.module.parameters()),
            gradient_bytes=sum(p.nbytes for p in layer.module.parameters() if p.requires_grad),
            optimizer_bytes=optimizer.state_bytes,
            buffer_bytes=sum(b.nbytes for b in layer.module.buffers()),
            cast_bytes=self.casts[unit.digest],
            tied=tied,
            tied_bytes=tied_bytes,
            optimizer_us=round(optimizer.step_us, 1),
            optimizer_peak_bytes=optimizer.peak_bytes,
            forward_us=tuple(round(t.forward_us, 1) for t in times),
            backward_us=tuple(round(t.backward_us, 1) for t in times),
            spread=tuple(round(t.spread, 4) for t in times),
            output_bytes=tuple(sum(t.bytes for t in d.outputs) for d in details),
            saved_bytes=tuple(self.saved[k][n] for k in range(len(self.sizes))),
            forward_peak_bytes=tuple(max(0, d.forward_peak_bytes - d.internal_bytes - _made(d)) for d in details),
            backward_peak_bytes=tuple(max(0, d.backward_peak_bytes - d.internal_bytes) for d in details),
            forward_flops=tuple(self.flops[unit.digest] * size // self.sizes[0] for size in self.sizes),
            detail=details,
        )

    def _details(self, n: int) -> tuple[MemoryDetail, ...]:
        return tuple(self.memory[self.units[n].digest, size] for size in self.sizes)

    def _ties(self, layer: Layer) -> tuple[tuple[str, ...], int]:
        mine = {name: parameter for name, parameter in layer.parameter_names().items() if name in self.tied}
        others = [other for name in mine for other in self.tied[name]]
        return tuple(dict.fromkeys(others)), sum(parameter.nbytes for parameter in mine.values())


def _made(detail: MemoryDetail) -> int:
    return sum(tensor.bytes for tensor in detail.outputs if tensor.alias < 0)
