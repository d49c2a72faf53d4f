"""Regions of a forward that no cut goes through: checkpoints, autograd functions that call modules, and gradients.

`torch.utils.checkpoint` calls its function again in backward, with the modules as they are then. Stand-ins of a stage
are removed by that time. An autograd function runs without a graph, so the results of modules in it carry no gradient;
only its own result does. So neither is cut. An autograd function that calls no module is no obstacle: a stage after a
cut runs it again, with all the code around it.

`torch.autograd.grad` in a forward (the forces of a potential, a gradient penalty) needs the graph from its inputs to
its outputs, which no stage has if a cut goes through it.

Re-entrant checkpointing is such an autograd function. While a model is recorded, and while its layers run, the other
kind replaces it. It computes the same results and keeps their graph.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor

_CHECKPOINT = inspect.unwrap(checkpointing.checkpoint).__code__


@dataclass(kw_only=True)
class Region:
    """Region of a forward, from the first to the last time at which an operator or call in it began or ended."""

    begin: int
    end: int
    function: str = ""
    """Name of the autograd function; empty for a checkpoint."""
    call: int = -1
    """Call of a module whose code calls `torch.autograd.grad`; -1 for other regions.

    The region ends with that call: a stage that begins within it would run that code again, without the graph.
    """
    calls_modules: bool = False
    """True if a module was called in it; otherwise its code can run again like any other."""

    def holds(self, cut: int) -> bool:
        """Return True if a cut at this time would divide the region."""
        return self.begin < cut <= self.end

    @property
    def problem(self) -> str:
        """Reason why no cut can go through it."""
        if self.call >= 0:
            return (
                "`torch.autograd.grad` in `forward` differentiates the code there, so one stage needs its whole graph "
                "(layers before its inputs, and after the module that returns the gradients, can be cut)"
            )
        if not self.function:
            return "that lies within a function that `torch.utils.checkpoint` runs again as a whole"
        return (
            f"the autograd function {self.function} calls modules, whose results carry no gradient there "
            "(if it is for checkpointing, use `torch.utils.checkpoint` with `use_reentrant=False`)"
        )


class RegionFinder:
    """Search for regions around calls and operators, on the stack of Python's frames.

    Args:
        run: Code that runs every call of a module.
        regions: All regions that were found, in the order in which they began.
    """

    def __init__(self, run: CodeType, regions: list[Region]) -> None:
        self._run = run
        self._regions = regions
        self._levels: list[list[tuple[FrameType, int]]] = [[]]  # by call that is at work: the regions in its own code

    def around(self, frame: FrameType | None, time: int) -> tuple[int, ...]:
        """Return the numbers of the regions around a frame, from the outermost, and extend them to `time`."""
        self._levels[-1] = self._in_code_at_work(frame, time)
        around = tuple(number for level in self._levels for _, number in level)
        for number in around:
            self._regions[number].end = time
        return around

    def enter(self) -> None:
        """Record that a call begins; `around` must be called for it just before."""
        self._levels.append([])

    def leave(self) -> None:
        """End the running call."""
        self._levels.pop()

    def _in_code_at_work(self, frame: FrameType | None, time: int) -> list[tuple[FrameType, int]]:
        known = self._levels[-1]
        now: list[tuple[FrameType, int]] = []
        while frame is not None and frame.f_code is not self._run:
            if frame.f_code is _CHECKPOINT or _function_of(frame.f_code):
                now.append((frame, next((number for one, number in known if one is frame), -1)))
            frame = frame.f_back
        return [(one, self._new(one, time) if number < 0 else number) for one, number in reversed(now)]

    def _new(self, frame: FrameType, time: int) -> int:
        self._regions.append(Region(begin=time, end=time, function=_function_of(frame.f_code)))
        return len(self._regions) - 1


@contextmanager
def without_reentrance() -> Iterator[None]:
    """Run checkpoints with `use_reentrant=True` as with `use_reentrant=False` inside the block."""
    before = checkpointing.CheckpointFunction
    checkpointing.CheckpointFunction = _NotReentrant  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        checkpointing.CheckpointFunction = before  # type: ignore[misc]


class _NotReentrant:
    """Replacement of the autograd function."""

    @staticmethod
    def apply(function: Callable[..., Any], *args: Any) -> Any:
        """Return the result of `function`, with a graph if the re-entrant kind would give it one."""
        preserve_rng_state, *given = args
        carries_gradient = any(isinstance(argument, Tensor) and argument.requires_grad for argument in args)
        if torch.is_grad_enabled() and carries_gradient:
            return checkpointing.checkpoint(
                function, *given, use_reentrant=False, preserve_rng_state=preserve_rng_state
            )
        with torch.no_grad():
            return function(*given)


@cache
def _function_of(code: CodeType) -> str:
    """Return the autograd function that runs this code as its forward; empty if there is none."""
    # Found by its forward, because only some releases of torch have a frame for `apply`.
    if code.co_name != "forward":
        return ""
    functions = [torch.autograd.Function]
    for function in functions:  # grows as it goes
        functions += function.__subclasses__()
        if getattr(vars(function).get("forward"), "__func__", None) is not None and function.forward.__code__ is code:
            return function.__name__
    return ""
