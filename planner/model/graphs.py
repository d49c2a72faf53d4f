"""Replace tensors that have an autograd graph, which keeps parameters in memory."""

from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from planner.model.ghosts import Ghost, ghost_like


def drop_graphs(value: Any) -> Any:
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
