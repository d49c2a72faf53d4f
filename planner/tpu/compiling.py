"""Works that compile: outcomes are remembered on disk, and what is missing is made in several processes."""

import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from planner.core.errors import ModelError

_WORKER_BYTES = 4 * 2**30
"""A process that compiles needs about so much at most."""

_LACKING, _TOO_LARGE = "lacking", "too large"
"""What may be wrong with a layer."""

_Found = TypeVar("_Found")
Work = Callable[[], _Found]


class LacksOperatorError(Exception):
    """torchax has no translation of an operator."""


class OutOfMemoryError(Exception):
    """A program needs more memory than the chip has."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Why a layer was not compiled, as it can pass from one process to another."""

    kind: str
    what: str
    traceback: str = ""


def found_by(
    kind: type[_Found], paths: Sequence[Path | None], works: Sequence[Work[_Found]], *, several: bool
) -> Iterator[tuple[int, _Found | Problem]]:
    """Each work's place and outcome as they come, those that are remembered first; equal ones are made once.

    Args:
        kind: A dataclass: what works give.
        paths: Of each work, the file that its outcome is remembered in; None: none. Equal paths are equal works.
        works: What to do.
        several: Whether there may be several processes.
    """
    missing: dict[Path | int, list[int]] = {}
    for n, path in enumerate(paths):
        remembered = _remembered(kind, path)
        if remembered is None:
            missing.setdefault(n if path is None else path, []).append(n)
        else:
            yield n, remembered
    places = list(missing.values())
    for place, outcome in _worked_off([works[alike[0]] for alike in places], several=several):
        if isinstance(outcome, kind):
            _remember(paths[places[place][0]], outcome)
        for n in places[place]:
            yield n, outcome


def raise_problems(problems: Mapping[str, Mapping[str, Problem]]) -> None:
    """Raises what is wrong with layers, if anything: by kind, and by the layer's name.

    Raises:
        ModelError: torchax lacks an operator of a layer, or a layer cannot be compiled; all such layers are named.
        MemoryError: A layer alone needs more memory than the chip has.
    """
    if _LACKING in problems:
        operators = "; ".join(f'"{layer}": {problem.what}' for layer, problem in problems[_LACKING].items())
        raise ModelError(
            f"torchax cannot translate operators of some layers for the TPU: {operators}",
            hint="write these layers with other operators, or profile on another device",
        )
    if "" in problems:
        layer, problem = next(iter(problems[""].items()))
        more = f" (and {len(problems['']) - 1} more layers)" if len(problems[""]) > 1 else ""
        raise ModelError(f'layer "{layer}" cannot be compiled for the TPU{more}: {problem.what}') from _WorkerError(
            problem.traceback
        )
    if _TOO_LARGE in problems:
        layer, problem = next(iter(problems[_TOO_LARGE].items()))
        raise MemoryError(f'layer "{layer}": {problem.what}')


class _WorkerError(Exception):
    """An exception of another process: its traceback, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _worked_off(works: Sequence[Work[_Found]], *, several: bool) -> Iterator[tuple[int, _Found | Problem]]:
    global _job  # noqa: PLW0603 - what a forked process inherits
    workers = _num_workers(len(works)) if several else 1
    if workers == 1:
        for n, work in enumerate(works):
            yield n, _tried(work)
        return
    _job = [partial(_tried, work) for work in works]
    # Forked before jax is imported, so that each has the model as it is here and a jax of its own.
    with multiprocessing.get_context("fork").Pool(workers, initializer=_quiet) as pool:
        yield from pool.imap_unordered(_run_job, range(len(works)))


_job: list[Callable[[], Any]] = []


def _run_job(place: int) -> tuple[int, Any]:
    return place, _job[place]()


def _tried(work: Callable[[], _Found]) -> _Found | Problem:
    try:
        return work()
    except LacksOperatorError as error:
        return Problem(kind=_LACKING, what=str(error))
    except OutOfMemoryError as error:
        return Problem(kind=_TOO_LARGE, what=str(error))
    except Exception as error:
        first = str(error).splitlines()[0] if str(error) else ""
        return Problem(kind="", what=f"{type(error).__name__}: {first}", traceback=traceback.format_exc())


def _remembered(kind: type[_Found], path: Path | None) -> _Found | None:
    if path is None:
        return None
    # Whatever is wrong with the file, it can be compiled again.
    with suppress(OSError, ValueError, TypeError):
        kinds, values = get_type_hints(kind), json.loads(path.read_text(encoding="utf-8"))
        return kind(**{name: _restored(kinds[name], value) for name, value in values.items()})
    return None


def _restored(kind: Any, value: Any) -> Any:
    """A number, or a tuple of numbers or of dataclasses, from what JSON has for it."""
    if not isinstance(value, list):
        return value
    make: Any = get_args(kind)[0]
    return tuple(make(**each) if isinstance(each, dict) else each for each in value)


def _remember(path: Path | None, outcome: Any) -> None:
    if path is None:
        return
    with suppress(OSError):  # a full disk costs time, not the profile
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
        unfinished.replace(path)


def _quiet() -> None:
    """Ctrl-C is the parent's business, and so are messages; libtpu's last words when it is ended are many."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _num_workers(num_jobs: int) -> int:
    if num_jobs < 2 or "jax" in sys.modules or "fork" not in multiprocessing.get_all_start_methods():
        return 1
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(num_jobs, len(os.sched_getaffinity(0)), memory_bytes // _WORKER_BYTES))
