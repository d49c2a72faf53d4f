"""Conversion of the state of a run to JSON and tensors, and back, bit for bit.

JSON has numbers, strings, None, lists, and dicts with strings as keys. Other values are written as a dict with one key:

    {"$tensor": NAME}                   a tensor, stored under NAME
    {"$float": "inf"}                   a float that JSON cannot hold
    {"$tuple": [...]}
    {"$dict": [[key, value], ...]}      a dict with keys that are not strings, or that begin with "$"
    {"$counter": [[key, value], ...]}   a `collections.Counter`, which `MultiStepLR` has

Python writes a float with enough digits to read back the same bits.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from planner.core.errors import UsageError
from planner.executor.keep.tensor_bytes import is_storable

_PLAIN = (type(None), bool, int, str)
_DICTS = (dict, OrderedDict, Counter)


def to_json(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a value to nested JSON values, and collect its tensors in `tensors`.

    Args:
        value: Nested dicts, lists and tuples of numbers, strings, None and tensors. NumPy's numbers become Python's.
        where: Path of the value in the state, such as "others['schedule']".
        tensors: Dict to which the tensors in `value` are added, each under its path.

    Returns:
        Nested JSON value, in which a tensor is replaced by its path.

    Raises:
        UsageError: The value contains an object of another type.
    """
    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind in (list, tuple):
        items = [to_json(item, f"{where}[{n}]", tensors) for n, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind in _DICTS:
        held = {key: to_json(item, f"{where}[{key!r}]", tensors) for key, item in value.items()}
        if kind is not Counter and all(type(key) is str and not key.startswith("$") for key in held):
            return held
        pairs = [[to_json(key, f"a key of {where}", tensors), item] for key, item in held.items()]
        return {"$counter" if kind is Counter else "$dict": pairs}
    if is_storable(value):
        tensors[where] = value.detach()
        return {"$tensor": where}
    what = f"{kind.__module__}.{kind.__qualname__}"
    raise UsageError(
        f"a checkpoint cannot hold {where}, which is a {what}{f' of {value.dtype}' if hasattr(value, 'dtype') else ''}",
        hint="use a dense tensor of another dtype, such as `torch.complex64`, or the parts of `torch.view_as_real`"
        if isinstance(value, Tensor)
        else "a `state_dict` may have numbers, strings, None, tensors, and lists, tuples and dicts of these",
    )


def from_json(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Convert the result of `to_json` back to the original value. `tensor(path)` returns the tensor of a path.

    A damaged `value` raises errors of several types.
    """
    if isinstance(value, list):
        return [from_json(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: from_json(item, tensor) for key, item in value.items()}
    content = value[tag]
    if tag == "$tensor":
        return tensor(content)
    return _MADE_OF[tag](from_json(content, tensor))


_MADE_OF: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$tuple": tuple,
    "$dict": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}
