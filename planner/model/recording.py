"""What one forward of a model did, written down: calls of modules, operators, and what was computed from what.

Time is a counter that every operator and every begin and end of a module's forward advances. Tensors are followed by
storage, of which every write makes a new version: views share what they were made of, a write through one view is seen
through all others. The versions form a directed graph without cycles, from what an operator read to what it made.

    def forward(self, x):              time       what happens
                                       1          call 0 begins: the model's own
        h = self.first(x)              2 .. 5     call 1, with two operators (t, addmm)
        y = h + 1                      6 .. 8     a torch function in the code of call 0, with one operator (add)
        return self.second(y) * h      9 .. 12    call 2;  13 .. 15: another function (mul);  16: call 0 ends

Depending on where the model is cut, an operator is repeated by the stages behind the cut (the module whose code runs it
is still at work there) or lies inside a call that is over, and that those stages do not run. Behind a cut at time 6, or
at 13, calls 1, or 1 and 2, are over: what they returned is received. Behind the second, `h + 1` would be done again if
anything there read y.
"""

from dataclasses import dataclass, field
from typing import Any

import networkx as nx

from planner.model.attributes import Change
from planner.model.functions import Called
from planner.model.leaves import Leaf, Meta
from planner.model.nests import Nest
from planner.model.regions import Region

END = 1 << 60
"""The time at which the model's outputs are used."""


@dataclass(kw_only=True)
class Call:
    """One call of a module's forward."""

    number: int
    path: str
    parent: int
    """Number of the call whose code made this one; -1 for the model itself."""
    enter: int
    exit: int = END
    constant: bool = True
    """Nothing in it depends on a parameter, on a floating-point input or on chance: every stage can run it again."""
    children: list[int] = field(default_factory=list)
    """Numbers of the calls that its code made, in order."""
    nest: Nest = field(default_factory=Nest)
    leaves: tuple[Leaf, ...] = ()
    """What it returned: `leaves`, in the structure `nest`."""
    changes: tuple[Change, ...] = ()
    """What it left behind in attributes of modules."""
    function: int = -1
    """Number of the outermost region around it that is an autograd function: nothing that it returns has a graph."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator."""

    name: str
    time: int
    call: int
    """The innermost call that it ran in."""
    holds: tuple[str, ...]
    """Parameters and buffers it reads."""
    random: bool
    decides: bool
    """Python, or the shape of its result, depends on the values it reads."""
    writes_held: bool
    """It writes into a parameter or buffer."""
    writes: tuple[int, ...]
    """The versions that it wrote over."""
    region: int = -1
    """Number of the outermost region around it."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """A tensor that a module's own code made behind the first submodule it called, in one call of a torch function."""

    call: int
    """The call whose own code made it."""
    gap: int
    """How many submodules that code had called before."""
    called: Called
    """The torch function that made it, in this gap."""
    enter: int
    exit: int
    value: int
    """Number of the tensor in `Recording.values`."""
    version: int


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """Tensor that one forward changes and that a later forward uses."""

    name: str
    storage: int
    """Number of its storage when the forward begins; -1 for an attribute that is set anew."""
    first: int
    """Time of the first access."""
    last: int
    """Time of the last access."""
    attribute: tuple[str, tuple[Any, ...]] | None = None
    """Path of the module, and the keys from its attributes to the tensor; None for what is written in place."""
    is_replaced: bool = False
    """True for a buffer in whose place the forward puts another tensor."""


@dataclass(kw_only=True)
class Recording:
    """One forward of a model. Calls, operators, versions and values are known by their numbers."""

    calls: list[Call] = field(default_factory=list)
    """In the order in which they began; number 0 is the model's own."""
    operators: list[Operator] = field(default_factory=list)
    flow: nx.DiGraph = field(default_factory=nx.DiGraph)
    """Versions of storages, and what each was made from. Attributes: number of the `storage`, `operator` that made the
    version or -1, time at which it was `created`, times of its `uses`."""
    values: list[tuple[int, Meta]] = field(default_factory=list)
    """Tensors that calls returned or that came as inputs, each geometry of a storage once: (storage, geometry)."""
    exposures: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By storage: (value, call that returned it; -1 for an input of the model)."""
    inputs: tuple[Leaf, ...] = ()
    input_nest: Nest = field(default_factory=Nest)
    decisions: list[int] = field(default_factory=list)
    """Numbers of the operators that decide."""
    reads: list[tuple[int, ...]] = field(default_factory=list)
    """By operator: the versions it reads."""
    regions: list[Region] = field(default_factory=list)
    """What backward runs as a whole."""
    candidates: list[Join] = field(default_factory=list)
    """Floating-point tensors that may cross a cut though no call returns them, in the order in which they were made."""
    outputs: tuple[int, ...] = ()
    """By leaf of what the model returned: the version that it is, or -1 where it is no tensor."""
    output_holds: frozenset[str] = frozenset()
    """Parameters and buffers that the model returns as they are, such as learned weights of losses."""
    output_nest: Nest = field(default_factory=Nest)
    states: tuple[KeptState, ...] = ()
    """What the model keeps from one forward to the next."""
    draws_on_host: bool = False
    """Whether the forward draws from Python's or NumPy's generator."""
    unread: frozenset[int] = frozenset()
    """Those of the versions in `outputs` that the loss does not read."""
