"""Record one forward of a model. `recording.py` defines all terms."""

import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from planner.model.attributes import AttributeSnapshot, stored_leaves
from planner.model.calling import arguments_of, intercept_calls, modules_not_inside_compiled
from planner.model.carried_state import (
    AttributeKey,
    SecondForward,
    attribute_key,
    attribute_states,
    reused_tables,
    written_states,
)
from planner.model.differentiation import refuse_autograd_grad, without_fake_tensor_log
from planner.model.functions import FunctionCall, FunctionWatch, is_in_vmap
from planner.model.ghosts import SHAPE_ONLY, NeedsValuesError, storage_key, storage_of
from planner.model.leaves import ArgumentLeaf, ConstantValue, Leaf, NamedLeaf, TensorLeaf, TensorMeta, is_plain
from planner.model.loss_reads import addresses_read
from planner.model.module_tensors import copy_buffers_temporarily, parameters_as_ghosts, replace_computed_by_ghosts
from planner.model.nests import flatten, tensors_in, tensors_within
from planner.model.operators import OperatorWatch, depends_on_values, written_tensors
from planner.model.recording import END, CarriedState, FunctionResult, ModuleCall, RecordedOperator, Recording
from planner.model.refusals import explain_refusals
from planner.model.regions import RegionFinder, without_reentrant_checkpointing
from planner.model.seeding import host_generator_states, seeded_draws
from planner.model.variables import undo_variable_changes


def record(model: nn.Module, inputs: Any, *, loss_of: Callable[[Any], object] | None = None, ghosts: bool) -> Recording:
    """Return the recording of one forward of `model` on `inputs`, with or without the values of its parameters.

    Buffers, gradients and the random state are restored.

    Args:
        model: The model.
        inputs: Inputs of the model.
        loss_of: Function from the model's output to the loss. If it is None, all outputs count as read by the loss.
        ghosts: True to run without the values of parameters and buffers, which takes hardly any time and memory.

    Raises:
        ModelError: The forward calls `torch.autograd.grad`.
        NeedsValuesError: With ghosts, the model reads the value of a parameter or buffer, or of a tensor that is
            computed from one.
    """
    recorder = _ForwardRecorder(model)
    with ExitStack() as stack:
        stack.enter_context(undo_variable_changes(model))
        stack.enter_context(without_fake_tensor_log())
        # Random choices, such as skipped layers, are the same in each recording.
        stack.enter_context(seeded_draws(0))
        if ghosts:  # a closure of the model may refer to a parameter itself, not to the ghost that replaces it
            recorder.note_model(model)
        stack.enter_context(parameters_as_ghosts(model) if ghosts else copy_buffers_temporarily(model))
        recorder.note_model(model)
        recorder.note_inputs(inputs)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(refuse_autograd_grad())
        # Tensors saved for backward would look as if code still used them.
        stack.enter_context(saved_tensors_hooks(_forget, _forget))
        stack.enter_context(without_reentrant_checkpointing())
        before = host_generator_states()
        output = recorder.output_of(model, inputs)
        recorder.recording.draws_on_host = host_generator_states() != before
        recorder.note_outputs(output, None if loss_of is None else addresses_read(loss_of, output))
        del output
        states = written_states(recorder.recording, *recorder.changed_tensors(model))
        recorder.recording.states = (*states, *_attribute_states(recorder, model, inputs))
    recorder.release_graphs()
    return recorder.recording


def _attribute_states(recorder: "_ForwardRecorder", model: nn.Module, inputs: Any) -> list[CarriedState]:
    left = recorder.left_in_attributes(model)
    if not left:
        return []
    again = _ForwardRecorder(model)
    again.note_model(model)
    storages = {key: frozenset(map(again._storage, tensors)) for key, tensors in left.items()}
    again.note_inputs(inputs)
    try:
        again.output_of(model, inputs)
    except NeedsValuesError:
        raise
    except Exception:  # the model cannot run twice without a backward in between
        return []
    fixed = frozenset(key for key, tensors in left.items() if not any(map(recorder.is_tainted, tensors)))
    second = SecondForward(recording=again.recording, storages=storages, fixed=fixed)
    recorder.recording.reused_tables = reused_tables(recorder.recording, second)
    return attribute_states(recorder.recording, second)


class _ForwardRecorder:
    """Recorder of one forward."""

    # A version is the content of a storage between two writes. It is tainted if it depends on a parameter, a
    # floating-point input, a random number or a buffer that this forward has changed. Untainted versions, such as a
    # mask of positions, can be computed in every stage.

    def __init__(self, model: nn.Module) -> None:
        self.recording = Recording()
        self._attributes = AttributeSnapshot(model.named_modules())
        # If a module has several paths, the first one counts, as in `named_modules`.
        self._paths = {module: path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
        self._time = 0
        self._stack: list[int] = []  # numbers of the running calls, that of the model first
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}  # number of each storage, by address
        self._versions: list[int] = []  # newest version, by storage
        self._held: dict[int, list[str]] = {}  # names of parameters and buffers, by storage
        self._buffers: dict[int, Tensor] = {}  # buffers that exist before the forward, by storage
        self._tainted: set[int] = set()  # tainted versions
        self._values: dict[tuple[int, TensorMeta], int] = {}
        self._below: dict[nn.Module, list[tuple[str, nn.Module]]] = {}
        self._finder, self._watch = RegionFinder(type(self).run.__code__, self.recording.regions), FunctionWatch()

    def output_of(self, model: nn.Module, inputs: Any) -> Any:
        args, kwargs = arguments_of(inputs)
        try:
            modules = modules_not_inside_compiled(model)
            with intercept_calls(modules, self.run), OperatorWatch(after=self.note_operator):
                return model(*args, **kwargs)
        except RuntimeError:
            path = self.recording.calls[self._stack[-1]].path if self._stack else ""
            with explain_refusals(f'"{path}"' if path else "the model's own code"):
                raise
        finally:
            self._watch.stop_intercepting()

    def note_model(self, model: nn.Module) -> None:
        self._buffers.clear()
        for path, module in model.named_modules(remove_duplicate=False):
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is None:
                    continue
                storage = self._storage(tensor)
                names = self._held.setdefault(storage, [])
                full = f"{path}.{name}" if path else name
                if full not in names:
                    names.append(full)
                if name in module._buffers:
                    self._buffers[storage] = tensor
                if isinstance(tensor, nn.Parameter) or name in module._parameters:
                    self._tainted.add(self._versions[storage])

    def note_inputs(self, inputs: Any) -> None:
        leaves, nest = flatten(inputs)
        noted: list[Leaf] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                noted.append(ConstantValue(leaf))
                continue
            value = self._value(leaf, -1)
            if leaf.is_floating_point() or leaf.is_complex():
                self._tainted.add(self._versions[self.recording.values[value.number][0]])
            noted.append(value)
        self.recording.inputs, self.recording.input_nest = tuple(noted), nest

    def note_outputs(self, output: Any, addresses: set[int] | None) -> None:
        # Only outputs with an address in `addresses` count as used; if `addresses` is None, all do.
        leaves, nest = flatten(output)
        versions = [self._version_of(leaf) if isinstance(leaf, Tensor) else -1 for leaf in leaves]
        used = {version for version in versions if version >= 0}
        if addresses is None and not used:  # the output is an object, such as a distribution
            addresses = set(map(storage_key, tensors_within(leaves)))
        if addresses is not None:
            # The loss may also read tensors that are no leaves, inside an object of a class that is not flattened.
            used = {self._versions[self._storages[address][1]] for address in addresses if address in self._storages}
        storages = {self.recording.flow.nodes[version]["storage"] for version in used}
        self.recording.returned_model_tensors = frozenset(
            names[0] for held, names in self._held.items() if held in storages
        )
        for version in sorted(used):
            self._use(version, END)
        self.recording.outputs, self.recording.output_nest = tuple(versions), nest
        self.recording.unread = frozenset(versions).difference(used, (-1,))

    def release_graphs(self) -> None:
        for call in self.recording.calls:
            for leaf in (*call.leaves, *(leaf for change in call.changes for leaf in change.leaves)):
                if isinstance(leaf, ConstantValue) and not is_plain(leaf.value):
                    replace_computed_by_ghosts(leaf.value)

    def changed_tensors(self, model: nn.Module) -> tuple[dict[int, str], dict[int, str]]:
        inputs = (leaf.number for leaf in self.recording.inputs if isinstance(leaf, TensorLeaf))
        received = {self.recording.values[number][0] for number in inputs}
        made = {data["storage"] for data in self.recording.flow.nodes.values() if data["created"] < 0}
        there = {n for memory, n in self._storages.values() if n in made and not memory.expired()}
        now = {self._storage(buffer) for buffer in model.buffers()}
        gone = self._buffers.keys() - now  # `buffer.data = ...` frees the memory that the buffer had before
        names = {n: self._held[n][0] if n in self._held else "a tensor in no module" for n in there - received | gone}
        return names, {n: names[n].rpartition(".")[0] for n in gone}

    def left_in_attributes(self, model: nn.Module) -> dict[AttributeKey, list[Tensor]]:
        left: dict[AttributeKey, list[Tensor]] = {}
        for change in self.recording.calls[0].changes:
            with suppress(LookupError):
                left[attribute_key(change)] = tensors_in(stored_leaves(model, change)) if change.contains_tensor else []
        return {key: tensors for key, tensors in left.items() if tensors}

    def is_tainted(self, tensor: Tensor) -> bool:
        return self._version_of(tensor) in self._tainted

    def run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if is_in_vmap():
            return forward(*args, **kwargs)
        self._watch.stop_intercepting()  # of the calling code; another gap begins when the call returns
        call = self._begun(module)
        around = self._finder.regions_around(sys._getframe(1), call.enter)
        call.function_region = next((number for number in around if self.recording.regions[number].function), -1)
        for number in around:
            self.recording.regions[number].calls_modules = True
        arguments = flatten((args, kwargs))[0]
        attributes = AttributeSnapshot(self._modules_in(module), self._attributes)
        # A result is no passed object if the call has written into it.
        before = {id(leaf): self._version_of(leaf) for leaf in arguments if isinstance(leaf, Tensor)}
        self._stack.append(call.number)
        self._finder.begin_call()
        if module._modules:  # code without submodules is never cut
            self._watch.start_intercepting(self._function)
        result = forward(*args, **kwargs)
        self._watch.stop_intercepting()
        self._finder.end_call()
        self._stack.pop()
        leaves, call.nest = flatten(result)
        call.leaves = tuple(self._leaf(leaf, call, arguments, before) for leaf in leaves)
        call.changes = tuple(
            replace(change, leaves=tuple(self._leaf(leaf, call, arguments, before) for leaf in change.leaves))
            for change in attributes.changes()
        )
        call.exit = self._tick()
        self._finder.regions_around(sys._getframe(1), call.exit)
        if self._stack:
            self._watch.start_intercepting(self._function)
        return result

    def note_operator(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        recording, time = self.recording, self._tick()
        name = func._schema.name
        arguments = [] if name in SHAPE_ONLY else tensors_in((args, kwargs))
        storages = list(dict.fromkeys(self._storage(tensor) for tensor in arguments))
        reads = tuple(self._versions[storage] for storage in storages)
        random = torch.Tag.nondeterministic_seeded in func.tags
        targets = list(written_tensors(func, args, kwargs))
        written = list(dict.fromkeys(map(self._storage, targets)))
        writes_model_tensor = any(storage in self._held for storage in written)
        tainted = random or writes_model_tensor or any(version in self._tainted for version in reads)
        # A stage cannot mark integers as absent, so it needs what repeated code writes into an integer tensor.
        fills_integers = any(
            not tensor.is_floating_point() and self._version_of(tensor) not in self._tainted for tensor in targets
        )
        call = self._stack[-1] if self._stack else 0
        operator = RecordedOperator(
            name=name,
            time=time,
            call=call,
            model_tensors=tuple(
                self._name_in(self._held[storage], call) for storage in storages if storage in self._held
            ),
            random=random,
            decides=depends_on_values(func, arguments),
            writes_model_tensor=writes_model_tensor,
            writes=tuple(self._versions[storage] for storage in written),
            region=next(iter(self._finder.regions_around(sys._getframe(1), time)), -1),
        )
        number = len(recording.operators)
        recording.operators.append(operator)
        recording.reads.append(reads)
        # An operator without tensor arguments needs nothing that a stage could lack.
        if (operator.decides or fills_integers) and reads:
            recording.decisions.append(number)
        for version in reads:
            self._use(version, time)
        # A result in a storage that was read is a view and no new version; a written storage gets its version below.
        shared = {*storages, *written}
        for storage in (self._storage(tensor, operator=number) for tensor in tensors_in(result)):
            if storage not in shared:
                self._derive(self._versions[storage], reads, tainted=tainted)
        for storage in written:
            self._versions[storage] = self._version(storage, number)
            self._derive(self._versions[storage], reads, tainted=tainted)
        if tainted:
            # A stage that repeats one of these calls needs the tensors that the operator read.
            for above in self._stack:
                recording.calls[above].constant = False

    def _begun(self, module: nn.Module) -> ModuleCall:
        calls = self.recording.calls
        parent = self._stack[-1] if self._stack else -1
        call = ModuleCall(number=len(calls), path=self._paths[module], parent=parent, enter=self._tick())
        calls.append(call)
        if parent >= 0:
            calls[parent].children.append(call.number)
        return call

    def _function(self, called: FunctionCall, run: Callable[[], Any]) -> Any:
        if is_in_vmap():
            return run()
        recording = self.recording
        call = recording.calls[self._stack[-1]]
        gap, enter, first = len(call.children), self._tick(), len(recording.operators)
        result = run()
        end = self._tick()
        # A function that calls submodules ends in another gap than the one it began in, so no stage could identify it.
        if not isinstance(result, Tensor) or len(call.children) != gap:
            return result
        # An older tensor has been considered before, every stage can compute an untainted one itself, and a tensor
        # within an autograd function has no graph. None of them is a candidate.
        version = self._version_of(result)
        is_new = recording.flow.nodes[version]["created"] > enter
        # Before the first submodule, only results of random functions are candidates: repeated code would draw others.
        is_random = any(operator.random for operator in recording.operators[first:])
        is_useful = is_random or (gap > 0 and result.is_floating_point() and not result.is_nested)
        if is_new and is_useful and version in self._tainted and call.function_region < 0:
            value = self._value(result, call.number, exposed=False).number
            recording.candidates.append(
                FunctionResult(
                    call=call.number, gap=gap, called=called, enter=enter, exit=end, value=value, version=version
                )
            )
        return result

    def _modules_in(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        # The result is cached: blocks call the same modules many times, and listing a large module's parts takes time.
        if module not in self._below:
            self._below[module] = list(module.named_modules(prefix=self._paths[module]))
        return self._below[module]

    def _derive(self, version: int, reads: tuple[int, ...], *, tainted: bool) -> None:
        self.recording.flow.add_edges_from((source, version) for source in reads if source != version)
        if tainted:
            self._tainted.add(version)

    def _leaf(self, leaf: Any, call: ModuleCall, arguments: list[Any], before: dict[int, int]) -> Leaf:
        argument = next((n for n, other in enumerate(arguments) if other is leaf), -1)
        if isinstance(leaf, Tensor):
            storage = self._storage(leaf)
            # If the tensor is an unchanged argument, a stage that skips the call returns its own argument.
            if argument >= 0 and before[id(leaf)] == self._versions[storage]:
                return ArgumentLeaf(argument)
            if isinstance(leaf, nn.Parameter) and storage in self._held:
                return NamedLeaf(self._name_in(self._held[storage], call.number))
            return self._value(leaf, call.number, exposed=call.function_region < 0)
        if argument >= 0 and not is_plain(leaf):
            return ArgumentLeaf(argument)
        if isinstance(leaf, nn.Module) and self._paths.get(leaf):  # a stage has its own instance of the module
            return NamedLeaf(self._paths[leaf])
        return ConstantValue(leaf)

    def _value(self, tensor: Tensor, call: int, *, exposed: bool = True) -> TensorLeaf:
        storage, meta = self._storage(tensor), TensorMeta.of(tensor)
        number = self._values.setdefault((storage, meta), len(self._values))
        if number == len(self.recording.values):
            self.recording.values.append((storage, meta))
        if exposed:
            self.recording.exposures.setdefault(storage, []).append((number, call))
        return TensorLeaf(number, meta)

    def _version_of(self, tensor: Tensor) -> int:
        return self._versions[self._storage(tensor)]

    def _storage(self, tensor: Tensor, operator: int = -1) -> int:
        memory = storage_of(tensor)
        noted = self._storages.get(memory._cdata)
        if noted is not None:
            return noted[1]
        # A weak reference prevents that the address is reused for another storage.
        storage = len(self._versions)
        self._storages[memory._cdata] = StorageWeakRef(memory), storage
        self._versions.append(self._version(storage, operator))
        return storage

    def _version(self, storage: int, operator: int) -> int:
        version: int = self.recording.flow.number_of_nodes()
        created = self.recording.operators[operator].time if operator >= 0 else -1
        self.recording.flow.add_node(version, storage=storage, operator=operator, created=created, uses=[])
        return version

    def _use(self, version: int, time: int) -> None:
        self.recording.flow.nodes[version]["uses"].append(time)

    def _name_in(self, names: list[str], call: int) -> str:
        while 0 <= call < len(self.recording.calls):  # the model's own pre-hooks run before its call begins
            path = self.recording.calls[call].path
            inside = [name for name in names if name.startswith(f"{path}.")] if path else []
            if inside:
                return inside[0]
            call = self.recording.calls[call].parent
        return names[0]

    def _tick(self) -> int:
        self._time += 1
        return self._time


def _forget(_: Any) -> Any:
    return None
