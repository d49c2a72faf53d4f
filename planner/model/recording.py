"""What one forward of a model did, written down: calls of modules, operators, and what was computed from what.

Time is a counter that every operator and every begin and end of a module's forward advances. Tensors are followed by
storage, of which every write makes a new version: views share what they were made of, a write through one view is seen
through all others. The versions form a directed graph without cycles, from what an operator read to what it made.

Depending on where the model is cut, an operator is repeated by the stages behind the cut (the module whose code runs it
is still at work there) or lies inside a call that is over, and that those stages do not run.
"""

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from planner.core.errors import PlannerError
from planner.model.attributes import Attributes, Change
from planner.model.functions import Called, FunctionWatch
from planner.model.ghosts import SHAPE_ONLY, ghost_like, storage_of
from planner.model.held import replaced_tensors
from planner.model.leaves import Constant, Held, Leaf, Meta, Passed, Value, is_plain
from planner.model.nests import Nest, take_apart, tensors_in
from planner.model.refusals import in_place_told
from planner.model.regions import Region, RegionFinder, without_reentrance

__all__ = [
    "END",
    "SHAPE_ONLY",
    "Call",
    "Constant",
    "Held",
    "Join",
    "Leaf",
    "Meta",
    "Operator",
    "Passed",
    "Recording",
    "Value",
    "arguments_of",
    "as_ghosts",
    "record",
    "wrapped",
    "written_tensors",
]

END = 1 << 60
"""The time at which the model's outputs are used."""


@dataclass(kw_only=True)
class Call:
    """One call of a module's forward."""

    number: int
    path: str
    parent: int
    enter: int
    exit: int = END
    constant: bool = True
    """Nothing in it depends on a parameter, on a floating-point input or on chance: every stage can run it again."""
    children: list[int] = field(default_factory=list)
    nest: Nest = field(default_factory=Nest)
    leaves: tuple[Leaf, ...] = ()
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
    """Whose own code it is."""
    gap: int
    """How many submodules that has called before."""
    called: Called
    """By what, in this gap."""
    enter: int
    exit: int
    value: int
    """Number of the tensor in `Recording.values`."""
    version: int


@dataclass(kw_only=True)
class Recording:
    """One forward of a model."""

    calls: list[Call] = field(default_factory=list)
    operators: list[Operator] = field(default_factory=list)
    flow: nx.DiGraph = field(default_factory=nx.DiGraph)
    """Versions of storages, and what each was made from. Attributes: number of the `storage`, `operator` that made the
    version or -1, when it was `made`, times of its `uses`."""
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
    made: list[Join] = field(default_factory=list)
    """Floating-point tensors that may cross a cut though no call returns them, in the order in which they were made."""
    outputs: tuple[int, ...] = ()
    """By leaf of what the model returned: the version that it is, or -1 where it is no tensor."""
    output_nest: Nest = field(default_factory=Nest)
    unread: frozenset[int] = frozenset()
    """Of these versions, those that the loss does not read."""


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called with its inputs: a tuple is spread, a dict holds keyword arguments."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def record(model: nn.Module, inputs: Any, *, loss_of: Callable[[Any], object] | None = None, ghosts: bool) -> Recording:
    """Runs `model` on `inputs` once; buffers, gradients and the random state stay as they were.

    Args:
        model: The model.
        inputs: Its inputs.
        loss_of: The loss of what it returns; without it, all of that counts as read.
        ghosts: Runs it without the values of its parameters and buffers, which takes neither time nor memory. Raises
            `NeedsValuesError` if the model asks for a value.
    """
    recorder = _Recorder(model)
    with ExitStack() as stack:
        stack.callback(Attributes(model.named_modules()).restore)
        stack.enter_context(_quiet())
        stack.enter_context(torch.random.fork_rng())
        torch.manual_seed(0)
        stack.enter_context(as_ghosts(model) if ghosts else replaced_tensors(model, _own_buffer))
        recorder.know_model(model)
        recorder.know_inputs(inputs)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(saved_tensors_hooks(_forget, _forget))  # there will be no backward
        stack.enter_context(without_reentrance())
        args, kwargs = arguments_of(inputs)
        with wrapped(model.modules(), recorder.run), recorder:
            output = recorder.output_of(model, *args, **kwargs)
        recorder.outputs(output, None if loss_of is None else _read_by(loss_of, output))
    return recorder.recording


def as_ghosts(model: nn.Module) -> AbstractContextManager[None]:
    """Meanwhile parameters and buffers of `model` are ghosts; what is tied stays tied."""
    return replaced_tensors(model, _ghost)


def written_tensors(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Those among an operator's arguments that it writes into."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


# Private functions


class _Recorder(TorchDispatchMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording()
        self._paths = {module: path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self._time = 0
        self._stack: list[int] = []
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._versions: list[int] = []  # by storage, the newest
        self._held: dict[int, list[str]] = {}  # by storage
        self._tainted: set[int] = set()  # versions
        self._values: dict[tuple[int, Meta], int] = {}
        self._below: dict[nn.Module, list[tuple[str, nn.Module]]] = {}
        self._finder = RegionFinder(type(self).run.__code__, self.recording.regions)
        self._watch = FunctionWatch()

    def output_of(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the model returns; whatever torch refuses is told of the module whose code did it."""
        try:
            return model(*args, **kwargs)
        except RuntimeError:
            path = self.recording.calls[self._stack[-1]].path if self._stack else ""
            with in_place_told(f'"{path}"' if path else "the model's own code"):
                raise
        finally:
            self._watch.end_gap()

    def know_model(self, model: nn.Module) -> None:
        """Parameters and buffers by storage; a parameter taints what is computed from it."""
        for path, module in model.named_modules(remove_duplicate=False):
            owned = [*module._parameters.items(), *module._buffers.items()]
            for name, tensor in owned:
                if tensor is not None:
                    storage = self._storage(tensor)
                    names = self._held.setdefault(storage, [])
                    full = f"{path}.{name}" if path else name
                    if full not in names:
                        names.append(full)
                    if isinstance(tensor, nn.Parameter) or name in module._parameters:
                        self._tainted.add(self._versions[storage])

    def know_inputs(self, inputs: Any) -> None:
        """Tensors among the inputs; floating-point ones taint what is computed from them."""
        leaves, nest = take_apart(inputs)
        kept: list[Leaf] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                value = self._value(leaf, -1)
                if leaf.is_floating_point() or leaf.is_complex():
                    self._tainted.add(self._versions[self.recording.values[value.number][0]])
                kept.append(value)
            else:
                kept.append(Constant(leaf))
        self.recording.inputs, self.recording.input_nest = tuple(kept), nest

    def outputs(self, output: Any, read: set[int] | None) -> None:
        """Tensors of the model's output are used, whose storages lie at addresses in `read`; without it, all are."""
        leaves, nest = take_apart(output)
        versions = [self._version_of(leaf) if isinstance(leaf, Tensor) else -1 for leaf in leaves]
        used = {version for version in versions if version >= 0}
        if read is not None:
            # Others than the leaves, too: what is kept in an object of some class.
            used = {self._versions[self._storages[address][1]] for address in read if address in self._storages}
        for version in sorted(used):
            self._use(version, END)
        self.recording.outputs, self.recording.output_nest = tuple(versions), nest
        self.recording.unread = frozenset(versions).difference(used, (-1,))

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of a module's forward."""
        self._watch.end_gap()
        calls = self.recording.calls
        parent = self._stack[-1] if self._stack else -1
        call = Call(number=len(calls), path=self._paths[module], parent=parent, enter=self._tick())
        around = self._finder.around(sys._getframe(1), call.enter)
        call.function = next((number for number in around if self.recording.regions[number].function), -1)
        calls.append(call)
        if parent >= 0:
            calls[parent].children.append(call.number)
        given = take_apart((args, kwargs))[0]
        attributes = Attributes(self._modules_in(module))
        before = {id(leaf): self._version_of(leaf) for leaf in given if isinstance(leaf, Tensor)}
        self._stack.append(call.number)
        self._finder.enter()
        result = forward(*args, **kwargs)
        self._watch.end_gap()
        self._finder.leave()
        self._stack.pop()
        leaves, call.nest = take_apart(result)
        call.leaves = tuple(self._leaf(leaf, call, given, before) for leaf in leaves)
        call.changes = tuple(
            replace(change, leaves=tuple(self._leaf(leaf, call, given, before) for leaf in change.leaves))
            for change in attributes.changes()
        )
        call.exit = self._tick()
        self._finder.around(sys._getframe(1), call.exit)
        if self._stack:
            self._watch.begin_gap(self._function)
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _function(self, called: Called, run: Callable[[], Any]) -> Any:
        """One call of a torch function by a module's own code."""
        recording = self.recording
        call = recording.calls[self._stack[-1]]
        gap, enter = len(call.children), self._tick()
        result = run()
        end = self._tick()
        if isinstance(result, Tensor) and result.is_floating_point() and len(call.children) == gap:
            version = self._version_of(result)
            is_new = recording.flow.nodes[version]["made"] > enter
            if is_new and version in self._tainted and call.function < 0:
                value = self._value(result, call.number, exposed=False).number
                recording.made.append(
                    Join(
                        call=call.number,
                        gap=gap,
                        called=called,
                        enter=enter,
                        exit=end,
                        value=value,
                        version=version,
                    )
                )
        return result

    def _modules_in(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        if module not in self._below:
            self._below[module] = list(module.named_modules(prefix=self._paths[module]))
        return self._below[module]

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        recording, time = self.recording, self._tick()
        name = func._schema.name
        given = [] if name in SHAPE_ONLY else tensors_in((args, kwargs))
        storages = list(dict.fromkeys(self._storage(tensor) for tensor in given))
        reads = tuple(self._versions[storage] for storage in storages)
        random = torch.Tag.nondeterministic_seeded in func.tags
        tainted = random or any(version in self._tainted for version in reads)
        written = list(dict.fromkeys(self._storage(tensor) for tensor in written_tensors(func, args, kwargs)))
        call = self._stack[-1] if self._stack else 0
        operator = Operator(
            name=name,
            time=time,
            call=call,
            holds=tuple(self._name_in(self._held[storage], call) for storage in storages if storage in self._held),
            random=random,
            decides=_decides(func, given),
            writes_held=any(storage in self._held for storage in written),
            writes=tuple(self._versions[storage] for storage in written),
            region=next(iter(self._finder.around(sys._getframe(1), time)), -1),
        )
        number = len(recording.operators)
        recording.operators.append(operator)
        recording.reads.append(reads)
        if operator.decides and reads:
            recording.decisions.append(number)
        for version in reads:
            self._use(version, time)
        known = set(storages)
        for tensor in tensors_in(result):
            storage = self._storage(tensor, operator=number)
            if storage not in known and storage not in written:
                self._derive(self._versions[storage], reads, tainted=tainted)
        for storage in written:
            self._versions[storage] = self._version(storage, number)
            self._derive(self._versions[storage], reads, tainted=tainted)
        if tainted:
            for above in self._stack:
                recording.calls[above].constant = False

    def _derive(self, version: int, reads: tuple[int, ...], *, tainted: bool) -> None:
        self.recording.flow.add_edges_from((read, version) for read in reads if read != version)
        if tainted:
            self._tainted.add(version)

    def _leaf(self, leaf: Any, call: Call, given: list[Any], before: dict[int, int]) -> Leaf:
        argument = next((n for n, other in enumerate(given) if other is leaf), -1)
        if isinstance(leaf, Tensor):
            storage = self._storage(leaf)
            if argument >= 0 and before[id(leaf)] == self._versions[storage]:
                return Passed(argument)
            if isinstance(leaf, nn.Parameter) and storage in self._held:
                return Held(self._name_in(self._held[storage], call.number))
            return self._value(leaf, call.number, exposed=call.function < 0)
        return Passed(argument) if argument >= 0 and not is_plain(leaf) else Constant(leaf)

    def _value(self, tensor: Tensor, call: int, *, exposed: bool = True) -> Value:
        storage, meta = self._storage(tensor), Meta.of(tensor)
        number = self._values.setdefault((storage, meta), len(self._values))
        if number == len(self.recording.values):
            self.recording.values.append((storage, meta))
        if exposed:
            self.recording.exposures.setdefault(storage, []).append((number, call))
        return Value(number, meta)

    def _version_of(self, tensor: Tensor) -> int:
        return self._versions[self._storage(tensor)]

    def _storage(self, tensor: Tensor, operator: int = -1) -> int:
        memory = storage_of(tensor)
        known = self._storages.get(memory._cdata)
        if known is not None:
            return known[1]
        # A weak reference keeps the address from being given out again.
        storage = len(self._versions)
        self._storages[memory._cdata] = StorageWeakRef(memory), storage
        self._versions.append(self._version(storage, operator))
        return storage

    def _version(self, storage: int, operator: int) -> int:
        version: int = self.recording.flow.number_of_nodes()
        made = self.recording.operators[operator].time if operator >= 0 else -1
        self.recording.flow.add_node(version, storage=storage, operator=operator, made=made, uses=[])
        return version

    def _use(self, version: int, time: int) -> None:
        self.recording.flow.nodes[version]["uses"].append(time)

    def _name_in(self, names: list[str], call: int) -> str:
        """Of several names of a tied parameter, the one in the module at work."""
        while call >= 0:
            path = self.recording.calls[call].path
            inside = [name for name in names if name.startswith(f"{path}.")] if path else []
            if inside:
                return inside[0]
            call = self.recording.calls[call].parent
        return names[0]

    def _tick(self) -> int:
        self._time += 1
        return self._time


class _Reader(TorchDispatchMode):
    """Notes the addresses of all storages that are read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.addresses: set[int] = set()
        self.decides = False

    def read(self, tensors: Iterable[Tensor]) -> None:
        """They are."""
        self.addresses.update(storage_of(tensor)._cdata for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tensors_in((args, kwargs or {}))
        if func._schema.name not in SHAPE_ONLY:
            self.read(given)
        self.decides = self.decides or _decides(func, given)
        return func(*args, **(kwargs or {}))


def _read_by(loss_of: Callable[[Any], object], output: Any) -> set[int] | None:
    """Addresses of the storages that the loss reads; None if it may read others for other values, or fails here."""
    reader = _Reader()
    try:
        with reader:
            loss = loss_of(output)
    except PlannerError:
        raise
    except Exception:  # it is told where the loss is needed
        return None
    reader.read(tensors_in(loss))  # the output's own loss, say, of which nothing is computed
    return None if reader.decides else reader.addresses


def _decides(func: Any, given: list[Tensor]) -> bool:
    if func._schema.name == "aten::index" and all(t.dtype is not torch.bool for t in given[1:]):
        return False  # only a mask makes the shape depend on values
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _forget(_: Any) -> Any:
    """Keeps nothing."""
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """An operator that knows no shape without values is an error that is dealt with, not one to be logged."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _ghost(tensor: Tensor) -> Tensor:
    ghost = ghost_like(tensor, torch.device("cpu"))
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(ghost, requires_grad=tensor.requires_grad) if is_parameter else ghost


def _own_buffer(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()


@contextmanager
def wrapped(modules: Iterable[nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    """Has `run(module, forward, args, kwargs)` called wherever the forward of one of the modules is."""
    with ExitStack() as stack:
        for module in dict.fromkeys(modules):
            stack.callback(_restore, module, vars(module).get("forward"))
            module.__dict__["forward"] = _wrapper(module, module.forward, run)
        yield


def _wrapper(module: nn.Module, forward: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)  # some libraries look at the signature of a forward
    def call(*args: Any, **kwargs: Any) -> Any:
        return run(module, forward, args, kwargs)

    return call


def _restore(module: nn.Module, forward: Any) -> None:
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward
