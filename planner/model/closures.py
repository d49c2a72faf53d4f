"""Find tensors that are not parameters or buffers, but that a model's code and hooks can read.

    mask = torch.rand(8, 8) > 0.5
    layer.weight.register_hook(lambda gradient: gradient * mask)

In this example, no module holds `mask`. The search follows references between Python objects, such as attributes,
closures and default arguments.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from planner.model.python_state import closure_variables


def other_reachable_tensors(modules: Iterable[nn.Module], hooked: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors, except parameters and buffers, that some code can read: that of `modules`, or of hooks.

    The hooks are those on the tensors `hooked`.

    The search includes the submodules of `modules`, and the hooks on tensors that it finds.
    """
    own = {id(part): part for module in modules for part in module.modules()}
    held = {id(t) for part in own.values() for t in (*part._parameters.values(), *part._buffers.values())}
    tables = ("_parameters", "_buffers", "_modules")
    todo: list[Any] = [v for part in own.values() for name, v in vars(part).items() if name not in tables]
    todo.extend(hooks for tensor in hooked for hooks in _hooks(tensor))
    seen: dict[int, Any] = dict(own)  # holds the objects, because the address of a freed object could be reused
    tensors = []
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if not isinstance(value, Tensor):
            todo.extend(_referred(value))
        elif id(value) not in held:
            tensors.append(value)
            todo.extend(_hooks(value))
    return tensors


def _hooks(tensor: Tensor) -> Iterator[Any]:
    yield tensor._backward_hooks
    yield tensor._post_accumulate_grad_hooks


def _referred(value: Any) -> Iterator[Any]:
    if isinstance(value, type | ModuleType):
        return
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, FunctionType):
        variables = value.__globals__
        yield from (variables[name] for name in value.__code__.co_names if isinstance(variables.get(name), Tensor))
        yield from (value.__defaults__, value.__kwdefaults__, closure_variables(value))
    elif isinstance(value, MethodType | BuiltinMethodType):
        yield from (value.__self__, getattr(value, "__func__", None))
    yield getattr(value, "__dict__", None)
