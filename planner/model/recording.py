"""Recording of one forward of a model: calls of modules, operators, and the dependencies between tensors.

A position counts events: every operator, and every start and end of a module's forward. If a module has submodules,
the start and end of each torch function that its own code calls are events, too.

Tensors are tracked by storage, because a write through one view changes all views of the same storage. Every write
makes a new version of the storage. The versions form a directed acyclic graph, with edges from the versions that an
operator read to those that it created.

    def forward(self, x):              position   event
                                       1          call 0 begins: the model's own
        h = self.first(x)              2 .. 5     call 1, with two operators (t, addmm)
        y = h + 1                      6 .. 8     a torch function in the code of call 0, with one operator (add)
        return self.second(y) * h      9 .. 12    call 2
                                       13 .. 15   another function, with one operator (mul)
                                       16         call 0 ends

The stages after a cut run some operators from before the cut again: those in the code of a call that has not ended.
They do not run a call that has ended, because they receive its result, unless it is constant
(`planner.model.repeated_code`). After a cut at position 13, `h + 1` would run again if later code read y.
"""

from dataclasses import dataclass, field
from typing import Any

import networkx as nx

from planner.model.attributes import AttributeChange
from planner.model.functions import FunctionCall
from planner.model.leaves import Leaf, TensorMeta
from planner.model.nests import Nest
from planner.model.regions import Region

END = 1 << 60
"""Position after all events of the forward, where the model's outputs are used."""


@dataclass(kw_only=True)
class ModuleCall:
    """Call of a module's forward."""

    number: int
    path: str
    parent: int
    """Number of the call whose code made this call; -1 for the call of the model."""
    enter: int
    exit: int = END
    constant: bool = True
    """True if the call depends on no parameter, floating-point input or random number. Every stage can then run it."""
    children: list[int] = field(default_factory=list)
    """Values of `number` of the calls that the code of this call made, in order."""
    nest: Nest = field(default_factory=Nest)
    leaves: tuple[Leaf, ...] = ()
    """Leaves of the result, whose structure is `nest`."""
    is_varying: bool = False
    """True if the result's structure depends on the batch. Parts that differ are then `VaryingResult` in `leaves`."""
    changes: tuple[AttributeChange, ...] = ()
    """Attribute changes that the call made."""
    function_region: int = -1
    """Index in `Recording.regions` of the outermost autograd function around the call; -1 if there is none."""


@dataclass(frozen=True, kw_only=True)
class RecordedOperator:
    """One execution of an operator."""

    name: str
    time: int
    call: int
    """Number of the innermost call in which the operator ran."""
    model_tensors: tuple[str, ...]
    """Names of the parameters and buffers that the operator reads."""
    random: bool
    decides: bool
    """True if values that the operator reads determine control flow or the shape of its result."""
    writes_model_tensor: bool
    """True if the operator writes into a parameter or buffer."""
    writes: tuple[int, ...]
    """For each storage that the operator wrote, the number of its version before the write."""
    region: int = -1
    """Index in `Recording.regions` of the outermost checkpoint or autograd function around the operator; else -1."""


@dataclass(frozen=True, kw_only=True)
class FunctionResult:
    """Result of a torch function that a module's own code called, between calls of submodules.

    It may be sent across a cut instead of its operands (`planner.model.sent_results`).
    """

    call: int
    """Number of the module call whose code called the function."""
    gap: int
    """Index of the gap between submodule calls in which the function runs; 0 before the first submodule call."""
    called: FunctionCall
    """Name of the function, and number of its earlier calls since the last submodule call."""
    enter: int
    exit: int
    value: int
    """Index of the tensor in `Recording.values`."""
    version: int

    @property
    def is_in_place(self) -> bool:
        """True if the function writes into its first argument, as `normal_` does."""
        # `__rsub__` writes nothing.
        return self.called[0].endswith("_") and not self.called[0].endswith("__")


@dataclass(frozen=True, kw_only=True)
class CarriedState:
    """Tensor that one forward changes and a later forward reads."""

    name: str
    storage: int
    """Index of the tensor's storage in the recording; -1 if the forward assigns the tensor to an attribute."""
    first: int
    """Position of the first access."""
    last: int
    """Position of the last access."""
    attribute: tuple[str, tuple[Any, ...]] | None = None
    """Module path, and a tuple of attribute name and keys in nested containers; None unless `storage` is -1."""
    is_replaced: bool = False
    """True for a buffer that the forward replaces by another tensor."""


@dataclass(kw_only=True)
class Recording:
    """Recorded forward of a model."""

    calls: list[ModuleCall] = field(default_factory=list)
    """Calls in the order in which they began; call 0 is that of the model."""
    operators: list[RecordedOperator] = field(default_factory=list)
    flow: nx.DiGraph = field(default_factory=nx.DiGraph)
    """Versions of storages, with edges from operands to results.

    Attributes of a version:

    - `storage`: number of the storage
    - `operator`: number of the operator that created the version; -1 if there is none
    - `created`: position of creation
    - `uses`: positions of all uses"""
    values: list[tuple[int, TensorMeta]] = field(default_factory=list)
    """Tensors that may cross a cut: inputs, results of calls, and `candidates`; each with the number of its storage."""
    exposures: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """For each storage, its tensors that are inputs of the model or results of calls.

    Each tensor is a pair: its index in `values`, and the number of the call that returned it (-1 for an input).
    Tensors that a call sets as attributes are included. Results within autograd functions are left out."""
    inputs: tuple[Leaf, ...] = ()
    input_nest: Nest = field(default_factory=Nest)
    decisions: list[int] = field(default_factory=list)
    """Numbers of operators that need the values of their operands when a stage repeats them.

    They determine control flow or shapes (`RecordedOperator.decides`), or write into an integer tensor that every stage
    can compute. They need the values even if no code reads their results."""
    reads: list[tuple[int, ...]] = field(default_factory=list)
    """For each operator, the numbers of the storage versions that it reads."""
    regions: list[Region] = field(default_factory=list)
    """Checkpoints and autograd functions that ran in the forward."""
    candidates: list[FunctionResult] = field(default_factory=list)
    """Function results that may be sent across cuts: floating-point tensors and random numbers, in order."""
    outputs: tuple[int, ...] = ()
    """For each leaf of the model's output, the version of its storage (a node of `flow`); -1 if it is no tensor."""
    returned_model_tensors: frozenset[str] = frozenset()
    """Names of the parameters and buffers that the model returns unchanged, such as learned weights of losses."""
    output_nest: Nest = field(default_factory=Nest)
    states: tuple[CarriedState, ...] = ()
    """Tensors that the model keeps from one forward to the next."""
    reused_tables: dict[tuple[str, tuple[Any, ...]], int] = field(default_factory=dict)
    """Cached tables (constant tensors) and numbers in module attributes, such as a mask and its length.

    Keys are as in `CarriedState.attribute`. Values are positions: the end of the last call that sets the attribute."""
    draws_on_host: bool = False
    """True if the forward draws from Python's or NumPy's generator."""
    unread: frozenset[int] = frozenset()
    """Items of `outputs` that the loss does not read."""
