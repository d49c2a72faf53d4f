"""Run a stage of a model that is not a Sequential: the model's own forward, in which only the stage's layers run.

Modules of earlier stages do not run, unless their calls are constant (`planner.model.repeated_code`). If the model's
code calls such a module, it gets the received tensors, or tensors without values if the stage does not need the result
(`planner.model.ghosts`). Parameters of other stages that the model's own code uses are also replaced by tensors without
values. The stage checks that its outputs do not depend on tensors without values.

The forward ends after the stage's last module. The modules are modified only while a stage runs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from planner.model.carried_state import attribute_key
from planner.model.model_part import ModelPart
from planner.model.outline import ModelOutline
from planner.model.recording import END
from planner.model.refusals import control_flow_error
from planner.model.stage_forward import StageForward, attribute_named


class ModelStage(nn.Module):
    """Part of `model` that runs its layers `first` to `end - 1`; parameters and buffers keep their names.

    The first stage takes the model's inputs, and every other stage the tuple of tensors that the previous one returns.
    The last stage returns the model's output, with stand-ins for some outputs that the loss does not read.
    """

    def __init__(self, outline: ModelOutline, model: nn.Module, first: int, end: int) -> None:
        super().__init__()
        # One attribute that is not a module leaves all other names free for the model's parameters and buffers.
        self._part = ModelPart(outline, model, first, end)
        self.register_tensors_in(self)

    def forward(self, received: Any) -> Any:
        """Return the tensors for the next stage or, in the last stage, the model's output."""
        return StageForward(self._part, received).run_stage()

    def register_tensors_in(self, root: nn.Module) -> None:
        """Register the stage's parameters and buffers in `root` under their names, except the `replaced_buffers`."""
        for name in self._part.model_tensors:
            if name in self._part.replaced:  # registering it would keep the first tensor in memory
                continue
            *path, last = name.split(".")
            holder = get_or_create_module(root, path)
            try:
                owner = self._part.model.get_submodule(".".join(path))
                if last in owner._parameters:
                    holder._parameters[last] = owner._parameters[last]
                else:
                    holder._buffers[last] = owner._buffers[last]
            except (AttributeError, KeyError):
                raise control_flow_error(f'`forward` has removed "{name}"') from None

    def named_buffers(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of the stage's buffers, including those of `replaced_buffers()`."""
        yield from super().named_buffers(prefix, *args, **kwargs)
        for name, buffer in self.replaced_buffers():
            yield f"{prefix}.{name}" if prefix else name, buffer

    def replaced_buffers(self) -> list[tuple[str, Tensor]]:
        """Return names and values of the buffers that forwards replace by other tensors."""
        return [(name, attribute_named(self._part.model, name)) for name in self._part.replaced]

    def call_at_stage_ends(self, begun: Callable[[], None], done: Callable[[], None] = lambda: None) -> None:
        """In each forward, call `begun` before the stage's first layer, and `done` after its last."""
        self._part.when_begun, self._part.when_done = begun, done

    def call_at_layers(self, listener: Callable[[int], None]) -> None:
        """In each forward, call `listener` when a layer begins, with its index in the stage.

        Earlier layers have negative indices; the last layer of the previous stage has -1. `listener` is called for them
        if the stage repeats their code and the model draws random numbers from Python or NumPy.
        """
        self._part.call_at_layers(listener)

    def keep_state(self) -> None:
        """Let forwards keep the attribute changes that later forwards read, instead of undoing them at the end."""
        part = self._part
        part.leftovers = [change for change in part.leftovers if attribute_key(change) not in part.kept]

    @property
    def running_paths(self) -> list[str]:
        """Paths of the modules whose code runs in the stage, at least partly."""
        part = self._part
        whole = [path for layer in part.layers for path in part.outline.modules[layer]]
        inside = [p for path in whole for p, _ in part.model.get_submodule(path).named_modules(prefix=path)]
        return sorted({part.outline.recording.calls[number].path for number in part.open}.union(inside))

    @property
    def constant_paths(self) -> list[str]:
        """Paths of the modules with at least one constant call. Every stage may run these calls.

        A constant call depends on no parameter, floating-point input or random number.
        """
        return sorted({call.path for call in self._part.outline.recording.calls if call.constant})

    @property
    def repeated_paths(self) -> list[str]:
        """Paths of the modules whose `forward` begins in an earlier stage, and runs again in this stage."""
        begin, calls = self._part.begin, self._part.outline.recording.calls
        return sorted({call.path for call in calls if call.enter < begin <= call.exit})

    @property
    def finished_modules(self) -> dict[str, nn.Module]:
        """Modules whose forward ends in this stage, by path. The forward may begin in an earlier stage."""
        part, calls = self._part, self._part.outline.recording.calls
        paths = {call.path for call in calls if part.begin <= call.exit and (call.exit < part.stop or part.stop == END)}
        # Numbers of tables that earlier stages compute are undone after each forward.
        tables = {path for path, _ in part.outline.recording.reused_tables} - {path for path, _ in part.kept}
        return {path: part.model.get_submodule(path) for path in sorted(paths - tables)}

    @property
    def state_modules(self) -> list[nn.Module]:
        """Modules that own a parameter or buffer of the stage, or an attribute that it keeps for later forwards."""
        owners = {name.rpartition(".")[0] for name in self._part.model_tensors}
        paths = owners.union(path for path, _ in self._part.kept)
        return [self._part.model.get_submodule(path) for path in sorted(paths)]

    @property
    def tensors_of_repeated_code(self) -> list[Tensor]:
        """Parameters and buffers that code of earlier layers reads when it runs again in this stage."""
        return [attribute_named(self._part.model, name) for name in self._part.repeated]

    @property
    def model(self) -> nn.Module:
        """Whole model, of which the stage runs a part."""
        return self._part.model


def get_or_create_module(root: nn.Module, path: Sequence[str]) -> nn.Module:
    """Return the module at `path` below `root`, and create missing modules."""
    for part in path:
        below = root._modules.get(part)
        if below is None:
            root._modules[part] = below = nn.Module()
        root = below
    return root
