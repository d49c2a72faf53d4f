"""Classes of equivalent cuts. The equivalence check compares the first cut of each class.

Two cuts are equivalent if their previous layers are equal, their next layers are equal, and these layers receive
tensors of equal shapes and dtypes.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count

from torch import Tensor, nn

from planner.executor.run.shapes import ChainShapes
from planner.model.chain import Chain, shared_parameters
from planner.model.stage import ModelStage


@dataclass(frozen=True, kw_only=True)
class EquivalentCuts:
    """Classes of equivalent cuts of a chain. A cut is the index of the layer after it."""

    classes: tuple[tuple[int, ...], ...]
    """Cuts of each class, in order."""
    keys: tuple[Hashable, ...]
    """Key of each layer, made of its operators and input tensors. Equal layers have equal keys."""

    @property
    def representatives(self) -> tuple[int, ...]:
        """First cut of every class."""
        return tuple(alike[0] for alike in self.classes)

    def equivalent_cuts(self, cut: int) -> tuple[int, ...]:
        """Return all cuts that are equivalent to `cut`, including `cut` itself."""
        return next((alike for alike in self.classes if cut in alike), (cut,))


def find_equivalent_cuts(chain: Chain, shapes: ChainShapes, digests: Sequence[str]) -> EquivalentCuts:
    """Return the classes of equivalent cuts of a chain.

    Args:
        chain: Chain of layers.
        shapes: Tensors at the boundaries of the chain.
        digests: Digest of the operators of each layer. If it is empty, no two cuts count as equivalent.
    """
    crossing = [
        tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in boundary.tensors) for boundary in shapes.boundaries
    ]
    keys = tuple(zip(_layer_keys(chain, digests), crossing, strict=False))
    classes: dict[Hashable, list[int]] = {}
    for cut in range(1, len(chain.layers)):
        classes.setdefault((keys[cut - 1], keys[cut]), []).append(cut)
    return EquivalentCuts(classes=tuple(map(tuple, classes.values())), keys=keys)


def _layer_keys(chain: Chain, digests: Sequence[str]) -> list[Hashable]:
    shared = {name for owners in shared_parameters(chain.layers) for _, name in owners}
    distinct = count()
    return [
        (
            digests[index] if digests else next(distinct),
            _num_hooks(layer.module),
            tuple(name in shared for name in layer.parameters_by_name()),
        )
        for index, layer in enumerate(chain.layers)
    ]


def _num_hooks(module: nn.Module) -> int:
    modules = list(module.finished_modules.values()) if isinstance(module, ModelStage) else list(module.modules())
    tables = [
        table
        for part in modules
        for table in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
    ]
    return sum(map(len, tables)) + sum(_hooks_of(parameter) for parameter in module.parameters())


def _hooks_of(tensor: Tensor) -> int:
    return len(tensor._backward_hooks or ()) + len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())
