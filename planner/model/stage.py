"""Run a stage of a model that is not a Sequential: the model's own forward, in which only the stage's layers run.

Modules before the stage do not run. They return the received tensors or, where the stage needs none, an absent ghost.
The same holds for functions between them that made a join (`joins.py`). Parameters of other stages that the model's own
code touches are absent ghosts, too. The stage checks that no output and no sent tensor depends on an absent ghost. The
forward ends after the stage's last module, or the join after that. Modules are changed only while a stage runs.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from planner.model.outline import Outline
from planner.model.recording import END
from planner.model.stage_forward import StageForward, held_tensor
from planner.model.stage_part import StagePart


class ModelStage(nn.Module):
    """Layers `first` to `end - 1` of `model`; parameters and buffers have the names they have in the model.

    The first stage takes the model's inputs; the others, a tuple of the tensors of `Outline.received`. The last returns
    the model's output, with stand-ins for unread outputs that it does not have; the others, the tuple that the next one
    takes.
    """

    def __init__(self, outline: Outline, model: nn.Module, first: int, end: int) -> None:
        super().__init__()
        # One attribute that is not a module leaves all other names free for the model's parameters and buffers.
        self._part = StagePart(outline, model, first, end)
        self.share_with(self)

    def forward(self, received: Any) -> Any:
        """Return the tensors that the stage sends, or the model's output; see the class."""
        return StageForward(self._part, received).result()

    def share_with(self, root: nn.Module) -> None:
        """Register this stage's parameters and buffers in `root`, under the names they have in the model.

        Buffers that forwards replace are excluded: see `replaced_buffers`.
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
        """Yield the current buffers of the stage."""
        yield from super().named_buffers(prefix, *args, **kwargs)
        for name, buffer in self.replaced_buffers():
            yield f"{prefix}.{name}" if prefix else name, buffer

    def replaced_buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers that forwards replace by other tensors, with their names in the model."""
        return [(name, held_tensor(self._part.model, name)) for name in self._part.replaced]

    def call_at_ends(self, begun: Callable[[], None], done: Callable[[], None] = lambda: None) -> None:
        """Call `begun` in each forward after all code before the stage, and `done` after its last layer."""
        self._part.when_begun, self._part.when_done = begun, done

    def call_at_layers(self, listener: Callable[[int], None]) -> None:
        """Call `listener` in each forward where a layer begins, with its index in the stage.

        Where the model draws from Python's or NumPy's generator, it is also called for layers before the stage: -1 is
        the last.
        """
        self._part.listen(listener)

    def keep_state(self) -> None:
        """Let forwards keep the tensors in attributes that later forwards read."""
        self._part.keep_state()

    @property
    def running(self) -> list[str]:
        """Paths of the modules whose code runs in the stage."""
        return self._part.running

    @property
    def begun(self) -> list[str]:
        """Paths of the modules whose code begins before the stage, and runs again from its start."""
        return self._part.begun

    @property
    def finished(self) -> dict[str, nn.Module]:
        """Modules whose forward ends in this stage, by path; parts of them may run in earlier stages, too."""
        part, calls = self._part, self._part.outline.recording.calls
        paths = {call.path for call in calls if part.begin <= call.exit and (call.exit < part.stop or part.stop == END)}
        return {path: part.model.get_submodule(path) for path in sorted(paths)}

    @property
    def holders(self) -> list[nn.Module]:
        """Modules of the model whose own parameters, buffers and kept attributes the stage needs."""
        paths = sorted({*(name.rpartition(".")[0] for name in self._part.held), *(path for path, _ in self._part.kept)})
        return [self._part.model.get_submodule(path) for path in paths]

    @property
    def read_before_stage(self) -> list[Tensor]:
        """Parameters and buffers that code before the stage reads, and that the stage has."""
        return [held_tensor(self._part.model, name) for name in self._part.repeated]

    @property
    def model(self) -> nn.Module:
        """Whole model, of which the stage runs its part."""
        return self._part.model


def holder_at(root: nn.Module, path: Sequence[str]) -> nn.Module:
    """Return the module at `path` below `root`; it is created if it is missing."""
    for part in path:
        below = root._modules.get(part)
        if below is None:
            root._modules[part] = below = nn.Module()
        root = below
    return root
