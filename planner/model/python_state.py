"""Read the Python numbers that a model's code keeps between forwards: counters, lengths, states of generators.

These values may affect results only after many steps, more than the equivalence check runs. So the check compares the
values themselves. Each value becomes a number, which is identified by its path:

    self.calls = 3                 blocks.0.calls
    self.stats = {"seen": 3}       blocks.0.stats.seen, blocks.0.stats.length
    nonlocal n (of a function)     blocks.0.tick.n
    STATE = {"seen": 3}            STATE.seen, STATE.length

The search follows containers, objects of user-defined classes, modules in plain attributes, closures, defaults and
attributes of functions, class attributes, attributes of tensors, and local variables of generator functions. In a
library's object, such as a configuration or a learning-rate scheduler, the search reads only attributes that are
numbers. A tensor of at most 1 MiB becomes the sum of its absolute values, with the name `PATH.tensor`. The number of
tensors in a container has the name `PATH.tensors`.
"""

import ctypes
import dis
import functools
import itertools
import operator
import random
import sys
import sysconfig
import threading
import zlib
from argparse import Namespace
from array import array
from collections import UserDict, UserList, deque
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from decimal import Decimal
from fractions import Fraction
from functools import partial
from multiprocessing.sharedctypes import SynchronizedBase
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from planner.model.attributes import OF_EVERY_MODULE
from planner.model.ghosts import Ghost

NUMBERS = (bool, int, float)
"""Types of Python numbers that count as state."""

TENSOR = ".tensor"
"""Suffix of a number's name, if the number is the sum of the absolute values of a tensor."""

TENSORS = ".tensors"
"""Suffix of a number's name, if the number is the count of tensors in a container."""


LENGTH = ".length"
"""Suffix of a number's name, if the number is the count of other entries of a container."""


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Names of the attributes in which every module has its hooks."""

TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Names of the attributes in which a parameter has its hooks, if it has any."""

_DEEPEST = 6
"""Nesting depth up to which attributes and containers are searched for numbers."""

_MOST_ITEMS = 64
"""Number of items of a container that are searched for numbers."""

_MOST_BYTES = 2**20
"""Size in bytes up to which arrays and texts count as state; larger ones count as data."""

_MOST_NUMBERS = 20_000

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_LIBRARIES = ("torch", "transformers", "timm", "planner")
"""Packages whose module-level values do not count as state of a model."""

_NAMESPACES = (SimpleNamespace, Namespace, UserDict, UserList, threading.local)
"""Standard-library classes. All attributes of their objects are searched for numbers, as for user-defined classes."""

_WRAPPED_ITERATORS = (enumerate, zip, map, filter)
"""Iterators without a length. The search for numbers continues in their arguments, such as the lists of a `zip`."""


def numbers_in_attributes(modules: Mapping[str, nn.Module]) -> dict[str, float]:
    """Return the numbers in plain attributes of modules, by module path and attribute name."""
    numbers = _WithTensors()
    for path, module in modules.items():
        _add_attributes(numbers, path, module, 0)
    return numbers


def numbers_in_fields(owner: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in the `fields` of an object. Names begin with `owner`."""
    numbers: dict[str, float] = {}
    _add_fields(numbers, owner, fields, 0)
    return numbers


def numbers_in_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers in `values`, and numbers that describe the tensors in `values`.

    A plain tensor of at most 1 MiB is described by the sum of the absolute values of its elements. A container, such as
    a list, is also described by the number of tensors in it.

    Args:
        values: Values to search, by name.

    Returns:
        Numbers by path. A path is the name of a value, followed by the names and keys that lead to the number.
    """
    numbers = _WithTensors()
    for name, value in values.items():
        _add(numbers, name, value, 0)
    return numbers


def numbers_in_hooks(modules: Mapping[str, nn.Module]) -> dict[str, float]:
    """Return the numbers that hooks on modules and parameters can read, by path and variable name."""
    numbers: dict[str, float] = {}
    for path, module in modules.items():
        for table in HOOKS:
            _add(numbers, f"{path}.hooks", list(vars(module)[table].values()), 0)
        for name, parameter in module.named_parameters(path, recurse=False):
            hooks = [hook for table in TENSOR_HOOKS for hook in (getattr(parameter, table, None) or {}).values()]
            _add(numbers, f"{name}.hooks", hooks, 0)
    return numbers


def numbers_in_user_files(
    model: nn.Module, loss_fn: Callable[..., Any] | None, variables: Container[str] | None = None
) -> dict[str, float]:
    """Return the module-level numbers in the user's files that define the model and its loss.

    With `variables`, as `file:name`, the function reads only these.
    """
    numbers = _WithTensors()
    for file in user_files(model, loss_fn):
        for variable, value in list(vars(file).items()):
            is_wanted = variables is None or f"{file.__name__}:{variable}" in variables
            if is_wanted and not variable.startswith("__"):
                _add_variable(numbers, f"{file.__name__}:{variable}", value, file.__name__)
    return numbers


def without_leftover_tensors(numbers: Mapping[str, float], kept: Container[str]) -> dict[str, float]:
    """Return `numbers` without those that describe tensors (`….tensor`, `….tensors`), unless `kept` has their names.

    A tensor that did not exist before the first forward may be a result that a forward left behind.
    """
    return {name: number for name, number in numbers.items() if not name.endswith((TENSOR, TENSORS)) or name in kept}


def variables_read(modules: Mapping[str, nn.Module], *functions: Any) -> set[str]:
    """Return the module-level variables, as `file:name`, that modules and functions may read, directly or in calls."""
    classes = {cls for module in modules.values() for cls in type(module).__mro__ if is_user_module(cls.__module__)}
    variables = {f"{cls.__module__}:{cls.__name__}" for cls in classes}
    waiting: list[Any] = [value for cls in classes for value in vars(cls).values()]
    waiting += [value for module in modules.values() for value in vars(module).values()] + list(functions)
    seen: set[int] = set()
    while waiting:
        function = function_of(waiting.pop())
        if function is None or id(function) in seen or not is_user_module(function.__module__):
            continue
        seen.add(id(function))
        for name in _names_read(function.__code__) & function.__globals__.keys():
            variables.add(f"{function.__module__}:{name}")
            waiting.append(function.__globals__[name])
    return variables


class _WithTensors(dict[str, float]):
    pass


def _add(numbers: dict[str, float], name: str, value: Any, depth: int) -> None:
    if len(numbers) >= _MOST_NUMBERS:
        return
    if isinstance(value, Tensor):
        if not isinstance(value, Ghost):
            _add_fields(numbers, name, vars(value) if hasattr(value, "__dict__") else {}, depth)
        is_wanted = isinstance(numbers, _WithTensors) and value.layout == torch.strided and value.device.type != "meta"
        if is_wanted and type(value) is Tensor and value.nbytes <= _MOST_BYTES:
            values = value.detach()
            total = float((values if values.is_complex() else values.double()).abs().sum())
            numbers[name + TENSOR] = _comparable(total)
        return
    number = _number_of(value)
    if number is not None:
        numbers[name] = _comparable(number)
    elif depth < _DEEPEST:
        _add_content(numbers, name, value, depth + 1)


def _comparable(number: float) -> float:
    """Return the number. NaN does not equal itself, so another number replaces it."""
    return number if abs(number) >= 0 else _NAN


_NAN = zlib.crc32(b"nan")


def _number_of(value: Any) -> float | None:
    if type(value) in NUMBERS:
        return cast("float", value)
    if any(value is generator for generator in SEEDED_PER_LAYER):
        return None
    if isinstance(value, np.generic | np.ndarray):
        is_numeric = value.nbytes <= _MOST_BYTES and (np.issubdtype(value.dtype, np.number) or value.dtype == bool)
        return float(np.abs(value).sum()) if is_numeric else None
    for kinds, state in _STATES.items():
        if isinstance(value, kinds):
            return zlib.crc32(state(value))
    is_counted = isinstance(value, Iterator) and not isinstance(value, (GeneratorType, *_WRAPPED_ITERATORS))
    return operator.length_hint(value, 0) if is_counted else None


SEEDED_PER_LAYER = (random._inst, np.random.mtrand._rand, torch.default_generator)
"""Default random generators. They do not count as state, because stages seed them for every layer.

Models may refer to one by a bound method: `random.randrange` is a method of Python's default generator.
"""

_STATES: Mapping[Any, Callable[[Any], bytes]] = {
    str: lambda text: text[:_MOST_BYTES].encode(),
    bytearray: lambda data: bytes(data[:_MOST_BYTES]),
    array: lambda numbers: numbers[:_MOST_BYTES].tobytes(),
    (Decimal, Fraction): lambda number: str(number).encode(),
    torch.Generator: lambda generator: generator.get_state().numpy().tobytes(),
    np.random.Generator: lambda generator: repr(generator.bit_generator.state).encode(),
    np.random.RandomState: lambda generator: repr(generator.get_state(legacy=False)).encode(),
    random.Random: lambda generator: repr(generator.getstate()).encode(),
    itertools.count: lambda counter: repr(counter).encode(),
    (ctypes._SimpleCData, ctypes.Array): bytes,
    # All processes of the equivalence check count in the same memory, so the number differs from the plain loop's.
    SynchronizedBase: lambda shared: bytes(shared.get_obj()),
}


def _add_content(numbers: dict[str, float], name: str, value: Any, depth: int) -> None:
    if isinstance(value, list | tuple | deque | dict | set | frozenset):
        _add_items(numbers, name, value, depth)
    elif isinstance(value, _WRAPPED_ITERATORS):
        _add(numbers, name, value.__reduce__()[1], depth)
    elif isinstance(value, partial):
        _add(numbers, name, (value.func, value.args, value.keywords), depth)
    elif isinstance(value, MethodType):
        _add(numbers, name, (value.__func__, value.__self__), depth)
    elif isinstance(value, FunctionType):
        _add_function(numbers, name, value, depth)
    elif isinstance(value, nn.Module):
        _add_attributes(numbers, name, value, depth)
    elif isinstance(value, GeneratorType):
        frame = value.gi_frame
        if frame is not None and is_user_module(frame.f_globals.get("__name__")):
            numbers[f"{name}.position"] = frame.f_lasti
            _add_fields(numbers, name, dict(frame.f_locals), depth)
    else:
        _add_fields(numbers, name, _fields(value), depth)


def _add_items(numbers: dict[str, float], name: str, value: Collection[Any], depth: int) -> None:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    # Stages delete the tensors that a forward leaves behind, so tensors are counted separately.
    held = value.values() if isinstance(value, dict) else value
    num_tensors = sum(_has_only_tensors(item) for item in held)
    numbers[name + LENGTH] = len(value) - num_tensors
    if num_tensors:
        numbers[name + TENSORS] = num_tensors
    if isinstance(value, set | frozenset):
        return
    for key, item in itertools.islice(items, _MOST_ITEMS):
        _add(numbers, f"{name}.{key}", item, depth)
    rest = [item for item in itertools.islice(held, _MOST_ITEMS, _MOST_NUMBERS) if type(item) in NUMBERS]
    if rest:
        numbers[f"{name}.rest"] = zlib.crc32(repr(rest).encode())


def _has_only_tensors(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, Tensor) or (bool(items) and all(map(_has_only_tensors, items)))


def _add_fields(numbers: dict[str, float], name: str, fields: Mapping[str, Any], depth: int) -> None:
    for key, item in list(fields.items()):
        _add(numbers, f"{name}.{key}", item, depth)


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, ContextVar):
        with suppress(LookupError):  # the variable has no value yet
            return {"value": value.get()}
    if not isinstance(value, _NAMESPACES) and not is_user_object(value):
        is_read = isinstance(value, LRScheduler) or _is_library_object(value)
        return {key: item for key, item in vars(value).items() if type(item) in NUMBERS} if is_read else {}
    return {**values_in_slots(value), **getattr(value, "__dict__", {})}


def values_in_slots(value: Any) -> dict[str, Any]:
    """Return the values in slots of an object (`__slots__`), by name."""
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return {name: getattr(value, name) for name in slots if name != "__dict__" and hasattr(value, name)}


def _add_attributes(numbers: dict[str, float], path: str, module: nn.Module, depth: int) -> None:
    for name, value in list(vars(module).items()):
        if name not in OF_EVERY_MODULE:
            _add(numbers, f"{path}.{name}", value, depth)
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        _add_fields(numbers, f"{path}.{name}", vars(tensor) if tensor is not None else {}, depth + 1)


def _add_function(numbers: dict[str, float], name: str, function: FunctionType, depth: int) -> None:
    if not is_user_module(function.__module__):
        return
    for variables in (closure_variables(function), vars(function), function.__kwdefaults__ or {}):
        _add_fields(numbers, name, variables, depth)
    _add(numbers, f"{name}.defaults", function.__defaults__ or (), depth)


def _add_variable(numbers: dict[str, float], name: str, value: Any, file: str) -> None:
    if not isinstance(value, type):
        _add(numbers, name, value, 0)
    elif value.__module__ == file and not issubclass(value, torch.optim.Optimizer):
        for key, item in list(vars(value).items()):
            if not key.startswith("__"):
                _add(numbers, f"{name}.{key}", function_of(item) or item, 1)


def function_of(value: Any) -> FunctionType | None:
    """Return the Python function in a method, property, partial or cached function; None if there is none."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    elif isinstance(value, partial):
        value = value.func
    elif isinstance(value, functools._lru_cache_wrapper):
        value = value.__wrapped__
    return value if isinstance(value, FunctionType) else None


def closure_variables(function: FunctionType) -> dict[str, Any]:
    """Return the variables of enclosing functions that `function` uses, except those that have no value yet."""
    values: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):
            values[name] = cell.cell_contents
    return values


def global_names(code: CodeType) -> set[str]:
    """Return the names of global variables and attributes that code uses, also in functions defined in the code."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= global_names(constant)
    return names


def _names_read(code: CodeType) -> set[str]:
    """Return the names in `global_names(code)`, except global variables that `code` only assigns."""
    named = (each for each in dis.get_instructions(code) if each.opcode in dis.hasname)
    names = {each.argval for each in named if each.opname != "STORE_GLOBAL"}
    return names.union(*(_names_read(constant) for constant in code.co_consts if isinstance(constant, CodeType)))


def user_files(model: nn.Module, loss_fn: Callable[..., Any] | None) -> list[ModuleType]:
    """Return the user's Python modules that define the model and its loss, and the user's modules they import."""
    waiting = sorted({type(module).__module__ for module in model.modules()} | {getattr(loss_fn, "__module__", "")})
    files: dict[str, ModuleType] = {}
    while waiting:
        name = waiting.pop()
        if name in files or not is_user_module(name):
            continue
        files[name] = sys.modules[name]
        for value in vars(files[name]).values():
            other = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(other, str):
                waiting.append(other)
    return list(files.values())


def is_user_object(value: Any) -> bool:
    """Return True if the class of `value` is defined in one of the user's files."""
    is_thing = isinstance(value, Tensor | type | ModuleType | torch.optim.Optimizer)
    has_fields = hasattr(value, "__dict__") or hasattr(value, "__slots__")
    return not is_thing and has_fields and is_user_module(type(value).__module__)


def _is_library_object(value: Any) -> bool:
    package = type(value).__module__.partition(".")[0]
    is_thing = isinstance(value, type | ModuleType | Tensor) or callable(value)
    return hasattr(value, "__dict__") and not is_thing and package not in ("builtins", "torch", "planner")


def is_user_module(module_name: str | None) -> bool:
    """Return True if a Python module is the user's own file, not of a package or the standard library."""
    top = (module_name or "").partition(".")[0]
    attributes: dict[str, Any] = {}
    with suppress(AttributeError):
        # Reading any attribute in the usual way could import a lazy module, or another one.
        attributes = object.__getattribute__(sys.modules.get(module_name or ""), "__dict__")
    file = attributes.get("__file__") or ""
    # A user's file may have the name of a module of the standard library, so the path decides.
    is_installed = "site-packages" in file or "dist-packages" in file or file.startswith(_STANDARD_LIBRARY)
    return bool(file) and top not in _LIBRARIES and not is_installed
