"""Find the regions of a forward through which no cut may go.

- `torch.utils.checkpoint` runs its whole function again in backward. So the function must be in one stage.
- The forward of an autograd function runs without a graph. If the function calls modules, their results carry no
  gradient across a cut. An autograd function that calls no module is no obstacle.

Re-entrant checkpointing is an autograd function that calls modules. While a model is recorded, and while its layers
run, non-reentrant checkpointing replaces it.
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
    """Checkpoint or autograd function in a recorded forward, from position `begin` to position `end`."""

    begin: int
    end: int
    function: str = ""
    """Name of the autograd function; empty for a checkpoint."""
    calls_modules: bool = False
    """True if modules are called in the region. No cut may divide such a region."""

    def contains(self, cut: int) -> bool:
        """Return True if a cut at position `cut` would divide the region."""
        return self.begin < cut <= self.end

    @property
    def problem(self) -> str:
        """Reason why no cut can go through the region, for a message."""
        if not self.function:
            return "the cut is inside a function that `torch.utils.checkpoint` runs again as a whole"
        return (
            f"the autograd function {self.function} calls modules, whose results carry no gradient there "
            "(if it is for checkpointing, use `torch.utils.checkpoint` with `use_reentrant=False`)"
        )


class RegionFinder:
    """Finder of checkpoints and autograd functions in Python's stack frames.

    Args:
        run: Code object of the recorder's function that runs a module. Frames are searched up to this function.
        regions: List to which new regions are appended.
    """

    def __init__(self, run: CodeType, regions: list[Region]) -> None:
        self._run = run
        self._regions = regions
        self._levels: list[list[tuple[FrameType, int]]] = [[]]  # for each running call: the regions in its own code

    def regions_around(self, frame: FrameType | None, position: int) -> tuple[int, ...]:
        """Return the indices of the regions in which the code of a stack frame runs, the outermost first.

        The method also updates the list of regions. It appends returned regions that are not in the list yet. It
        sets the end of every returned region to `position`, the current position in the recording.
        """
        self._levels[-1] = self._regions_in_frames(frame, position)
        around = tuple(number for level in self._levels for _, number in level)
        for number in around:
            self._regions[number].end = position
        return around

    def begin_call(self) -> None:
        """Record that a call of a module begins. Call `regions_around` with the caller's frame first."""
        self._levels.append([])

    def end_call(self) -> None:
        """Record that the innermost running call ends."""
        self._levels.pop()

    def _regions_in_frames(self, frame: FrameType | None, position: int) -> list[tuple[FrameType, int]]:
        known = self._levels[-1]
        now: list[tuple[FrameType, int]] = []
        while frame is not None and frame.f_code is not self._run:
            if frame.f_code is _CHECKPOINT or _function_of(frame.f_code):
                now.append((frame, next((number for one, number in known if one is frame), -1)))
            frame = frame.f_back
        return [(one, self._new(one, position) if number < 0 else number) for one, number in reversed(now)]

    def _new(self, frame: FrameType, position: int) -> int:
        self._regions.append(Region(begin=position, end=position, function=_function_of(frame.f_code)))
        return len(self._regions) - 1


@contextmanager
def without_reentrant_checkpointing() -> Iterator[None]:
    """Replace re-entrant checkpointing in the `with` block by non-reentrant checkpointing."""
    before = checkpointing.CheckpointFunction
    checkpointing.CheckpointFunction = _NotReentrant  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        checkpointing.CheckpointFunction = before  # type: ignore[misc]


class _NotReentrant:
    @staticmethod
    def apply(function: Callable[..., Any], *args: Any) -> Any:
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
    # The forward identifies the function, because only some releases of torch have a frame for `apply`.
    if code.co_name != "forward":
        return ""
    functions = [torch.autograd.Function]
    for function in functions:  # the loop appends to the list
        functions += function.__subclasses__()
        if getattr(vars(function).get("forward"), "__func__", None) is not None and function.forward.__code__ is code:
            return function.__name__
    return ""
