"""Choose the model that the equivalence check trains: the user's model, or one with fewer repeated layers."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import count

import torch
from torch import nn

from planner.core.errors import ModelError
from planner.core.values.units import format_bytes
from planner.executor.build.building import build_structure
from planner.executor.equivalence.isolation import ChildError
from planner.executor.run.shapes import ChainShapes, chain_shapes
from planner.model.chain import Chain, shared_parameters
from planner.model.load import LoadedModel
from planner.model.python_state import HOOKS, TENSOR_HOOKS
from planner.model.recording import END, ModuleCall
from planner.model.reference import LayerStart, ReferenceOptions
from planner.model.seeding import example_mini_batch
from planner.model.shortened import repeated_layers, shorten_model, skipped_modules
from planner.model.stage import ModelStage

DigestFunction = Callable[[Chain, LoadedModel], Sequence[str]]
"""Function that returns a digest of the operators of every layer; empty if they are unknown."""

STEPS = 2
"""Number of training steps that are compared for every model."""

LATE_STEPS = 14
"""Number of further steps of a small model, to find code that behaves differently after some calls."""

_FEW_PARAMETERS = 5_000_000
"""Number of parameters up to which a model is small."""

_MICRO_BATCHES = 2

_MANY_PARAMETERS = 20_000_000
"""Number of parameters above which the equivalence check leaves out most repeated layers of a model."""

_MOST_BYTES = 1_600_000_000
"""Upper bound on the bytes of parameters, gradients and optimizer state of all processes that train at a time."""

_LEAN_BYTES = 600_000_000
"""Models with more bytes of parameters are never built with their initial values."""


@dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """Model, cuts and time limit of an equivalence check."""

    loaded: LoadedModel
    budget_s: float
    deadline: float
    """Time on the monotonic clock after which no further comparison begins."""
    cuts: Sequence[int] | None
    """Cuts to compare. Cut i is between layers i - 1 and i. None compares one cut of each class of equivalent cuts."""
    digests: DigestFunction

    @property
    def time_limit_s(self) -> float:
        """Seconds after which a process of the check is ended."""
        return 4 * self.budget_s


@dataclass(frozen=True, kw_only=True)
class EquivalentCuts:
    """Classes of equivalent cuts of a chain. The equivalence check compares the first cut of each class.

    A cut is the index of the layer after it. Two cuts are equivalent if the layers directly before them are equal, and
    the layers directly after them are equal. Equal layers also receive tensors of equal shapes and dtypes.
    """

    classes: tuple[tuple[int, ...], ...]
    """Cuts of each class, in order."""
    keys: tuple[Hashable, ...]
    """Key of each layer, made of its operators and input tensors. Equal layers have equal keys."""

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
    tables = [getattr(part, name) for part in modules for name in HOOKS]
    tables += [getattr(p, name, None) or {} for p in module.parameters() for name in TENSOR_HOOKS]
    return sum(map(len, tables))


@dataclass(frozen=True, kw_only=True)
class CheckedModel:
    """Model that the equivalence check trains: the full model, or one with fewer repeated layers."""

    loaded: LoadedModel
    chain: Chain
    """Chain of the model that is trained."""
    whole: Chain
    """Chain of the full model."""
    cut_classes: EquivalentCuts
    """Classes of the full model's cuts."""
    options: ReferenceOptions
    one_by_one: bool = False
    """True if the reference must end before the ranks begin, because memory does not suffice for all of them."""
    reason: str = ""
    """Reason why the optimizer is not compared; empty if it is compared."""

    @classmethod
    def choose(cls, request: CheckRequest, whole: Chain, micro_batch_size: int, *, lean: bool) -> "CheckedModel":
        """Return the full model, or a shortened one if it is large. If `lean`, the shortened model has random values.

        Args:
            request: Model, cuts and time limit of the check.
            whole: Chain of the full model.
            micro_batch_size: Number of samples in a micro-batch.
            lean: If true and layers are left out, parameters get random values instead of the user's initial values.

        Raises:
            ChildError: The shapes at the boundaries cannot be found.
        """
        loaded = request.loaded
        options = ReferenceOptions(
            seed=0,
            steps=STEPS,
            late_steps=LATE_STEPS if _num_parameters(whole) <= _FEW_PARAMETERS else 0,
            micro_batches=_MICRO_BATCHES,
            micro_batch_size=micro_batch_size,
            starts=layer_starts(whole),
        )
        try:
            inputs = example_mini_batch(loaded, options.micro_batch_size, seed=options.seed, step=0).inputs
            shapes = chain_shapes(whole, inputs, precision=loaded.precision, device=torch.device("cpu"))
        except ModelError as error:
            raise ChildError(error.message, hint=error.hint, is_user_error=True) from error
        subject = cls(
            loaded=loaded,
            chain=whole,
            whole=whole,
            cut_classes=find_equivalent_cuts(whole, shapes, request.digests(whole, loaded)),
            options=options,
        )
        if not is_large_model(whole) or request.cuts is not None:
            return subject
        return subject._shortened(lean=lean)._reduced_to_memory()

    @property
    def can_retry_with_user_values(self) -> bool:
        """True if the check used random values, but the user's initial values fit in memory."""
        return self.options.lean and _bytes_of(self.whole) <= _LEAN_BYTES

    def _shortened(self, *, lean: bool) -> "CheckedModel":
        skipped = skipped_modules(self.whole, repeated_layers(self.cut_classes.keys))
        if not skipped:
            return self
        lean = lean or _bytes_of(self.whole) > _LEAN_BYTES
        loaded = shorten_model(self.loaded, skipped, lean=lean)
        chain = build_structure(loaded)
        options = replace(self.options, skipped=skipped, lean=lean, starts=layer_starts(chain))
        return replace(self, loaded=loaded, chain=chain, options=options)

    def _reduced_to_memory(self) -> "CheckedModel":
        own_bytes = _bytes_of(self.chain)
        # Every rank that shares a parameter has a copy.
        copies_bytes = sum(p.nbytes for layer in self.chain.layers for p in layer.module.parameters())
        most_bytes = max(own_bytes, copies_bytes)
        if 4 * (own_bytes + copies_bytes) <= _MOST_BYTES:
            return self
        if 4 * most_bytes <= _MOST_BYTES:
            return replace(self, one_by_one=True)
        if 2 * own_bytes > _MOST_BYTES:
            wanted = format_bytes(2 * own_bytes)
            raise ChildError(f"parameters and gradients take {wanted} even if repeated layers are left out")
        reason = f"the optimizer was not compared: with its state it takes {format_bytes(4 * most_bytes)}"
        return replace(
            self, one_by_one=True, reason=reason, options=replace(self.options, steps=1, late_steps=0, updates=False)
        )

    @property
    def compared_cuts(self) -> dict[int, int]:
        """Equivalent cut of the trained model (`chain`), for each compared cut of the user's model."""
        places = {end: cut for cut, end in enumerate(self.chain.boundary_names, start=1)}
        kept = {name: index for index, name in enumerate(self.whole.names)}
        shown: dict[int, int] = {}
        for first, *others in self.cut_classes.classes:
            for cut in (first, *others):
                place = places.get(self.whole.boundary_names[cut - 1])
                if place is None or place >= len(self.chain.names):
                    continue
                following = kept.get(self.chain.names[place])
                if following is not None and self.cut_classes.keys[following] == self.cut_classes.keys[cut]:
                    shown[first] = place
                    break
        return shown


def is_large_model(chain: Chain) -> bool:
    """Return True if the equivalence check leaves out most repeated layers, because the model is large."""
    return _num_parameters(chain) > _MANY_PARAMETERS


def _num_parameters(chain: Chain) -> int:
    return sum(p.numel() for p in chain.model.parameters())


def _bytes_of(chain: Chain) -> int:
    return sum(parameter.nbytes for parameter in chain.model.parameters())


def layer_starts(chain: Chain) -> tuple[LayerStart | None, ...]:
    """Return the point in a forward at which each layer starts, for all layers except the first.

    Each point is the start or the end of a module call. It is None if no module call ends at the cut before the layer,
    and none starts after the cut.
    """
    if chain.outline is None:
        seen: list[int] = []
        starts: list[LayerStart | None] = []
        for layer in chain.layers:
            seen.append(id(layer.module))
            starts.append(LayerStart(path=layer.name, call=seen.count(seen[-1]), at_end=False))
        return tuple(starts[1:])
    calls = chain.outline.recording.calls
    return tuple(_call_at(calls, cut) for cut in chain.outline.cuts)


def _call_at(calls: Sequence[ModuleCall], cut: int) -> LayerStart | None:
    """Return the start of a layer: the end of a call just before the cut, else the start of the next call, else None.

    Args:
        calls: Module calls in a recorded forward.
        cut: Index of the first recorded event after the cut.
    """
    for call in calls:
        if call.exit + 1 == cut and call.exit != END:
            number = sum(other.path == call.path and other.exit <= call.exit for other in calls)
            return LayerStart(path=call.path, call=number, at_end=True)
    following = min((call for call in calls if call.enter >= cut), key=lambda call: call.enter, default=None)
    if following is None:
        return None
    number = sum(other.path == following.path and other.enter <= following.enter for other in calls)
    return LayerStart(path=following.path, call=number, at_end=False)
