"""Torch's operators as JAX's, by torchax; the one module that imports it.

It mends what torchax 0.0.13 lacks for torch 2.13; a mend goes as soon as torchax has its own.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import torch
from jax import numpy as jnp
from torch import Tensor
from torch._ops import OpOverloadPacket

_GONE = re.compile("dimname|names", re.IGNORECASE)
"""In the names of overloads for named tensors: `aten.prod.dim_Dimname`, `aten.norm.names_ScalarOpt_dim`."""


@contextmanager
def _without_named_tensors() -> Iterator[None]:
    """Lets torchax be imported, which lists overloads for named tensors; torch 2.13 has none (pytorch/pytorch#173895).

    Meanwhile they resolve to placeholders, which nobody ever looks up.
    """
    look_up = OpOverloadPacket.__getattr__

    def look_up_or_name(packet: OpOverloadPacket, name: str) -> Any:
        try:
            return look_up(packet, name)
        except AttributeError:
            if _GONE.search(name) is None:
                raise
            return f"{packet}.{name}"

    OpOverloadPacket.__getattr__ = look_up_or_name  # type: ignore[method-assign]
    try:
        yield
    finally:
        OpOverloadPacket.__getattr__ = look_up  # type: ignore[method-assign]


with _without_named_tensors():
    import torchax
    import torchax.decompositions
    import torchax.device_module
    import torchax.tensor
    from torchax.ops import mappings

OperatorNotFound = torchax.tensor.OperatorNotFound


# A state of random numbers, for which torch's `fork_rng` asks; JAX's keys are ours to hand on.
torchax.device_module.get_rng_state = lambda *_: torch.empty(0)
# And streams, for which torch's checkpoints ask whatever device there is, also those of other models: work is done when
# it has been asked for, and nothing is left to wait for.
_STREAM = SimpleNamespace(synchronize=lambda: None)
torchax.device_module.current_stream = lambda *_: _STREAM
torchax.device_module.stream = nullcontext
# Nor is it an accelerator that torch itself drives: asked whether there is one, `torch.compile` would take its stream
# from torch's own runtime, which knows none, and fail for every model of the process.
torchax.device_module.is_available = lambda: False


def shape_of(tensor: Tensor) -> jax.ShapeDtypeStruct:
    """A tensor's shape and dtype, as JAX has it: 64-bit integers have 32 there."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jax.dtypes.canonicalize_dtype(mappings.t2j_dtype(tensor.dtype)))


def torch_like(shape: jax.ShapeDtypeStruct) -> Tensor:
    """A tensor without values of a JAX shape and dtype; one that can carries a gradient."""
    dtype = mappings.j2t_dtype(shape.dtype)
    return torch.empty(shape.shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


@contextmanager
def in_32_bits() -> Iterator[None]:
    """Torch's integers have 64 bits, and JAX says each time that its own have 32."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Explicitly requested dtype")
        yield


@cache
def environment() -> torchax.tensor.Environment:
    """Where torch's operators are JAX's."""
    return _Environment()


class _Environment(torchax.tensor.Environment):  # type: ignore[misc]
    """Takes tensors that are no parameters (a mask that is a plain attribute, say) as constants; knows one device."""

    def _to_copy(self, the_tensor: Any, new_dtype: torch.dtype | None, new_device: Any) -> Any:
        # A rotary embedding moves to where the words lie, which in a later stage is where a stand-in does: the host.
        if isinstance(the_tensor, torchax.tensor.Tensor | torchax.tensor.View):
            new_device = "jax"
        return super()._to_copy(the_tensor, new_dtype, new_device)

    def t2j_iso(self, torchtensors: Any) -> Any:
        def wrapped(tensor: Tensor) -> Any:
            if hasattr(tensor, "jax"):
                return tensor
            return torchax.tensor.Tensor(_constant(self, tensor), self)

        mapped = torch.utils._pytree.tree_map_only(Tensor, wrapped, torchtensors)
        return super().t2j_iso(mapped)


def _constant(env: torchax.tensor.Environment, tensor: Tensor) -> jax.Array:
    if tensor.numel() and not any(tensor.stride()):
        # Zeros that take no memory need not take any there.
        return jnp.broadcast_to(env.t2j_copy(tensor.detach()[(0,) * tensor.ndim]), tuple(tensor.shape))
    return env.t2j_copy(tensor.detach())
