"""Model file of a run: changes that the training script makes to it must affect the training."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from planner.core.errors import UsageError
from planner.model.load import LoadedModel


class ModelFile:
    """Module of a model file, which the training script may import."""

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        self._functions = self._functions_now()

    def load(self, load: Callable[[], LoadedModel]) -> LoadedModel:
        """Return the model that `load` returns. If the script imports the file later, it gets the same module."""
        name = self._path.stem
        before = _values(self._module) if self._module is sys.modules.get(name) else {}
        loaded, after = load(), _values(self._module)
        lost = [key for key in before if key in after and before[key] != after[key]]
        if lost:
            loaded, again = load(), _values(self._module)
            lost = [key for key in lost if after[key] == again[key]]  # the others, such as times, always differ
        if lost:
            raise UsageError(
                f"the script has changed `{lost[0]}` of {self._path.name} too early: the pipeline runs the file again, "
                "so the change is lost",
                hint="change it in the block of `pipeline_script`, or in the file",
            )
        spec = importlib.util.find_spec(name) if name not in sys.modules and name.isidentifier() else None
        if spec is not None and spec.origin == str(self._path) and self._module is not None:
            sys.modules[name] = self._module
        return loaded

    def check_functions(self) -> None:
        """Raise a `UsageError` if the script has replaced a function of the file since this object was made."""
        for name, function in self._functions_now().items():
            if function is not self._functions[name]:
                raise UsageError(
                    f"the script has replaced `{name}` of {self._path.name}, but the pipeline uses the file's function",
                    hint="let the file's function read a variable, which the script may change",
                )

    @property
    def _module(self) -> ModuleType | None:
        modules = (sys.modules.get(name) for name in (self._path.stem, f"gpipe_plan_model_{self._path.stem}"))
        return next((module for module in modules if getattr(module, "__file__", None) == str(self._path)), None)

    def _functions_now(self) -> dict[str, Any]:
        return {name: getattr(self._module, name, None) for name in ("loss_fn", "loss_count", "train_batches")}


def _values(module: ModuleType | None) -> dict[str, Any]:
    """Return numbers, texts and codes of functions of a module and of its classes, by name."""
    own = {} if module is None else vars(module)
    owners = [("", own), *((f"{name}.", vars(value)) for name, value in own.items() if isinstance(value, type))]
    return {
        prefix + name: getattr(value, "__code__", value)
        for prefix, values in owners
        for name, value in values.items()
        if isinstance(value, bool | int | float | str | FunctionType) and not name.startswith("__")
    }
