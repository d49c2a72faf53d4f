"""Copy modules whose attributes may hold objects that Python cannot copy, such as open files and locks."""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType, MappingProxyType, ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn

from planner.model.python_state import SEEDED_PER_LAYER

_Module = TypeVar("_Module")


def copy_module(module: _Module, replacements: Mapping[int, Any] = MappingProxyType({})) -> _Module:
    """Return a deep copy of a module or list of modules. Objects that cannot be copied are shared with the original.

    `replacements` maps the `id()` of an object to the object that replaces it in the copy. The default random
    generators of Python, NumPy and torch are shared, too, because seeds are set in the originals only. An attribute may
    refer to such a generator, as in `self.choose = random.choice`.
    """
    replacements = {**{id(generator): generator for generator in SEEDED_PER_LAYER}, **replacements}
    parts: Any = module if isinstance(module, nn.Module) else nn.ModuleList(module)  # type: ignore[arg-type]
    with _without_own_copies(parts.modules()):
        try:
            return _deepcopy(module, dict(replacements))
        except Exception:  # of an object without a copy, such as a lock, or of any method of the user's class
            shared = {id(value): value for value in _uncopyable(module, replacements, set())}
            return _deepcopy(module, {**shared, **replacements})


def _deepcopy(module: _Module, memo: dict[int, Any]) -> _Module:
    # Python would copy the items of such a dict, but not its attributes.
    dicts = [value for value in _attribute_dicts(module) if id(value) not in memo]
    copies = [value.__class__.__new__(value.__class__) for value in dicts]
    memo |= {id(value): made for value, made in zip(dicts, copies, strict=True)}
    copied = copy.deepcopy(module, memo)
    for value, made in zip(dicts, copies, strict=True):
        made.update(copy.deepcopy(dict(value), memo))
        made.__dict__ = made
    _bind_functions_to_copies(copied, memo)
    return copied


def _bind_functions_to_copies(copied: Any, memo: dict[int, Any]) -> None:
    # `deepcopy` does not copy functions: in the copied model, `self.head = lambda x: x @ self.embed.weight.T` would
    # still read the original's weight.
    shared = {key for key, value in memo.items() if id(value) == key}
    for value in _all_parts(copied, shared):
        for container, key, item in tuple(_entries(value)):
            if isinstance(item, FunctionType) and any(map(_has_module, item.__closure__ or ())):
                container[key] = memo.setdefault(id(item), _bound(item, memo))


def _entries(value: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (container, key, item) for each attribute of `value`, and for each entry of a dict or list `value`."""
    for container in (value, getattr(value, "__dict__", None)):
        if isinstance(container, dict | list):
            items = container.items() if isinstance(container, dict) else enumerate(container)
            yield from ((container, key, item) for key, item in items)


def _has_module(cell: CellType) -> bool:
    try:
        return isinstance(cell.cell_contents, nn.Module | Tensor)
    except ValueError:  # the variable has no value yet
        return False


def _bound(function: FunctionType, memo: Mapping[int, Any]) -> FunctionType:
    """Return a copy of `function` in which copies replace the modules and tensors in the function's closure.

    `memo` maps the `id()` of an original to its copy.
    """
    cells = tuple(
        CellType(memo.get(id(cell.cell_contents), cell.cell_contents)) if _has_module(cell) else cell
        for cell in function.__closure__ or ()
    )
    bound = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    bound.__kwdefaults__, bound.__qualname__ = function.__kwdefaults__, function.__qualname__
    bound.__module__ = function.__module__
    vars(bound).update(vars(function))
    return bound


def _attribute_dicts(module: Any) -> list[dict[str, Any]]:
    """Return the dicts in `module` that are their own `__dict__`, as after `self.__dict__ = self`."""
    parts = _all_parts(module)
    return [each for each in parts if isinstance(each, dict) and id(getattr(each, "__dict__", None)) == id(each)]


def _all_parts(whole: Any, without: Collection[int] = ()) -> Iterator[Any]:
    """Yield `whole` and everything in its attributes, dicts and lists, except objects with an `id()` in `without`."""
    todo, visited = [whole], dict[int, Any]()
    while todo:
        value = todo.pop()
        is_atom = isinstance(value, type | ModuleType | FunctionType | Tensor)
        if is_atom or id(value) in visited or id(value) in without:
            continue
        visited[id(value)] = value
        yield value
        todo += _parts(value)


@contextmanager
def _without_own_copies(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let `copy.deepcopy` ignore `__deepcopy__` methods of the user's module classes in the `with` block."""
    # Such a method may build a new module, and ignore the argument `replacements` of `copy_module`.
    classes = {each for module in modules for each in type(module).__mro__ if "__deepcopy__" in vars(each)}
    own = {each: vars(each)["__deepcopy__"] for each in classes if each.__module__.partition(".")[0] != "torch"}
    for each in own:
        setattr(each, "__deepcopy__", None)  # noqa: B010 - mypy knows no such attribute of a type
    try:
        yield
    finally:
        for each, method in own.items():
            setattr(each, "__deepcopy__", method)  # noqa: B010


def _uncopyable(value: Any, replacements: Mapping[int, Any], visited: set[int]) -> Iterator[Any]:
    """Yield the smallest parts of `value` that cannot be copied."""
    if id(value) in visited or id(value) in replacements:
        return
    visited.add(id(value))
    try:
        copy.deepcopy(value, dict(replacements))
    except Exception:
        parts = [each for part in _parts(value) for each in _uncopyable(part, replacements, visited)]
        yield from parts or [value]


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    yield from getattr(value, "__dict__", {}).values()
