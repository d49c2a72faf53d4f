"""Undo changes of Python state by a forward that is not part of training, such as a recorded one.

A forward may change tensors and counters in attributes of modules, in module-level variables, in class attributes and
in closures. Training must begin with the values from right after the model was built, as a plain loop does.
"""

from collections import deque
from collections.abc import Callable, Iterator, MutableSequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from planner.model.attributes import AttributeSnapshot
from planner.model.leaves import is_plain
from planner.model.nests import ABSENT
from planner.model.python_state import closure_variables, is_user_module, is_user_object, user_files, values_in_slots

_MOST_CONTAINERS = 10_000

_MOST_ITEMS = 10_000
"""Length up to which lists and dicts are searched and restored. A forward is assumed not to change longer ones."""

_MOST_BYTES = 2**20
"""Size in bytes up to which tensors are copied; larger ones count as data, which a forward does not change."""


@contextmanager
def undo_variable_changes(model: nn.Module, loss_fn: Callable[..., Any] | None = None) -> Iterator[None]:
    """Restore attributes of modules, and variables of the user's files, when the `with` block ends."""
    attributes = AttributeSnapshot(model.named_modules())
    variables = [_Variables.of(container) for container in _containers(model, loss_fn)]
    try:
        yield
    finally:
        attributes.restore()
        for each in variables:
            each.restore()


class _Variables(NamedTuple):
    """Saved content of a container: a dict, a list, a class, an object with slots, or the closure of a function."""

    container: Any
    before: dict[Any, Any]
    copies: list[tuple[Tensor, int, Tensor]]
    """Small tensors of `container`, each with its version counter and a copy of its values at the time of saving."""

    @classmethod
    def of(cls, container: Any) -> "_Variables":
        before = _content(container)
        tensors = [value for value in before.values() if type(value) is Tensor and value.nbytes <= _MOST_BYTES]
        return cls(container, before, [(t, t._version, t.detach().clone()) for t in tensors])

    def restore(self) -> None:
        for tensor, version, copy in self.copies:
            if tensor._version != version:
                tensor.detach().copy_(copy)
        now = _content(self.container)
        changed = [k for k in now.keys() | self.before.keys() if now.get(k, ABSENT) is not self.before.get(k, ABSENT)]
        keys = [k for k in changed if _is_state(now.get(k, self)) or _is_state(self.before.get(k, self))]
        if keys and isinstance(self.container, MutableSequence):
            self.container.clear()
            self.container.extend(self.before.values())
            return
        for key in keys:
            _set_or_remove(self.container, key, self.before.get(key, ABSENT))


def _containers(model: nn.Module, loss_fn: Callable[..., Any] | None) -> list[Any]:
    # The search starts with the dicts of module-level variables. `AttributeSnapshot` covers the modules of the model.
    own_modules = set(model.modules())
    todo: list[Any] = [vars(file) for file in user_files(model, loss_fn)]
    seen: dict[int, Any] = {}
    while todo and len(seen) < _MOST_CONTAINERS:
        value = todo.pop()
        if id(value) in seen:
            continue
        if isinstance(value, partial):
            todo += [value.func, value.args, value.keywords]
        elif isinstance(value, MethodType | staticmethod | classmethod):
            todo.append(value.__func__)
        elif isinstance(value, tuple):
            todo += value
        elif _is_followed(value):
            seen[id(value)] = value
            todo += _content(value).values()
            todo += [value.__defaults__, vars(value)] if isinstance(value, FunctionType) else []
        elif value not in own_modules if isinstance(value, nn.Module) else is_user_object(value):
            todo.append(vars(value))
    return list(seen.values())


def _is_followed(value: Any) -> bool:
    if isinstance(value, type | FunctionType):
        return is_user_module(value.__module__)
    if isinstance(value, dict | list | deque):
        return len(value) <= _MOST_ITEMS
    return not hasattr(value, "__dict__") and is_user_object(value)  # all of its values are in slots


def _content(container: Any) -> dict[Any, Any]:
    if isinstance(container, FunctionType):
        return closure_variables(container)
    if isinstance(container, MutableSequence):
        return dict(enumerate(container))
    if not isinstance(container, type | dict):
        return values_in_slots(container)
    items = vars(container) if isinstance(container, type) else container
    return {key: value for key, value in items.items() if not str(key).startswith("__")}


def _set_or_remove(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, FunctionType):
        container.__closure__[container.__code__.co_freevars.index(key)].cell_contents = value  # type: ignore[index]
    elif isinstance(container, type):
        delattr(container, key) if value is ABSENT else setattr(container, key, value)
    elif not isinstance(container, dict):  # of `object`, because a frozen dataclass refuses changes
        object.__delattr__(container, key) if value is ABSENT else object.__setattr__(container, key, value)
    elif value is ABSENT:
        container.pop(key, None)
    else:
        container[key] = value


def _is_state(value: Any) -> bool:
    return is_plain(value) or any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
