"""Compiles layers and steps of the optimizer for a TPU, and remembers on disk what came of it, a file each."""

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from planner.core.values.rates import Rates
from planner.model.optimizers import Builder
from planner.profile.units import Unit, UnitInput
from planner.tpu.compiling import Problem, found_by, raise_problems
from planner.tpu.extra import versions
from planner.tpu.outcomes import CompiledLayer, CompiledStep

if TYPE_CHECKING:
    from planner.tpu.halves import LayerFunction
    from planner.tpu.programs import Program

_REVISION = 6
"""The revision of what is remembered of a layer or a step, and of how it is compiled."""

_SMALL = 2
"""Rows and columns of parameters that an optimizer is asked about its options with."""


class Compiler:
    """Compiles layers for one kind of chip, or for the device that is attached, and remembers what came of it.

    Args:
        chip: `v2`, say; empty for an attached device.
        rates: The chip's.
        folder: Where it is remembered; None: nowhere.
        repeats: Timed runs of each program on an attached device.
    """

    def __init__(self, chip: str, rates: Rates, folder: Path | None, repeats: int = 10) -> None:
        self._chip, self._rates, self._folder, self._repeats = chip, rates, folder, repeats

    def compile(self, jobs: Sequence[tuple[Unit, UnitInput]]) -> Iterator[tuple[int, CompiledLayer]]:
        """Each job's place and outcome as they come, those that are remembered first.

        Args:
            jobs: Units, each with its input.

        Raises:
            ModelError: torchax lacks an operator of a layer, or a layer cannot be compiled; all such layers are named.
            MemoryError: A layer alone needs more memory than the chip has.
        """
        paths = [self._path(_described(unit, received)) for unit, received in jobs]
        works = [partial(self._compiled_unit, unit, received) for unit, received in jobs]
        problems: dict[str, dict[str, Problem]] = {}
        for n, outcome in found_by(CompiledLayer, paths, works, several=bool(self._chip)):
            if isinstance(outcome, CompiledLayer):
                yield n, outcome
            else:
                problems.setdefault(outcome.kind, {})[jobs[n][0].name] = outcome
        raise_problems(problems)

    def steps(self, parameters: Sequence[Sequence[Tensor]], build: Builder) -> Iterator[tuple[int, CompiledStep | str]]:
        """The optimizer's step over the parameters of several layers: place and outcome, as they come.

        Args:
            parameters: Of each layer, those that are trained; of tensors only shape and dtype count.
            build: Makes the optimizer.

        Returns:
            The outcome is a line that says why, where the compiler cannot be asked: torchax cannot trace the optimizer.
        """
        paths = [self._path(_described_step(trained, build)) for trained in parameters]
        works = [partial(self._compiled_step, trained, build) for trained in parameters]
        for n, outcome in found_by(CompiledStep, paths, works, several=bool(self._chip)):
            yield n, outcome if isinstance(outcome, CompiledStep) else outcome.what

    # Private methods; what runs in the process that compiles imports jax there, after it has been forked.

    def _compiled_unit(self, unit: Unit, received: UnitInput) -> CompiledLayer:
        from planner.tpu.chips import target_device  # noqa: PLC0415
        from planner.tpu.layer_programs import compile_layer  # noqa: PLC0415

        return compile_layer(unit_function(unit, received), target_device(self._chip), self._time_us)

    def _compiled_step(self, parameters: Sequence[Tensor], build: Builder) -> CompiledStep:
        from planner.tpu.chips import target_device  # noqa: PLC0415
        from planner.tpu.layer_programs import compile_step  # noqa: PLC0415

        return compile_step(parameters, build, target_device(self._chip), self._time_us)

    def _time_us(self, program: "Program", shapes: Any) -> float:
        """Measured on an attached device; else the compiler's estimate, or the roofline's where it makes none."""
        if not self._chip:
            from planner.tpu.programs import measured_us  # noqa: PLC0415

            return measured_us(program, shapes, self._repeats)
        if program.seconds > 0:
            return 1e6 * program.seconds
        # Products are of bfloat16 numbers unless the model asks for another precision.
        return 1e6 * max(program.flops / self._rates.half_flops_per_s, program.accessed_bytes / self._rates.bytes_per_s)

    def _path(self, described: list[Any] | None) -> Path | None:
        """Where an outcome is remembered, by what decides it."""
        if described is None or self._folder is None or not self._chip:
            return None
        decisive = [_REVISION, self._chip, *described, versions()]
        digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode())
        return self._folder / f"{digest.hexdigest()[:32]}.json"


def unit_function(unit: Unit, received: UnitInput) -> "LayerFunction":
    """A unit, its loss included where it is the last, as a function of JAX arrays: inputs, then targets."""
    from planner.tpu.halves import layer_function  # noqa: PLC0415 - jax

    targets, nest = tree_flatten(received.targets)
    num = len(received.values)

    def run(values: Sequence[Any]) -> Sequence[Any]:
        return unit.run(values[:num], replace(received, targets=tree_unflatten(values[num:], nest)))

    return layer_function(unit.module, run, [*received.values, *targets])


def optimizer_description(parameters: Sequence[Tensor], build: Builder) -> list[Any] | None:
    """What decides the step beside the parameters; None for an optimizer that is not torch's, whose code may change."""
    small = [nn.Parameter(torch.zeros((_SMALL,) * p.dim(), dtype=p.dtype)) for p in parameters]
    optimizer = build(iter(small))
    module = inspect.getmodule(type(optimizer))
    if module is None or not module.__name__.startswith("torch.optim."):
        return None
    places = {id(parameter): n for n, parameter in enumerate(small)}
    groups = [
        [[places[id(p)] for p in group["params"]], sorted((k, repr(v)) for k, v in group.items() if k != "params")]
        for group in optimizer.param_groups
    ]
    return [type(optimizer).__name__, groups]


def _described(unit: Unit, received: UnitInput) -> list[Any]:
    shapes = [[str(v.dtype), list(v.shape)] if isinstance(v, Tensor) else repr(v) for v in received.values]
    parameters = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in unit.module.named_parameters()]
    return [unit.digest, shapes, str(received.spec), parameters, unit.precision]


def _described_step(parameters: Sequence[Tensor], build: Builder) -> list[Any] | None:
    described = optimizer_description(parameters, build)
    return None if described is None else ["step", described, [[list(p.shape), str(p.dtype)] for p in parameters]]
