"""Second name of the package `planner`, which emitted scripts import.

A script's own folder comes first where Python looks for modules: a `planner.py` beside train.py, or another
distribution's `planner`, would take the place of the package. This one finds it by its place on disk, and registers it
under both names: `gpipe_plan.executor` and `planner.executor` are the same module. A model must not import another
module called `planner`, too.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[1] / "planner"


class _Alias(MetaPathFinder, Loader):
    """Finder of `gpipe_plan.x`, which is `planner.x`."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for modules of this package, and None for all others."""
        return ModuleSpec(fullname, self) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module of `planner`."""
        module = import_module("planner" + spec.name.removeprefix(__name__))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Keep the module as it is: it has been executed, and has a spec of its own."""
        name = __name__ + module.__name__.removeprefix("planner")
        module.__spec__ = self._specs.pop(name)


def _registered() -> ModuleType:
    """Return the package `planner` that lies beside this one, whatever else has that name."""
    present = sys.modules.get("planner")
    if present is not None and Path(str(present.__file__)).resolve().parent == _PACKAGE:
        return present
    spec = spec_from_file_location("planner", _PACKAGE / "__init__.py", submodule_search_locations=[str(_PACKAGE)])
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["planner"] = module
    spec.loader.exec_module(module)
    return module


_planner = _registered()
sys.meta_path.insert(0, _Alias())


def __getattr__(name: str) -> Any:
    return getattr(_planner, name)
