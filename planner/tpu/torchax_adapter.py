"""Adapter of torchax, which translates torch's operators to JAX. No other module imports torchax.

The adapter works around gaps of torchax 0.0.13 with torch 2.13. A workaround is removed once torchax has a fix.
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
"""Pattern of overloads for named tensors: `aten.prod.dim_Dimname`, `aten.norm.names_ScalarOpt_dim`."""


@contextmanager
def _without_named_tensors() -> Iterator[None]:
    """Make torchax importable with torch 2.13, which lacks overloads for named tensors (pytorch/pytorch#173895).

    torchax refers to these overloads. During the import, placeholders replace them; no code uses the placeholders.
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


# Random state for torch's `fork_rng`; JAX's keys are passed explicitly.
torchax.device_module.get_rng_state = lambda *_: torch.empty(0)
# Torch's activation checkpointing queries the streams of all devices, also for models that do not use JAX. This stream
# has nothing to wait for.
_STREAM = SimpleNamespace(synchronize=lambda: None)
torchax.device_module.current_stream = lambda *_: _STREAM
torchax.device_module.stream = nullcontext
# Torch must not take torchax for an accelerator. Otherwise `torch.compile` would request a stream for it from torch's
# runtime, and fail for every model of the process.
torchax.device_module.is_available = lambda: False


def jax_shape_of(tensor: Tensor) -> jax.ShapeDtypeStruct:
    """Return a tensor's shape and dtype in JAX, where 64-bit integers have 32 bits."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), jax.dtypes.canonicalize_dtype(mappings.t2j_dtype(tensor.dtype)))


def torch_like(shape: jax.ShapeDtypeStruct) -> Tensor:
    """Return a meta tensor with a JAX array's shape and dtype. Floating-point tensors require a gradient."""
    dtype = mappings.j2t_dtype(shape.dtype)
    return torch.empty(shape.shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)


@contextmanager
def ignore_64_bit_warnings() -> Iterator[None]:
    """Suppress JAX's warnings that 64-bit integers become 32-bit integers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Explicitly requested dtype")
        yield


@cache
def torchax_environment() -> torchax.tensor.Environment:
    """Return the environment that translates torch's operators to JAX."""
    return _SingleDeviceEnvironment()


class _SingleDeviceEnvironment(torchax.tensor.Environment):  # type: ignore[misc]
    """torchax environment with one device. Tensors that are not parameters, such as masks, become constants."""

    def _to_copy(self, the_tensor: Any, new_dtype: torch.dtype | None, new_device: Any) -> Any:
        # A rotary embedding moves to the device of the token ids, which in a later stage is the host.
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
        # Expanded zeros take no memory here, and need not take any in JAX.
        return jnp.broadcast_to(env.t2j_copy(tensor.detach()[(0,) * tensor.ndim]), tuple(tensor.shape))
    return env.t2j_copy(tensor.detach())
