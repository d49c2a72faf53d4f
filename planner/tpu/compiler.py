"""Compiler of layers and optimizer steps for a TPU. It uses several processes, and a cache on disk.

This module does not import jax or torchax; the compiling processes import them.
"""

import hashlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from planner.core.errors import ModelError
from planner.core.values.devices import Accelerator
from planner.files import parse_json
from planner.profile.units import LayerToMeasure, MeasurementInput
from planner.tpu.extra import package_versions
from planner.tpu.optimizers import OptimizerRule
from planner.tpu.outcomes import CompiledLayer, CompiledOptimizerStep

if TYPE_CHECKING:
    from planner.tpu.layer_functions import LayerFunction
    from planner.tpu.programs import CompiledProgram

_REVISION = 7
"""Revision of the cache; increase it when the content of cached results or the compilation changes."""

_WORKER_BYTES = 4 * 2**30
"""Memory reserved for each compiling process, in bytes; limits the number of processes."""

_Found = TypeVar("_Found", CompiledLayer, CompiledOptimizerStep)
_Work = Callable[[], _Found]


class LacksOperatorError(Exception):
    """Error for an operator that torchax cannot translate. The message is the operator's name."""


class OutOfMemoryError(Exception):
    """Error for an executable that needs more memory than the chip has."""


class _WorkerError(Exception):
    """Error in a compiling process. Its arguments are a one-line message and the traceback as text."""

    def __str__(self) -> str:
        return f"\n{self.args[1]}"


class Compiler:
    """Compiler of layers and optimizer steps for one kind of chip, with a cache of results.

    Args:
        chip: Name of the chip, such as `v2`; empty for the attached device.
        rates: Chip whose compute and memory rates are used for executables whose time the compiler does not estimate.
        folder: Folder of the cache. Results of an attached device are not cached.
        repeats: Number of timed runs of each executable on an attached device.
    """

    def __init__(self, chip: str, rates: Accelerator, folder: Path, repeats: int = 10) -> None:
        self._chip, self._rates, self._folder, self._repeats = chip, rates, folder, repeats

    def compile_layers(
        self, jobs: Sequence[tuple[LayerToMeasure, MeasurementInput]]
    ) -> Iterator[tuple[int, CompiledLayer]]:
        """Compile layers. Yield, for each of `jobs`, its index and the compiled layer.

        A job is a layer and its inputs. Cached results come first, then new results as they finish.

        Raises:
            ModelError: torchax lacks an operator of a layer, or a layer cannot be compiled. The message names all such
                layers.
            MemoryError: A layer alone needs more memory than the chip has.
        """
        described = [_described(unit, received) for unit, received in jobs]
        works = [partial(self._compiled_unit, unit, received) for unit, received in jobs]
        yield from self._cached_or_compiled(CompiledLayer, [unit.name for unit, _ in jobs], described, works)

    def compile_steps(
        self, names: Sequence[str], parameters: Sequence[Sequence[Tensor]], rule: OptimizerRule
    ) -> Iterator[tuple[int, CompiledOptimizerStep]]:
        """Compile the optimizer steps of layers. Yield, for each layer, its index and the compiled step.

        Cached results come first, then new results as they finish.

        Args:
            names: Names of the layers, for error messages.
            parameters: Trained parameters of each layer. Only shapes and dtypes are read.
            rule: Update rule of the optimizer.

        Raises:
            ModelError: A step cannot be compiled.
            MemoryError: A step needs more memory than the chip has.
        """
        described = [["step", rule.description, [[list(p.shape), str(p.dtype)] for p in of]] for of in parameters]
        works = [partial(self._compiled_step, of_layer, rule) for of_layer in parameters]
        yield from self._cached_or_compiled(CompiledOptimizerStep, names, described, works)

    # The next two methods and `_time_us` run in forked processes. Each process imports jax there, not before the fork.

    def _compiled_unit(self, unit: LayerToMeasure, received: MeasurementInput) -> CompiledLayer:
        from planner.tpu.chips import target_device  # noqa: PLC0415
        from planner.tpu.layer_programs import compile_layer  # noqa: PLC0415

        return compile_layer(jax_function_of_layer(unit, received), target_device(self._chip), self._time_us)

    def _compiled_step(self, parameters: Sequence[Tensor], rule: OptimizerRule) -> CompiledOptimizerStep:
        from planner.tpu.chips import target_device  # noqa: PLC0415
        from planner.tpu.layer_programs import compile_step  # noqa: PLC0415

        return compile_step(parameters, rule, target_device(self._chip), self._time_us)

    def _time_us(self, program: "CompiledProgram", shapes: Any) -> float:
        if not self._chip:
            from planner.tpu.programs import measure_time_us  # noqa: PLC0415

            return measure_time_us(program, shapes, self._repeats)
        if program.seconds > 0:
            return 1e6 * program.seconds
        # Matmuls use bfloat16 unless the model sets another precision.
        return 1e6 * max(program.flops / self._rates.half_flops_per_s, program.accessed_bytes / self._rates.bytes_per_s)

    def _cached_or_compiled(
        self, kind: type[_Found], names: Sequence[str], described: Sequence[list[Any]], works: Sequence[_Work[_Found]]
    ) -> Iterator[tuple[int, _Found]]:
        """Yield the index and result of each job (layer name, description, function) as it finishes.

        Jobs with equal descriptions have one cache file and run once.
        """
        paths = list(map(self._cache_path, described))
        missing: dict[Path, list[int]] = {}
        for n, path in enumerate(paths):
            cached = _read_cached(kind, path) if self._chip else None
            if cached is None:
                missing.setdefault(path, []).append(n)
            else:
                yield n, cached
        groups, problems = list(missing.values()), dict[str, Exception]()
        todo = [works[equal_jobs[0]] for equal_jobs in groups]
        for place, outcome in _run_in_processes(todo, num_workers=_num_workers(len(todo)) if self._chip else 1):
            if isinstance(outcome, Exception):
                problems |= {names[n]: outcome for n in groups[place]}
                continue
            if self._chip:
                _write_cached(paths[groups[place][0]], outcome)
            yield from ((n, outcome) for n in groups[place])
        _raise_if_failed(problems)

    def _cache_path(self, described: list[Any]) -> Path:
        decisive = [_REVISION, self._chip, *described, package_versions()]
        digest = hashlib.sha256(json.dumps(decisive, sort_keys=True).encode())
        return self._folder / f"{digest.hexdigest()[:32]}.json"


def jax_function_of_layer(unit: LayerToMeasure, received: MeasurementInput) -> "LayerFunction":
    """Return a layer as a function of JAX arrays.

    The arguments are the layer's inputs. The last layer also takes the targets, and returns the loss.
    """
    from planner.tpu.layer_functions import layer_function  # noqa: PLC0415 - jax

    targets, nest = tree_flatten(received.targets)
    num = len(received.values)

    def run(values: Sequence[Any]) -> Sequence[Any]:
        return unit.run(values[:num], replace(received, targets=tree_unflatten(values[num:], nest)))

    return layer_function(unit.module, run, [*received.values, *targets])


def _described(unit: LayerToMeasure, received: MeasurementInput) -> list[Any]:
    shapes = [[str(v.dtype), list(v.shape)] if isinstance(v, Tensor) else repr(v) for v in received.values]
    parameters = [[name, list(p.shape), str(p.dtype), p.requires_grad] for name, p in unit.module.named_parameters()]
    return [unit.digest, shapes, str(received.spec), parameters, unit.precision]


def _raise_if_failed(problems: Mapping[str, Exception]) -> None:
    lacking = [f'"{layer}": {error}' for layer, error in problems.items() if isinstance(error, LacksOperatorError)]
    if lacking:
        raise ModelError(
            f"torchax cannot translate operators of some layers for the TPU: {'; '.join(lacking)}",
            hint="write these layers with other operators, or profile on another device",
        )
    failed = [(layer, error) for layer, error in problems.items() if isinstance(error, _WorkerError)]
    if failed:
        (layer, error), *others = failed
        more = f" (and {len(others)} more layers)" if others else ""
        raise ModelError(f'layer "{layer}" cannot be compiled for the TPU{more}: {error.args[0]}') from error
    for layer, too_large in problems.items():
        raise MemoryError(f'layer "{layer}": {too_large}')


def _run_in_processes(works: Sequence[_Work[_Found]], *, num_workers: int) -> Iterator[tuple[int, _Found | Exception]]:
    global _jobs  # noqa: PLW0603 - forked processes inherit it
    _jobs = works
    if num_workers == 1:
        yield from map(_run_job, range(len(works)))
        return
    # Fork before jax is imported, so that each process has the model and its own jax.
    with multiprocessing.get_context("fork").Pool(num_workers, initializer=_ignore_interrupts_and_stderr) as pool:
        yield from pool.imap_unordered(_run_job, range(len(works)))


_jobs: Sequence[Callable[[], Any]] = ()


def _run_job(place: int) -> tuple[int, Any]:
    try:
        return place, _jobs[place]()
    except (LacksOperatorError, OutOfMemoryError) as error:
        return place, error
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else ""
        return place, _WorkerError(f"{type(error).__name__}: {first}", traceback.format_exc())


def _read_cached(kind: type[_Found], path: Path) -> _Found | None:
    # A broken file is ignored: the job is compiled again.
    with suppress(OSError, ValueError):
        return parse_json(kind, path.read_bytes())
    return None


def _write_cached(path: Path, outcome: Any) -> None:
    with suppress(OSError):  # on a full disk, only the time of another compilation is lost
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        unfinished.replace(path)


def _ignore_interrupts_and_stderr() -> None:
    # The parent process handles Ctrl-C. libtpu writes to stderr when its process is ended.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _num_workers(num_jobs: int) -> int:
    if num_jobs < 2 or "jax" in sys.modules or "fork" not in multiprocessing.get_all_start_methods():
        return 1
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(num_jobs, len(os.sched_getaffinity(0)), memory_bytes // _WORKER_BYTES))
