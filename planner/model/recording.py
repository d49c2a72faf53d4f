"""What one forward of a model did, written down: module calls, operators, and which tensors lived from when to when.

Time is counted in events: a module's forward begins, a module's forward ends. What runs between event `e` and event
`e + 1` runs in slot `e`, and a cut at event `e` puts all slots below `e` in front and the others behind.

    event   0             1                 2              3                 4
            begin model   begin wte         end wte        begin h.0         ...
    slot       0              1                 2              3

Code of a module that runs between the calls of its children is its glue.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from planner.model.nests import Nest

__all__ = [
    "END",
    "Appearance",
    "Call",
    "InputLeaf",
    "Meta",
    "OutputLeaf",
    "Owned",
    "Point",
    "Recording",
    "Result",
    "Same",
    "Step",
    "StepLeaf",
    "Storage",
    "View",
]

END = 1 << 60
"""The slot in which the model's outputs are used."""


@dataclass(frozen=True)
class Meta:
    """A tensor without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Meta":
        """That of `tensor`."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device, tensor.requires_grad)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes to send it."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


@dataclass(frozen=True)
class Same:
    """Stands in a result for an object, not a tensor, that was among the arguments: at this place in them."""

    argument: int


@dataclass(frozen=True)
class Result:
    """What a module call or an operator returned: structure, and per leaf a `Meta`, a `Same`, or the constant."""

    nest: Nest
    leaves: tuple[Any, ...]


@dataclass(frozen=True)
class InputLeaf:
    """A tensor that came with the model's inputs."""

    leaf: int


@dataclass(frozen=True)
class OutputLeaf:
    """A tensor that a module call returned."""

    call: int
    leaf: int


@dataclass(frozen=True)
class StepLeaf:
    """A tensor that an operator in the glue of a module call returned."""

    call: int
    step: int
    leaf: int


Point = InputLeaf | OutputLeaf | StepLeaf
"""Where in the run of the model's code a tensor can be handed in, or taken out."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """A call of torch in a module's glue."""

    name: str
    slot: int
    constant: bool
    """Depends on nothing but whole-number inputs and buffers: every stage can run it again."""
    writes: bool
    result: Result
    decision: bool | None
    """What came out, where Python asked a yes or no of values that are not constant."""


@dataclass(kw_only=True)
class Call:
    """One call of a module's forward."""

    number: int
    path: str
    parent: int
    enter: int
    exit: int = -1
    constant: bool = True
    """Nothing in it depends on a parameter, on a float input or on chance."""
    dynamic: bool = False
    """Its glue asks for values that are not constant: what it does next may depend on the data."""
    result: Result = field(default_factory=lambda: Result(Nest(), (None,)))
    children: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


@dataclass(kw_only=True)
class Storage:
    """Memory that tensors lie in. Writes are known per storage: all its views see them."""

    number: int
    created: int
    kind: str
    """"made", "input", "parameter", "buffer" or "constant" (a tensor that was there before the forward)."""
    maker: int
    """The innermost module call it was made in."""
    constant: bool
    constant_until: int = END
    """From this event on the call that made it is over; it is no call that can be run again."""
    writes: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class View:
    """A tensor: a storage and a geometry in it."""

    number: int
    storage: int
    created: int
    maker: int
    meta: Meta
    base: int = -1
    """The tensor that it was made a view of, by an operator in the glue of `maker`."""
    last_read: int = -1


@dataclass(frozen=True, kw_only=True)
class Appearance:
    """A tensor comes into sight of the code of a module call."""

    point: Point
    view: int
    call: int
    """The call whose code sees it."""
    event: int
    """The first cut in front of which it was there."""
    meta: Meta


@dataclass(frozen=True, kw_only=True)
class Owned:
    """A parameter or buffer was read."""

    name: str
    slot: int
    call: int
    constant: bool
    written: bool


@dataclass(kw_only=True)
class Recording:
    """One forward."""

    inputs: Result
    input_views: list[int] = field(default_factory=list)
    """By leaf of the inputs: the tensor, or -1."""
    outputs: Result = field(default_factory=lambda: Result(Nest(), (None,)))
    calls: list[Call] = field(default_factory=list)
    events: list[tuple[int, bool]] = field(default_factory=list)
    """(call, whether it ends)."""
    storages: list[Storage] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    appearances: list[Appearance] = field(default_factory=list)
    reads: list[Owned] = field(default_factory=list)
    input_reads: set[tuple[int, int, int, bool]] = field(default_factory=set)
    """(leaf, slot, call, constant): where inputs that are kept on every stage are read."""
    work: dict[int, float] = field(default_factory=dict)
    """By slot: floating-point operations and numbers moved."""
    traces: dict[int, list[str]] = field(default_factory=dict)
    """By slot: operators with shapes and numbers."""

    def ancestors(self, call: int) -> Iterator[int]:
        """`call`, and the calls around it."""
        while call >= 0:
            yield call
            call = self.calls[call].parent

    def open_at(self, event: int) -> tuple[int, ...]:
        """The calls that are begun and not ended at a cut, outermost first."""
        return tuple(reversed(list(self.ancestors(self.calls[self.events[event][0]].parent))))

    def is_constant(self, storage: int, event: int) -> bool:
        """Whether a stage behind a cut can make this storage by itself."""
        made = self.storages[storage]
        return made.constant and event < made.constant_until
