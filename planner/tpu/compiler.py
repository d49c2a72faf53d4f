"""Compiles layers and steps of the optimizer for a TPU, and remembers on disk what came of it, a file each."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from planner.core.values.rates import Rates
from planner.profile.units import Unit, UnitInput
from planner.tpu.compiling import Problem, Work, found_by, raise_problems
from planner.tpu.extra import versions
from planner.tpu.optimizers import Rule
from planner.tpu.outcomes import CompiledLayer, CompiledStep

if TYPE_CHECKING:
    from planner.tpu.halves import LayerFunction
    from planner.tpu.programs import Program

_REVISION = 7
"""The revision of what is remembered of a layer or a step, and of how it is compiled."""


_Found = TypeVar("_Found", CompiledLayer, CompiledStep)


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
        described = [_described(unit, received) for unit, received in jobs]
        works = [partial(self._compiled_unit, unit, received) for unit, received in jobs]
        yield from self._outcomes(CompiledLayer, [unit.name for unit, _ in jobs], described, works)

    def steps(
        self, names: Sequence[str], parameters: Sequence[Sequence[Tensor]], rule: Rule
    ) -> Iterator[tuple[int, CompiledStep]]:
        """The optimizer's step over the trained parameters of several layers: place and outcome, as they come.

        Of tensors only shape and dtype count. Raises as `compile`.
        """
        described = [["step", rule.description, [[list(p.shape), str(p.dtype)] for p in of]] for of in parameters]
        works = [partial(self._compiled_step, of_layer, rule) for of_layer in parameters]
        yield from self._outcomes(CompiledStep, names, described, works)

    # Private methods; what runs in the process that compiles imports jax there, after it has been forked.

    def _compiled_unit(self, unit: Unit, received: UnitInput) -> CompiledLayer:
        from planner.tpu.chips import target_device  # noqa: PLC0415
        from planner.tpu.layer_programs import compile_layer  # noqa: PLC0415

        return compile_layer(unit_function(unit, received), target_device(self._chip), self._time_us)

    def _compiled_step(self, parameters: Sequence[Tensor], rule: Rule) -> CompiledStep:
        from planner.tpu.chips import target_device  # noqa: PLC0415
        from planner.tpu.layer_programs import compile_step  # noqa: PLC0415

        return compile_step(parameters, rule, target_device(self._chip), self._time_us)

    def _time_us(self, program: "Program", shapes: Any) -> float:
        """Measured on an attached device; else the compiler's estimate, or the roofline's where it makes none."""
        if not self._chip:
            from planner.tpu.programs import measured_us  # noqa: PLC0415

            return measured_us(program, shapes, self._repeats)
        if program.seconds > 0:
            return 1e6 * program.seconds
        # Products are of bfloat16 numbers unless the model asks for another precision.
        return 1e6 * max(program.flops / self._rates.half_flops_per_s, program.accessed_bytes / self._rates.bytes_per_s)

    def _outcomes(
        self, kind: type[_Found], names: Sequence[str], described: Sequence[list[Any]], works: Sequence[Work[_Found]]
    ) -> Iterator[tuple[int, _Found]]:
        paths = list(map(self._path, described))
        problems: dict[str, dict[str, Problem]] = {}
        for n, outcome in found_by(kind, paths, works, several=bool(self._chip)):
            if isinstance(outcome, kind):
                yield n, outcome
            elif isinstance(outcome, Problem):
                problems.setdefault(outcome.kind, {})[names[n]] = outcome
        raise_problems(problems)

    def _path(self, described: list[Any]) -> Path | None:
        """Where an outcome is remembered, by what decides it."""
        if self._folder is None or not self._chip:
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


def _described(unit: Unit, received: UnitInput) -> list[Any]:
    shapes = [[str(v.dtype), list(v.shape)] if isinstance(v, Tensor) else repr(v) for v in received.values]
    parameters = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in unit.module.named_parameters()]
    return [unit.digest, shapes, str(received.spec), parameters, unit.precision]
