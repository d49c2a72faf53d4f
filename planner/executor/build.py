"""The layers of one stage with their initial parameters, equal to those of `torch.manual_seed(S); build_model()`."""

from collections.abc import Sequence

import torch

from planner.core.errors import ModelError
from planner.model.chain import Chain, Layer, chain_of
from planner.model.load import LoadedModel

__all__ = ["build_layers", "build_structure"]


def build_structure(loaded: LoadedModel) -> Chain:
    """The whole chain on the meta device: names and shapes, no memory.

    Raises:
        ModelError: The model cannot be built there.
    """
    try:
        with torch.device("meta"):
            model = loaded.build()
    except NotImplementedError as error:
        raise ModelError(f"the model cannot be built on the meta device: {error}") from error
    return chain_of(model.to("meta"))


def build_layers(loaded: LoadedModel, names: Sequence[str], *, seed: int, device: torch.device) -> tuple[Layer, ...]:
    """The layers called `names` on `device`; the others are gone when this returns.

    Raises:
        ModelError: The model has no such layer.
    """
    torch.manual_seed(seed)
    chain = chain_of(loaded.build())
    by_name = {layer.name: layer for layer in chain.layers}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ModelError(f'the model has no layer "{missing[0]}"', hint="profile, solve and emit again")
    return tuple(Layer(name, by_name[name].module.to(device)) for name in names)
