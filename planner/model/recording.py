"""Recording of one forward of a model: calls of modules, operators, and the dependencies between tensors.

Time is a counter that every operator and every begin and end of a module's forward advances. Tensors are followed by
storage, and every write makes a new version of the storage: views share their storage, so a write through one view is
seen through all others. The versions form a directed acyclic graph, from what an operator read to what it made.

    def forward(self, x):              time       event
                                       1          call 0 begins: the model's own
        h = self.first(x)              2 .. 5     call 1, with two operators (t, addmm)
        y = h + 1                      6 .. 8     a torch function in the code of call 0, with one operator (add)
        return self.second(y) * h      9 .. 12    call 2;  13 .. 15: another function (mul);  16: call 0 ends

A cut decides for each earlier operator whether later stages repeat it. An operator of a finished call is not repeated:
the result of the call is received. An operator in the code of an open call is repeated. At a cut at time 6, call 1 is
finished; at 13, calls 1 and 2 are. After the latter, `h + 1` would be repeated if anything there read y.
"""

from dataclasses import dataclass, field
from typing import Any

import networkx as nx

from planner.model.attributes import AttributeChange
from planner.model.functions import Called
from planner.model.leaves import Leaf, Meta
from planner.model.nests import Nest
from planner.model.regions import Region

END = 1 << 60
"""Time at which the model's outputs are used."""


@dataclass(kw_only=True)
class Call:
    """Call of a module's forward."""

    number: int
    path: str
    parent: int
    """Number of the call whose code made this one; -1 for the model itself."""
    enter: int
    exit: int = END
    constant: bool = True
    """True if it depends on no parameter, floating-point input or random number: every stage can run it again."""
    children: list[int] = field(default_factory=list)
    """Numbers of the calls that its code made, in order."""
    nest: Nest = field(default_factory=Nest)
    leaves: tuple[Leaf, ...] = ()
    """Leaves of its result, in the structure `nest`."""
    changes: tuple[AttributeChange, ...] = ()
    """Values that it left in attributes of modules."""
    function: int = -1
    """Number of the outermost region around it that is an autograd function: its result has no graph there."""


@dataclass(frozen=True, kw_only=True)
class Operator:
    """Operator that ran."""

    name: str
    time: int
    call: int
    """Innermost call that it ran in."""
    holds: tuple[str, ...]
    """Parameters and buffers it reads."""
    random: bool
    decides: bool
    """True if control flow, or the shape of its result, depends on the values it reads."""
    writes_held: bool
    """True if it writes into a parameter or buffer."""
    writes: tuple[int, ...]
    """Versions that it wrote over."""
    region: int = -1
    """Number of the outermost region around it."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """Result of one call of a torch function in a module's own code, after that code has called a submodule."""

    call: int
    """Call whose own code made it."""
    gap: int
    """Number of submodules that the code had called before."""
    called: Called
    """Torch function that made it, in this gap."""
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
    """Number of its storage when the forward begins; -1 for an attribute that is assigned."""
    first: int
    """Time of the first access."""
    last: int
    """Time of the last access."""
    attribute: tuple[str, tuple[Any, ...]] | None = None
    """Path of the module, and the keys from its attributes to the tensor; None if it is written in place."""
    is_replaced: bool = False
    """True for a buffer that the forward replaces by another tensor."""


@dataclass(kw_only=True)
class Recording:
    """Forward of a model. Calls, operators, versions and values are identified by their numbers."""

    calls: list[Call] = field(default_factory=list)
    """Calls in the order in which they began; number 0 is the model's own."""
    operators: list[Operator] = field(default_factory=list)
    flow: nx.DiGraph = field(default_factory=nx.DiGraph)
    """Versions of storages, with edges from operands to results.

    Attributes of a version: `storage`, its number; `operator`, the operator that made it, or -1; `created`, the time of
    that; `uses`, the times of all uses."""
    values: list[tuple[int, Meta]] = field(default_factory=list)
    """Tensors that calls returned or that are inputs, as (storage, geometry); each geometry of a storage once."""
    exposures: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Pairs (value, call that returned it; -1 for an input of the model), by storage."""
    inputs: tuple[Leaf, ...] = ()
    input_nest: Nest = field(default_factory=Nest)
    decisions: list[int] = field(default_factory=list)
    """Numbers of the operators that decide the control flow or a shape by the values that they read."""
    reads: list[tuple[int, ...]] = field(default_factory=list)
    """Versions that each operator reads."""
    regions: list[Region] = field(default_factory=list)
    """Regions that no cut may go through."""
    candidates: list[Join] = field(default_factory=list)
    """Floating-point tensors that may cross a cut although no call returns them, in order of creation."""
    outputs: tuple[int, ...] = ()
    """Version of each leaf of the model's result; -1 if it is not a tensor."""
    output_holds: frozenset[str] = frozenset()
    """Parameters and buffers that the model returns unchanged, such as learned weights of losses."""
    output_nest: Nest = field(default_factory=Nest)
    states: tuple[KeptState, ...] = ()
    """State that the model keeps from one forward to the next."""
    draws_on_host: bool = False
    """True if the forward draws from Python's or NumPy's generator."""
    unread: frozenset[int] = frozenset()
    """Versions in `outputs` that the loss does not read."""
