"""Run one forward of a stage: the model's own code, followed call by call along its recording.

For example, the model's forward calls `embed`, `blocks.0`, `blocks.1` and `head`, and the stage is `blocks.1` alone:

    embed       ends before the stage: it does not run; a tensor without values replaces its result
    blocks.0    ends before the stage: it does not run; the received tensors replace its result
                the stage begins here
    blocks.1    runs; its results that cross the next cut are kept
                the stage ends here: `_Finished` leaves the model's code, and `head` is never called

A cut may also go through a call, such as that of an encoder that contains the blocks. The call is then open: its code
runs, and the calls that it makes are followed one by one.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.model.attributes import apply_change, stored_leaves, undo_attribute_changes
from planner.model.calling import arguments_of, intercept_calls
from planner.model.functions import FunctionCall, FunctionWatch, is_in_vmap
from planner.model.ghosts import check_present
from planner.model.leaves import (
    ArgumentLeaf,
    ConstantValue,
    Leaf,
    NamedLeaf,
    SampleCount,
    TensorLeaf,
    describe_constant,
    is_same_constant,
)
from planner.model.model_part import ModelPart
from planner.model.nests import ABSENT, align_leaves, flatten, leaf_names, unflatten
from planner.model.recording import END, FunctionResult, ModuleCall
from planner.model.refusals import control_flow_error
from planner.model.regions import without_reentrant_checkpointing
from planner.model.stand_ins import StandInFactory


class _Finished(BaseException):
    """Signal that the stage's last module has run; no `Exception`, so that the model's handlers do not catch it."""


class StageForward:
    """One forward of a stage.

    Args:
        part: The stage's part of the model.
        received: Inputs of the model for the first stage; tuple of received tensors for any other stage.

    Raises:
        ModelError: The inputs have another structure than the example batch.
    """

    def __init__(self, part: ModelPart, received: Any) -> None:
        self._part = part
        self._recording = part.outline.recording
        self._calls = self._recording.calls
        self._stack = [0]  # numbers of the open calls that are running, that of the model first
        self._next = {0: 0}  # number of submodules that each open call has called
        self._inside = False  # True while a call runs as a whole, whose inner calls are not followed
        self._watch = FunctionWatch()
        # Results that the code must still compute before its next submodule.
        self._awaited: dict[FunctionCall, FunctionResult] = {}
        self._tensors: dict[int, Tensor] = {}  # received tensors and tensors to send, by index in `Recording.values`
        self._begun = part.begin == 0
        if self._begun:
            self._inputs = received
            self._size = self._size_of_inputs(received)
        else:
            self._tensors.update(zip(part.received, received, strict=True))
            self._size = part.outline.batch_size_of(part.received, received)
        device = received[0].device if part.received else torch.device("cpu")
        self._stand_ins = StandInFactory(part, self._size, device)
        if not self._begun:
            # The model's code runs from its start and needs the model's inputs. Those that cross the cut were received.
            self._inputs = self._rebuilt(self._recording.inputs, self._recording.input_nest, [])

    def run_stage(self) -> Any:
        """Run the stage and return the tensors for the next stage, or the model's output.

        Raises:
            ModelError: The model ran other code than when it was recorded.
        """
        part = self._part
        args, kwargs = arguments_of(self._inputs)
        with ExitStack() as stack:
            stack.enter_context(self._stand_ins.in_model(part.absent))
            stack.enter_context(without_reentrant_checkpointing())
            stack.enter_context(undo_attribute_changes(part.model, part.leftovers))
            stack.enter_context(intercept_calls(part.called_modules.values(), self._run))
            stack.callback(self._watch.stop_intercepting)
            if self._begun:  # the first stage begins here; any other stage begins at the end of an earlier call
                self._part.when_begun()
                self._begin_layer(0)
            else:
                self._begin_earlier(0)
            self._begin_gap()
            try:
                output = part.model(*args, **kwargs)
                self._end_gap()
            except _Finished:
                return self._sent()
        if part.stop != END:
            raise control_flow_error("it ended early")
        if part.begin == 0:
            return output
        if self._recording.unread:
            output = self._with_stand_ins(output)
        # Apart from stand-ins, no output may depend on tensors that this stage does not have.
        check_present(flatten(output)[0], "the model's output")
        return output

    def _size_of_inputs(self, inputs: Any) -> int:
        leaves, recorded = flatten(inputs)[0], self._recording.inputs
        if len(leaves) != len(recorded):
            raise ModelError("the model's inputs have another structure than those of `example_batch`")
        self._keep(leaves, recorded)
        pairs = [(leaf.number, t) for leaf, t in zip(recorded, leaves, strict=True) if isinstance(leaf, TensorLeaf)]
        return self._part.outline.batch_size_of([number for number, _ in pairs], [tensor for _, tensor in pairs])

    def _sent(self) -> tuple[Tensor, ...]:
        if not self._tensors.keys() >= set(self._part.sent):
            raise control_flow_error("it did not return what the next stage needs") from None
        sent = tuple(self._tensors[value] for value in self._part.sent)
        check_present(sent, "what is sent to the next stage")
        return sent

    def _run(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inside or is_in_vmap():
            return forward(*args, **kwargs)
        # The calling code must by now have computed every sent result that the recording has before this call.
        self._end_gap()
        call = self._expected(module)
        # A constant call, such as one that makes a mask of positions, is cheaper to repeat than to send.
        if call.exit < self._part.begin and not call.constant:
            result = self._passed_over(call, args, kwargs)
        elif call.number in self._part.open:
            self._stack.append(call.number)
            self._next[call.number] = 0
            self._begin_gap()
            result = forward(*args, **kwargs)
            self._end_gap()
            self._stack.pop()
        else:
            self._inside = True
            try:
                result = forward(*args, **kwargs)
            finally:
                self._inside = False
        # A call before the stage has no result to keep: if its result must be sent, it was received.
        if call.exit >= self._part.begin:
            self._keep_result(call, result)
        self._reach(call.exit + 1)
        self._begin_gap()
        return result

    def _keep_result(self, call: ModuleCall, result: Any) -> None:
        leaves = flatten(result)[0]
        if call.is_varying or len(leaves) != len(call.leaves):
            if not (call.is_varying or (self._part.begin and call.number in self._part.open)):
                raise control_flow_error(f'"{call.path}" returned something else')
            # A call that collects results of skipped modules (a list of hidden states) returns fewer leaves.
            leaves = align_leaves(result, call.nest)
        self._keep(leaves, call.leaves)
        self._expect_constants(call, leaves)
        self._keep_changes(call)

    def _function(self, called: FunctionCall, run: Callable[[], Any]) -> Any:
        recorded = self._awaited.pop(called, None)
        if recorded is None:
            return run()
        if recorded.exit < self._part.begin and recorded.value in self._tensors:
            result = self._tensors[recorded.value]  # the function does not run, because its arguments may be stand-ins
            if recorded.is_in_place:
                # Later code may read the argument of `noise.normal_()`, which depends on no other tensor.
                with torch.no_grad():
                    result = run().copy_(result)
        else:
            result = run()
            if recorded.value in self._part.sent:
                self._tensors[recorded.value] = result
        self._reach(recorded.exit + 1)
        return result

    def _begin_gap(self) -> None:
        results = self._part.sent_results.get((self._stack[-1], self._next[self._stack[-1]]))
        if results:
            self._awaited = dict(results)
            self._watch.start_intercepting(self._function)

    def _end_gap(self) -> None:
        self._watch.stop_intercepting()
        if self._awaited:
            path = self._calls[self._stack[-1]].path
            name, _ = next(iter(self._awaited))
            where = f'"{path}"' if path else "its own code"
            raise control_flow_error(f"{where} did not call `{name}` between its modules")

    def _reach(self, time: int) -> None:
        if time == self._part.begin:
            self._part.when_begun()
        if time < self._part.begin:
            self._begin_earlier(time)
        self._begin_layer(time)
        if time == self._part.stop:
            self._part.when_done()
            raise _Finished  # leave all open calls, whose further code belongs to later stages

    def _begin_earlier(self, time: int) -> None:
        numbers = [number for begin, number in self._part.earlier if begin <= time]
        if numbers:
            self._part.when_layer_begins(numbers[-1])

    def _begin_layer(self, time: int) -> None:
        layer = self._part.layer_at.get(time)
        if layer is not None:
            self._part.when_layer_begins(layer)

    def _expected(self, module: nn.Module) -> ModuleCall:
        parent = self._calls[self._stack[-1]]
        position = self._next[parent.number]
        self._next[parent.number] = position + 1
        # Calls are found by position, not by module, because a module that is called twice has two calls.
        if position >= len(parent.children):
            raise control_flow_error("an additional module was called")
        call = self._calls[parent.children[position]]
        if self._part.called_modules[call.number] is not module:
            raise control_flow_error(f'"{call.path}" should have been called')
        return call

    def _keep(self, leaves: Sequence[Any], recorded: Sequence[Leaf]) -> None:
        for leaf, recorded_leaf in zip(leaves, recorded, strict=True):
            if isinstance(recorded_leaf, TensorLeaf) and recorded_leaf.number in self._part.sent and leaf is not ABSENT:
                self._tensors[recorded_leaf.number] = leaf

    def _expect_constants(self, call: ModuleCall, leaves: Sequence[Any]) -> None:
        for leaf, recorded in zip(leaves, call.leaves, strict=True):
            if not isinstance(recorded, ConstantValue | SampleCount) or not isinstance(
                leaf, int | float | str | torch.Size | np.ndarray
            ):
                continue
            expected = recorded.of(self._size) if isinstance(recorded, SampleCount) else recorded.value
            if not is_same_constant(leaf, expected):
                raise ModelError(
                    f'"{call.path}" returned {describe_constant(leaf)} where it returned '
                    f"{describe_constant(expected)} for `example_batch`: only "
                    "tensors are sent to the next stages, which would use the old value",
                    hint="return it as a tensor, and give inputs of the same shape as those of `example_batch`",
                )

    def _keep_changes(self, call: ModuleCall) -> None:
        for change in call.changes:
            if not any(isinstance(leaf, TensorLeaf) and leaf.number in self._part.sent for leaf in change.leaves):
                continue
            try:
                self._keep(stored_leaves(self._part.model, change), change.leaves)
            except LookupError:
                raise control_flow_error(f'"{call.path}" left other values in attributes') from None

    def _passed_over(self, call: ModuleCall, args: Any, kwargs: Any) -> Any:
        recorded = (call.leaves, *(change.leaves for change in call.changes))
        # Most calls return none of their arguments. Flattening these would take most of the time to pass over a call.
        is_read = any(isinstance(leaf, ArgumentLeaf) for leaves in recorded for leaf in leaves)
        arguments = flatten((args, kwargs))[0] if is_read else []
        for change in call.changes:
            try:
                apply_change(self._part.model, change, [self._leaf(leaf, arguments) for leaf in change.leaves])
            except LookupError:
                raise control_flow_error(f'"{call.path}" cannot leave values in attributes') from None
        return self._rebuilt(call.leaves, call.nest, arguments)

    def _rebuilt(self, recorded: Sequence[Leaf], nest: Any, arguments: Sequence[Any]) -> Any:
        return unflatten([self._leaf(leaf, arguments) for leaf in recorded], nest)

    def _leaf(self, leaf: Leaf, arguments: Sequence[Any]) -> Any:
        match leaf:
            case TensorLeaf():
                received = self._tensors.get(leaf.number)
                return self._stand_ins.missing_result(leaf.number) if received is None else received
            case ArgumentLeaf():
                return arguments[leaf.argument]
            case NamedLeaf():
                return attribute_named(self._part.model, leaf.name)
            case ConstantValue():
                return leaf.value
            case SampleCount():
                return leaf.of(self._size)

    def _with_stand_ins(self, output: Any) -> Any:
        nest = self._recording.output_nest
        # Lists that the model's code fills (hidden states) lack the values of modules before the stage.
        leaves = align_leaves(output, nest)
        missing = self._part.missing | {number for number, leaf in enumerate(leaves) if leaf is ABSENT}
        if not missing:
            return output
        names = leaf_names(nest)
        for number in missing:
            try:
                leaves[number] = self._stand_ins.output(number, names[number], leaves[number])
            except LookupError:
                raise control_flow_error(f'it did not return "{names[number]}"') from None
        return unflatten(leaves, nest)


def attribute_named(model: nn.Module, full: str) -> Any:
    """Return the model's parameter, buffer or module with the name `full`."""
    path, _, name = full.rpartition(".")
    return getattr(model.get_submodule(path), name)
