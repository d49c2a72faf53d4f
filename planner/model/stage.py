"""A stage of a model that is no Sequential: the model's own forward, of which only some layers really run.

Modules in front of the stage are not run: they return what was received, or, where nobody needs it, an absent ghost.
Neither are functions between them that made a join (`joins.py`). Parameters of other stages that the model's own code
touches on its way are absent ghosts, too. Whatever reaches an output or the next stage is checked to be made of none.
The forward ends behind the stage's last module, or the join behind that. Modules are changed only while a stage runs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from planner.model.outline import Outline
from planner.model.recording import END
from planner.model.stage_forward import StageForward, held_tensor
from planner.model.stage_part import Part


class ModelStage(nn.Module):
    """Layers `first`..`end - 1` of `model`; parameters and buffers have the names they have in the model.

    The first stage takes the model's inputs; the others, a tuple of the tensors of `Outline.received`. The last
    returns the model's output, with stand-ins for what the loss does not read and is not at hand; the others, the
    tuple that the next one takes.
    """

    def __init__(self, outline: Outline, model: nn.Module, first: int, end: int) -> None:
        super().__init__()
        # All in one attribute, and none of them a module: the names of what the model holds are free.
        self._part = Part(outline, model, first, end)
        self.share_with(self)

    def forward(self, received: Any) -> Any:
        """What the stage makes of what it receives: see the class for what either is."""
        return StageForward(self._part, received).result()

    def share_with(self, root: nn.Module) -> None:
        """Makes this stage's parameters and buffers those of `root` too, under the names they have in the model.

        All but buffers that forwards replace: see `replaced_buffers`.
        """
        for name in self._part.held:
            if name in self._part.replaced:  # it would keep the first tensor in memory
                continue
            *path, last = name.split(".")
            owner, holder = self._part.model.get_submodule(".".join(path)), holder_at(root, path)
            if last in owner._parameters:
                holder._parameters[last] = owner._parameters[last]
            else:
                holder._buffers[last] = owner._buffers[last]

    def named_buffers(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return the stage's buffers of today."""
        yield from super().named_buffers(prefix, *args, **kwargs)
        for name, buffer in self.replaced_buffers():
            yield f"{prefix}.{name}" if prefix else name, buffer

    def replaced_buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers in whose place forwards put other tensors, by their names in the model."""
        return [(name, held_tensor(self._part.model, name)) for name in self._part.replaced]

    def call_at_ends(self, begun: Callable[[], None], done: Callable[[], None] = lambda: None) -> None:
        """Has these called in each forward, behind all that lies in front of the stage, and behind its last layer."""
        self._part.when_begun, self._part.when_done = begun, done

    def call_at_layers(self, listener: Callable[[int], None]) -> None:
        """Has `listener` called in each forward where one of its layers begins: 0 for the stage's first, and so on.

        Where the model draws from Python's or NumPy's generator, also for layers before the stage: -1 for the last.
        """
        self._part.listen(listener)

    def keep_state(self) -> None:
        """Has forwards keep the tensors in attributes that later ones read."""
        self._part.keep_state()

    @property
    def running(self) -> list[str]:
        """Paths of the modules whose code runs in the stage."""
        return self._part.running

    @property
    def begun(self) -> list[str]:
        """Paths of those whose code has begun before the stage, and runs once more from its start."""
        return self._part.begun

    @property
    def finished(self) -> dict[str, nn.Module]:
        """The modules whose forward ends in this stage, by path; parts of it may run in earlier stages, too."""
        part, calls = self._part, self._part.outline.recording.calls
        paths = {call.path for call in calls if part.begin <= call.exit and (call.exit < part.stop or part.stop == END)}
        return {path: part.model.get_submodule(path) for path in sorted(paths)}

    @property
    def holders(self) -> list[nn.Module]:
        """The modules of the model whose own parameters, buffers and kept attributes the stage needs."""
        paths = sorted({*(name.rpartition(".")[0] for name in self._part.held), *(path for path, _ in self._part.kept)})
        return [self._part.model.get_submodule(path) for path in paths]

    @property
    def needed_to_pass_over(self) -> list[Tensor]:
        """Parameters and buffers that code in front of the stage reads, for what the stage needs of it."""
        return [held_tensor(self._part.model, name) for name in self._part.repeated]

    @property
    def model(self) -> nn.Module:
        """The whole model, which the stage runs its part of."""
        return self._part.model


def holder_at(root: nn.Module, path: Sequence[str]) -> nn.Module:
    """The module at `path` below `root`, made where it is missing."""
    for part in path:
        below = root._modules.get(part)
        if below is None:
            root._modules[part] = below = nn.Module()
        root = below
    return root
