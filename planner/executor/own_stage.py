"""Builds a model of which only some tensors exist, with exactly the values they have when the whole model is built.

Initial values come from a random generator that every layer advances in turn, so a rank cannot just build its own
layers. The model is therefore built twice on the meta device, where tensors have no memory. The first time every
operator is written down with the storages it reads and writes. What the wanted tensors depend on (backward slice) is
then known, and the second time those operators run for real; every other operator stays on the meta device, and if it
draws random numbers it draws them into a scratch tensor, which is dropped at once. Peak memory: the wanted tensors
and the largest single tensor.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

__all__ = ["BuildError", "build_only"]


_UNNUMBERED = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
"""Copies no value, and `nn.Parameter` calls it or not, depending on who else holds the tensor."""


class BuildError(Exception):
    """The model cannot be built in parts; build it whole."""


def build_only(
    build: Callable[[], nn.Module], wanted: Callable[[nn.Module], Iterable[Tensor]], *, seed: int
) -> nn.Module:
    """`torch.manual_seed(seed); build()` with only the `wanted` tensors in memory, the others on the meta device.

    Args:
        build: Makes the model; must do the same each time.
        wanted: The tensors of a built model that are needed.
        seed: Of torch's generator.

    Raises:
        BuildError: The model's construction depends on values, differs from time to time, or needs real devices.
    """
    notes = _Notes()
    try:
        with notes:
            model = build()
        replay = _Replay(notes, notes.slice_of(wanted(model)))
        torch.manual_seed(seed)
        with replay:
            model = build()
    except BuildError:
        raise
    except Exception as error:
        raise BuildError(f"{type(error).__name__}: {error}") from error
    if any(tensor.is_meta for tensor in wanted(model)):
        raise BuildError("some tensors are made in a way that cannot be followed")
    return model


class _Notes(TorchDispatchMode):
    """Writes down which storages every operator reads and writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self._touched: list[set[int]] = []
        self._writers: dict[int, list[int]] = {}
        self._alive: list[Tensor] = []  # a storage's address means something only while it lives

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = _on_meta(func, args, kwargs or {})
        if func in _UNNUMBERED:
            return result
        given, made = _tensors((args, kwargs)), _tensors(result)
        self._alive.extend((*given, *made))
        before, after = {_key(t) for t in given}, {_key(t) for t in made}
        number = len(self.names)
        self.names.append(str(func))
        self._touched.append(before | after)
        for key in after - before if not _writes(func) else after | before:
            self._writers.setdefault(key, []).append(number)
        return result

    def slice_of(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Numbers of all operators that the values of `tensors` depend on."""
        needed: set[int] = set()
        todo = [number for tensor in tensors for number in self._writers.get(_key(tensor), [])]
        while todo:
            number = todo.pop()
            if number in needed:
                continue
            needed.add(number)
            for key in self._touched[number]:
                todo.extend(earlier for earlier in self._writers.get(key, []) if earlier < number)
        return frozenset(needed)


class _Replay(TorchDispatchMode):
    """Runs the needed operators on the CPU and the others on the meta device, drawing every random number."""

    def __init__(self, notes: _Notes, needed: frozenset[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = notes.names
        self._needed = needed
        self._number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _UNNUMBERED:
            return func(*args, **(kwargs or {}))
        number, self._number = self._number, self._number + 1
        if number >= len(self._names) or self._names[number] != str(func):
            raise BuildError(f"the model is not built the same way twice ({func})")
        if number in self._needed:
            return func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            func(*tree_map_only(Tensor, _scratch, args), **tree_map_only(Tensor, _scratch, kwargs or {}))
        return _on_meta(func, args, kwargs or {})


def _on_meta(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Runs an operator without memory, unless all it works on is there already (numbers written in the user's code)."""
    given = _tensors((args, kwargs))
    if given and not any(tensor.is_meta for tensor in given):
        return func(*args, **kwargs)
    if any(argument.name == "device" for argument in func._schema.arguments):
        kwargs = {**kwargs, "device": torch.device("meta")}
    return func(*_to_meta(args), **_to_meta(kwargs))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _writes(func: Any) -> bool:
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _scratch(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.clone()


def _to_meta(value: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t if t.is_meta else t.to("meta"), value)
