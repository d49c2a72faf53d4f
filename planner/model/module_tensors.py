"""List and replace the tensors of modules: parameters, buffers, and tensors in plain attributes.

A plain attribute may also list the module's own parameters (`_flat_weights` of torch's LSTM and GRU). Code that
replaces parameters must replace them in these attributes, too.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.model.ghosts import Ghost, ghost_like

_TORCH_DICTS = ("_parameters", "_buffers", "_modules")

_OF_GHOSTS = ("_fake", "origin")

_Change = tuple[dict[str, Any], str, Any]


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return names and values of parameters and buffers. A tied tensor has one entry for each name."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def attribute_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors in plain attributes, or in their lists and dicts, that are no parameters or buffers."""
    held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    leaves = [leaf for part in module.modules() for _, value in _attributes(part) for leaf in tree_leaves(value)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in held]


def move_attribute_tensors(module: nn.Module, move: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors in plain attributes by `move(tensor)`, except parameters and buffers."""
    loose = {id(tensor) for tensor in attribute_tensors(module)}
    replace_attribute_tensors(module, lambda tensor: move(tensor) if id(tensor) in loose else tensor)


def replace_tensors(module: nn.Module, other: Callable[[Tensor], Tensor]) -> list[_Change]:
    """Replace every parameter and buffer by `other(tensor)`, also in plain attributes; tied tensors stay tied.

    Return the changes of plain attributes.
    """
    # The old tensors are kept as well, because the id of a freed tensor could be reused.
    replacements: dict[int, tuple[Tensor, Tensor]] = {}
    for table in _tables(module):
        for name, tensor in table.items():
            if tensor is None:
                continue
            if id(tensor) not in replacements:
                replacements[id(tensor)] = tensor, other(tensor)
            table[name] = replacements[id(tensor)][1]
    return replace_attribute_tensors(
        module, lambda tensor: replacements[id(tensor)][1] if id(tensor) in replacements else tensor
    )


@contextmanager
def replace_tensors_temporarily(module: nn.Module, other: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace every parameter and buffer by `other(tensor)` in the `with` block, and restore them at its end."""
    before = [(table, dict(table)) for table in _tables(module)]
    changed = replace_tensors(module, other)
    try:
        yield
    finally:
        for table, tensors in before:
            table.clear()
            table.update(tensors)
        for attributes, name, value in changed:
            attributes[name] = value


def copy_buffers_temporarily(module: nn.Module) -> AbstractContextManager[None]:
    """Replace buffers by copies in the `with` block, because a forward may write into buffers (running statistics)."""
    return replace_tensors_temporarily(module, lambda t: t if isinstance(t, nn.Parameter) else t.clone())


@contextmanager
def parameters_as_ghosts(module: nn.Module) -> Iterator[None]:
    """Replace parameters and buffers in the `with` block by ghosts (tensors without values). Tied tensors stay tied."""
    # Meta tensors in plain attributes are replaced too, because autocast ignores meta tensors.
    with replace_tensors_temporarily(module, _ghost):
        loose = {id(tensor): _ghost(tensor) for tensor in attribute_tensors(module) if tensor.is_meta}
        changed = replace_attribute_tensors(module, lambda tensor: loose.get(id(tensor), tensor))
        try:
            yield
        finally:
            for attributes, name, value in changed:
                attributes[name] = value


def copy_attributes(parameter: Tensor, other: Tensor) -> None:
    """Copy a parameter's Python attributes, such as `no_decay`, to `other`; optimizer builders may read them."""
    for name, value in vars(parameter).items():
        if name not in _OF_GHOSTS:
            vars(other).setdefault(name, value)


def replace_attribute_tensors(module: nn.Module, other: Callable[[Tensor], Tensor]) -> list[_Change]:
    """Replace all tensors in plain attributes, and in their lists and dicts, by `other(tensor)`. Return the changes."""
    changed: list[_Change] = []
    for part in module.modules():
        for name, value in list(_attributes(part)):
            new = tree_map_only(Tensor, other, value)
            if any(a is not b for a, b in zip(tree_leaves(value), tree_leaves(new), strict=True)):
                changed.append((vars(part), name, value))
                vars(part)[name] = new
    return changed


def replace_computed_by_ghosts(value: Any) -> Any:
    """Replace tensors that have an autograd graph by ghosts (tensors without values).

    Objects, lists and dicts in `value` are changed in place. This frees the graphs, which keep parameters in memory.
    """
    return _without_computed(value, set())


def _without_computed(value: Any, visited: set[int]) -> Any:
    if isinstance(value, Tensor):
        has_graph = value.grad_fn is not None and not isinstance(value, Ghost)
        return ghost_like(value, value.device) if has_graph else value
    if id(value) in visited or isinstance(value, nn.Module | type | ModuleType | FunctionType):
        return value
    visited.add(id(value))
    if type(value) is tuple:
        return tuple(_without_computed(item, visited) for item in value)
    if isinstance(value, list):
        value[:] = [_without_computed(item, visited) for item in value]
    for holder in (value, getattr(value, "__dict__", None)):
        if isinstance(holder, dict):
            holder.update({key: _without_computed(item, visited) for key, item in holder.items()})
    return value


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(part).items():
        holds = isinstance(value, Tensor) or (isinstance(value, list | tuple | dict | deque) and len(value) > 0)
        if holds and name not in _TORCH_DICTS:
            yield name, value


def _tables(module: nn.Module) -> Iterator[dict[str, Tensor | None]]:
    for part in module.modules():
        yield cast("dict[str, Tensor | None]", part._parameters)
        yield part._buffers


def _ghost(tensor: Tensor) -> Tensor:
    ghost = ghost_like(tensor, torch.device("cpu"))
    if not isinstance(tensor, nn.Parameter):
        return ghost
    parameter = nn.Parameter(ghost, requires_grad=tensor.requires_grad)
    copy_attributes(tensor, parameter)
    return parameter
