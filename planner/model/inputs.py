"""Parse inputs given as text: `3x224x224`, `1024:int64:32000`.

The form of the text is shape[:dtype[:upper bound]]; the shape has no batch dimension.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from planner.core.errors import UsageError

BATCH_FIRST = (
    "put the samples first in every tensor of inputs and targets: `batch_first=True` in `nn.Transformer`, `nn.LSTM` "
    "and the like, or transpose in the model's `forward`"
)
"""Hint for tensors whose first dimension is not the number of samples."""


def samples_first_hint(shape: Sequence[int], size: int) -> str:
    """Return the hint for a tensor whose first dimension is not the number of samples."""
    rows, rest = divmod(shape[0], size) if shape else (0, 0)
    if rows < 2 or rest:
        return BATCH_FIRST
    return (
        f"if each sample has {rows} rows, such as the patches of an image, return `x.unflatten(0, (-1, {rows}))`, and "
        f"call the model with `x.flatten(0, 1)` in a module around it; otherwise {BATCH_FIRST}"
    )


PLAIN_CONTAINERS = (
    "return inputs and targets in tuples, lists and dicts: `dict(batch)` for a BatchEncoding, `vars(batch)` for a "
    "dataclass; if a module needs an object, make it in `forward`"
)
"""Hint of the error for a batch with tensors in an object that is no tuple, list or dict."""


STACKED = (
    "pad tensors of different sizes (`torch.nn.utils.rnn.pad_sequence`), stack them (`torch.stack`), and return the "
    "stacked tensors; if the model needs lists, make them in `forward` of a module around it"
)
"""Hint of the error for a list with a tensor or dict per sample, such as the boxes of each image."""


def tokens_of_sample(inputs: Any) -> int:
    """Return the number of tokens in a sample: the length of the longest input of token ids; 0 without such inputs.

    Token ids are integers of shape (samples, tokens).
    """
    leaves = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.ndim == 2)
    return max((leaf.shape[1] for leaf in leaves if leaf.dtype in _INTEGERS), default=0)


_INTEGERS = (torch.int64, torch.int32)

_OBJECT_DEPTH = 3
"""Objects are searched to this depth: a graph of torch_geometric holds its tensors in an object within an object."""


def unsplittable_type_name(value: Any, num_samples: int) -> str:
    """Return the type name of an object in `value` that cannot be split into micro-batches; else an empty text.

    Such an object has tensors of `num_samples` samples in its attributes or items, and is no tuple, list or dict.
    """
    objects = [leaf for leaf in tree_leaves(value) if not isinstance(leaf, Tensor)]
    return next((type(each).__name__ for each in objects if _holds_samples(each, num_samples, _OBJECT_DEPTH)), "")


def _holds_samples(value: Any, num_samples: int, depth: int) -> bool:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            if leaf.shape[:1] == (num_samples,):
                return True
        elif depth and not isinstance(leaf, nn.Module | type):
            content = leaf.values() if isinstance(leaf, Mapping) else getattr(leaf, "__dict__", {}).values()
            if _holds_samples(list(content), num_samples, depth - 1):
                return True
    return False


PLAIN = (str, int, float)
"""Types of plain items of samples, such as labels in a list."""


def describe_sample_list(value: Any, num_samples: int, types: tuple[type, ...] = PLAIN) -> str:
    """Return a description of a list or array in `value` that has one item per sample; else an empty text.

    Args:
        value: Nested containers.
        num_samples: Number of samples of the batch.
        types: Types of the items of such lists.
    """
    if isinstance(value, np.ndarray):
        return f"a NumPy array of shape {list(value.shape)}" if value.shape[:1] == (num_samples,) else ""
    if isinstance(value, Mapping):
        value = list(value.values())
    elif not isinstance(value, list | tuple):
        return ""
    elif len(value) == num_samples and all(isinstance(item, types) for item in value):
        return f"a {type(value).__name__} of {num_samples} values of type {type(value[0]).__name__}"
    return next(filter(None, (describe_sample_list(item, num_samples, types) for item in value)), "")


_EXAMPLE = "for example `--input 3x224x224` or `--input 1024:int64:32000`"


def input_tensor(text: str, batch_size: int) -> Tensor:
    """Return random data of shape (batch_size, *shape) for the text `shape[:dtype[:upper bound]]`.

    Floating-point numbers are normally distributed. Integers are uniform from 0 to below the upper bound.

    Raises:
        UsageError: `text` has another form.
    """
    parts = text.split(":")
    try:
        shape = [int(size) for size in parts[0].split("x")]
        bound = int(parts[2]) if len(parts) > 2 else 2
    except ValueError:
        raise UsageError(f"not a shape: `--input {text}`", hint=_EXAMPLE) from None
    dtype = getattr(torch, parts[1], None) if len(parts) > 1 else torch.float32
    if not isinstance(dtype, torch.dtype) or dtype.is_complex:
        raise UsageError(f"`--input {text}`: `{parts[1]}` is no dtype for an input", hint=_EXAMPLE)
    if len(parts) > 3 or min(shape) < 1 or bound < 1:
        raise UsageError(f"`--input {text}`: sizes and upper bound must be at least 1", hint=_EXAMPLE)
    if dtype.is_floating_point:
        return torch.randn(batch_size, *shape, dtype=dtype)
    return torch.randint(bound, (batch_size, *shape), dtype=dtype)
