"""Regions of a forward that no cut goes through: checkpoints, autograd functions that call modules, and gradients.

`torch.utils.checkpoint` calls its function once more in backward, with the model's modules as they are then: what a
stage put in place of those that it passed over is gone. An autograd function runs without a graph, so what the modules
in it return carries no gradient; only what it returns itself does. No cut goes through either. One that calls no module
is no obstacle: a stage behind a cut runs it again, with all the code around it.

`torch.autograd.grad` in a forward (the forces of a potential, a gradient penalty) needs the graph from its inputs to
its outputs, which no stage has if a cut goes through it.

The re-entrant kind of checkpointing is such an autograd function. While a model is recorded, and while its layers run,
the other kind takes its place, which computes the same and leaves tensors their graph.
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
    """One region: when its first and its last operator or call began or ended."""

    begin: int
    end: int
    function: str = ""
    """Name of the autograd function; empty for a checkpoint."""
    call: int = -1
    """Of what `torch.autograd.grad` differentiates, the call of a module whose code does it; -1 for other regions.

    The region ends with that call: a stage that begins within it would run that code again, without the graph.
    """
    calls_modules: bool = False
    """Whether a module was called in it; where none was, its code can be run again like any other."""

    def holds(self, cut: int) -> bool:
        """Whether a cut goes through it."""
        return self.begin < cut <= self.end

    @property
    def problem(self) -> str:
        """Why that cannot be."""
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
    """Finds the regions around calls and operators on the stack of Python's own frames.

    Args:
        run: The code that runs every call of a module.
        regions: All regions that were found, in the order in which they began.
    """

    def __init__(self, run: CodeType, regions: list[Region]) -> None:
        self._run = run
        self._regions = regions
        self._levels: list[list[tuple[FrameType, int]]] = [[]]  # by call that is at work: the regions in its own code

    def around(self, frame: FrameType | None, time: int) -> tuple[int, ...]:
        """Numbers of the regions around a frame, from the outermost; something happens in them at `time`."""
        self._levels[-1] = self._in_code_at_work(frame, time)
        around = tuple(number for level in self._levels for _, number in level)
        for number in around:
            self._regions[number].end = time
        return around

    def enter(self) -> None:
        """A call begins: `around` was asked of it just before."""
        self._levels.append([])

    def leave(self) -> None:
        """The call at work ends."""
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
    """Meanwhile checkpoints with `use_reentrant=True` are made as with `use_reentrant=False`."""
    before = checkpointing.CheckpointFunction
    checkpointing.CheckpointFunction = _NotReentrant  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        checkpointing.CheckpointFunction = before  # type: ignore[misc]


class _NotReentrant:
    """Takes the place of the autograd function."""

    @staticmethod
    def apply(function: Callable[..., Any], *args: Any) -> Any:
        """What `function` returns, and its graph if the re-entrant kind would give it one."""
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
    """The autograd function that runs this code as its forward; empty where none does."""
    # By its forward, for `apply` has a frame of its own in some releases of torch, and none in others.
    if code.co_name != "forward":
        return ""
    functions = [torch.autograd.Function]
    for function in functions:  # grows as it goes
        functions += function.__subclasses__()
        if getattr(vars(function).get("forward"), "__func__", None) is not None and function.forward.__code__ is code:
            return function.__name__
    return ""
