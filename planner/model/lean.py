"""Build models whose parameters take no memory.

Such models serve for planning, and for measuring a few layers of a model that is larger than the memory. Parameters are
on the meta device: they have a shape and no values. Buffers (tables, masks) are real, because code reads their values.
Layers that are measured get random parameters, because their cost does not depend on the values.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from planner.model.module_tensors import (
    copy_attributes,
    move_attribute_tensors,
    replace_attribute_tensors,
    replace_tensors,
)
from planner.model.stage import ModelStage

_SPREAD = 0.02
"""Standard deviation of random parameters, which keeps outputs far from overflow and from denormal numbers."""

_IS_META: Any = Tensor.is_meta.__get__  # type: ignore[attr-defined]
"""Function that a torch function mode intercepts when code reads `is_meta` of a tensor."""


class StrictOperators(TorchDispatchMode):
    """Torch dispatch mode in which an operator that the meta device lacks raises a `RuntimeError`.

    Without this mode, torch raises a `NotImplementedError`. Parametrizations (`torch.nn.utils.parametrize`) catch that
    error and continue, so the model would lack a buffer.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator."""
        try:
            return func(*args, **(kwargs or {}))
        except NotImplementedError as error:
            raise RuntimeError(str(error)) from error


class NoMetaBranches(TorchFunctionMode):
    """Torch function mode that raises a `RuntimeError` if code outside torch reads `is_meta` of a tensor.

    A constructor that reads `is_meta` may create no buffers on the meta device, so the model would lack them. Torch's
    own initializers may read `is_meta`: they only skip setting values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function."""
        if func == _IS_META and sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] != "torch":
            raise RuntimeError("the code reads `is_meta`")
        return func(*args, **(kwargs or {}))


def build_lean(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that `build` makes, with parameters that take no memory."""
    with _without_parameters(), StrictOperators():  # type: ignore[no-untyped-call]
        model = build()
    # A module may have made a list of its parameters before it registered them: the list still has the original ones.
    replace_attribute_tensors(model, lambda tensor: vars(tensor).get("_empty", tensor))
    return model


def allocate_parameters(
    modules: Iterable[nn.Module], model: nn.Module, device: torch.device, *, random: bool = True
) -> None:
    """Replace parameters on the meta device by parameters with memory; tied parameters stay tied.

    Args:
        modules: Modules whose parameters get memory.
        model: Model that contains the modules.
        device: Device of the memory.
        random: True to set random values, and integers to 0; otherwise the memory is not initialized.
    """
    modules = list(modules)
    wanted = {id(p) for module in modules for p in module.parameters() if p.is_meta}
    replace_tensors(model, lambda tensor: _filled(tensor, device, random=random) if id(tensor) in wanted else tensor)
    for module in modules:
        if isinstance(module, ModelStage):
            module.register_tensors_in(module)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move buffers and tensors in plain attributes, but not parameters, to `device`."""
    replace_tensors(model, lambda tensor: tensor if isinstance(tensor, nn.Parameter) else tensor.to(device))
    move_attribute_tensors(model, lambda tensor: tensor.to(device))


@contextmanager
def _without_parameters() -> Iterator[None]:
    register = nn.Module.register_parameter
    at_place: dict[tuple[object, ...], Tensor] = {}
    """Meta tensors that replace parameters. A key has the storage, offset, stride and shape of an original parameter.

    The key refers to the storage weakly: the original values can be freed, but no other storage gets its address."""

    def register_empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        # A subclass (a quantized or uninitialized parameter) has more properties than a shape.
        if parameter is None or type(parameter) is not nn.Parameter or parameter.is_meta:
            return
        # A second registration under another name gets the same replacement.
        if "_empty" not in vars(parameter):
            # Two parameters that were made from one tensor also share the tensor on the meta device.
            place = StorageWeakRef(parameter.untyped_storage()), parameter.storage_offset(), parameter.stride()
            values = at_place.setdefault((*place, parameter.shape), parameter.detach().to("meta"))
            empty = nn.Parameter(values, requires_grad=parameter.requires_grad)
            _share_hooks(parameter, empty)
            vars(parameter)["_empty"] = empty
        module._parameters[name] = vars(parameter)["_empty"]

    nn.Module.register_parameter = register_empty  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _share_hooks(parameter: nn.Parameter, empty: nn.Parameter) -> None:
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, name) is None:
            setattr(parameter, name, OrderedDict())
        setattr(empty, name, getattr(parameter, name))


def _filled(parameter: Tensor, device: torch.device, *, random: bool) -> nn.Parameter:
    tensor = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype, device=device)
    if random and (tensor.is_floating_point() or tensor.is_complex()):
        tensor.normal_(0.0, _SPREAD)
    elif random:
        tensor.zero_()
    filled = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
    copy_attributes(parameter, filled)
    return filled
