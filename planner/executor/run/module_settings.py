"""Check that a rank's layers change only settings of modules that run on this rank.

A layer may set `other.training`, add a hook to another module, or replace one of its submodules. If the other module
runs on another rank, that rank does not see the change: each rank has its own copy of the model.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.utils._pytree import tree_leaves

from planner.core.errors import TrainingError
from planner.executor.run.stage_module import StageModule
from planner.model.attributes import OF_EVERY_MODULE
from planner.model.python_state import HOOKS, NUMBERS

Settings = dict[tuple[str, str], Any]
"""Settings of modules, such as their modes, by path of the module and name of the setting."""


class ModuleSettings:
    """Settings of modules that run on other ranks, but that layers of this rank can reach.

    Args:
        model: The whole model, in which a module is found by its path.
        stages: Stages of this process.
    """

    def __init__(self, model: nn.Module, stages: Sequence[StageModule]) -> None:
        reachable = [each for stage in stages for each in stage.reachable_modules()]
        self._running = [(path, module) for path, module, runs in reachable if runs]
        self._elsewhere = [(path, module) for path, module, runs in reachable if not runs]
        self._elsewhere += _modules_in_attributes(model, dict(self._running))
        self._parameters: dict[int, dict[str, Any]] = {}
        """Parameters of each module at `remember()`, by `id()` of the module."""
        self._before: list[Settings] = []

    def remember(self) -> None:
        """Store the current settings of the modules that run on other ranks."""
        self._parameters = {id(m): dict(m._parameters) for _, m in (*self._running, *self._elsewhere)}
        self._before = [self._settings(path, module) for path, module in self._elsewhere]

    def changed_elsewhere(self) -> Settings:
        """Return the settings of modules of other ranks that have changed on this rank since `remember()`."""
        now = [self._settings(path, module) for path, module in self._elsewhere]
        pairs = zip(now, self._before, strict=True)
        return {key: value for after, before in pairs for key, value in after.items() if before.get(key) != value}

    def check_equal(self, changed_per_rank: Sequence[Settings]) -> None:
        """Check that settings which layers changed on other ranks have the same values in this rank's modules.

        A layer of another rank may change a setting of its own copy of a module. If the module runs on this rank, the
        setting must have the same value here.

        Args:
            changed_per_rank: Result of `changed_elsewhere` on every rank.

        Raises:
            TrainingError: A module that runs on this rank has another value of a changed setting.
        """
        ours = [(path, self._settings(path, module)) for path, module in self._running]
        for changed in changed_per_rank:
            for (path, name), value in changed.items():
                if any(own == path and settings.get((path, name)) != value for own, settings in ours):
                    raise TrainingError(
                        f'a layer of another rank has changed {name} of "{path}" after the first step, but this rank '
                        "runs the module, and its copy does not have the change",
                        hint="let each module change only its own settings, depending only on inputs of its `forward`",
                    )

    def _settings(self, path: str, module: nn.Module) -> Settings:
        if type(module).forward is nn.Module.forward:
            return {}  # a container such as `nn.ModuleList`, whose settings no code reads
        trained = {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}
        before = self._parameters[id(module)]
        settings: dict[str, Any] = {
            "the mode `training`": module.training,
            "`forward`": getattr(module.forward, "__qualname__", ""),
            "the hooks": [len(getattr(module, name)) for name in HOOKS],
            "the submodules": [type(child).__qualname__ for child in module._modules.values()],
            "the parameters": [name for name, p in trained.items() if p is not before.get(name)],
            "`requires_grad`": [name for name, p in module._parameters.items() if name not in trained],
        }
        numbers = {name: value for name, value in vars(module).items() if type(value) in NUMBERS}
        settings |= {f"`{name}`": value for name, value in numbers.items() if name not in OF_EVERY_MODULE}
        return {(path, name): value for name, value in settings.items()}


def _modules_in_attributes(model: nn.Module, running: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) for the modules in plain attributes of the `running` modules, with their submodules.

    The `running` modules are copies of modules in `model`. The path is that of the corresponding module in `model`.
    """
    path_of = {id(module): path for path, module in model.named_modules()}
    seen = {id(module) for module in running.values()}
    waiting = [(model.get_submodule(path), module) for path, module in running.items()]
    while waiting:
        for inner, found in _pairs_in_attributes(*waiting.pop()):
            if id(found) not in seen and id(inner) in path_of:
                seen.add(id(found))
                waiting.append((inner, found))
                yield path_of[id(inner)], found


def _pairs_in_attributes(one: nn.Module, other: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield pairs of corresponding modules in plain attributes of `one` and of its copy `other`, with submodules."""
    for name, value in vars(other).items():
        leaves = (
            [] if name in OF_EVERY_MODULE else zip(tree_leaves(vars(one).get(name)), tree_leaves(value), strict=False)
        )
        for first, second in leaves:
            if isinstance(first, nn.Module) and isinstance(second, nn.Module):
                yield from zip(first.modules(), second.modules(), strict=False)
