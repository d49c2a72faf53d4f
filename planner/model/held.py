"""List and replace the tensors that modules hold: parameters, buffers, and tensors in plain attributes.

A plain attribute may also list the module's own parameters (`_flat_weights` of torch's LSTM and GRU). Code that
replaces parameters must replace them in these attributes, too.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.model.ghosts import ghost_like

_HELD_BY_TORCH = ("_parameters", "_buffers", "_modules")

_OF_GHOSTS = ("_fake", "origin")

_Change = tuple[dict[str, Any], str, Any]


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers under all their names; a tied tensor occurs once for each of its names."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def loose_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors in plain attributes, and in lists or dicts there, except parameters and buffers."""
    held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    leaves = [leaf for part in module.modules() for _, value in _attributes(part) for leaf in tree_leaves(value)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in held]


def move_loose_tensors(module: nn.Module, move: Callable[[Tensor], Tensor]) -> None:
    """Replace each tensor in a plain attribute by `move(tensor)`, except parameters and buffers of `module`."""
    loose = {id(tensor) for tensor in loose_tensors(module)}
    replace_loose(module, lambda tensor: move(tensor) if id(tensor) in loose else tensor)


def replace_tensors(module: nn.Module, other: Callable[[Tensor], Tensor]) -> list[_Change]:
    """Replace every parameter and buffer by `other(tensor)`, wherever `module` and its submodules hold it.

    `other` is called once for each tensor, so that tied tensors stay tied.

    Returns:
        For each changed plain attribute: the attribute dict of its module, its name, and its former value.
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
    return replace_loose(module, lambda tensor: replacements[id(tensor)][1] if id(tensor) in replacements else tensor)


@contextmanager
def replaced_tensors(module: nn.Module, other: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace every parameter and buffer by `other(tensor)` inside the block, and restore all of them afterwards."""
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


def as_ghosts(module: nn.Module) -> AbstractContextManager[None]:
    """Replace parameters and buffers of `module` by ghosts inside the block; tied tensors stay tied."""
    return replaced_tensors(module, _ghost)


def copy_attributes(parameter: Tensor, other: Tensor) -> None:
    """Copy the Python attributes of a parameter to `other`; optimizer builders may read them (`p.no_decay = True`)."""
    for name, value in vars(parameter).items():
        if name not in _OF_GHOSTS:
            vars(other).setdefault(name, value)


def replace_loose(module: nn.Module, other: Callable[[Tensor], Tensor]) -> list[_Change]:
    """Replace every tensor in plain attributes, and in lists and dicts there, by `other(tensor)`.

    Plain attributes may also contain parameters and buffers, which are replaced as well.

    Returns:
        For each changed attribute: the attribute dict of its module, its name, and its former value.
    """
    changed: list[_Change] = []
    for part in module.modules():
        for name, value in list(_attributes(part)):
            new = tree_map_only(Tensor, other, value)
            if any(a is not b for a, b in zip(tree_leaves(value), tree_leaves(new), strict=True)):
                changed.append((vars(part), name, value))
                vars(part)[name] = new
    return changed


def _attributes(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(part).items():
        holds = isinstance(value, Tensor) or (isinstance(value, list | tuple | dict | deque) and len(value) > 0)
        if holds and name not in _HELD_BY_TORCH:
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
