"""Find the chain of a model, and its differences from the profiled model."""

from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn

from planner.core.values.profile import Profile
from planner.core.values.units import format_bytes
from planner.model.chain import Chain, chain_digest
from planner.model.lean import build_lean, move_buffers
from planner.model.load import LoadedModel
from planner.model.precision import convert_if_needed
from planner.model.refusals import TooFewSamplesError
from planner.model.seeding import seeded_draws
from planner.model.shared_memory import check_hooks, num_hooks
from planner.model.stage import ModelStage
from planner.profile.units import trace_layers


@dataclass(frozen=True)
class ModelChange:
    """Difference between a model and its profile. `layer` is empty for a difference of the whole model."""

    layer: str
    message: str


def find_chain(loaded: LoadedModel, device: torch.device) -> tuple[Chain, bool]:
    """Return the chain of a model, and True if its parameters are on the meta device, without values.

    Raises:
        ModelError: The model cannot be built, cut, or run on its example batch.
    """
    with suppress(Exception):  # a model that needs values is built normally below, which raises other errors again
        chain = _checked_chain(loaded, build_lean(loaded.build))
        if all(parameter.is_meta for parameter in chain.model.parameters()):
            try:
                trace_layers(chain, loaded, 1, device, ghosts=True)
            except TooFewSamplesError:
                trace_layers(chain, loaded, 2, device, ghosts=True)
            move_buffers(chain.model, device)
            return chain, True
    with seeded_draws(0):  # the seed of `build_structure`: random initial values may decide shapes
        model = loaded.build()
    return _checked_chain(loaded, model, device), False


def _checked_chain(loaded: LoadedModel, model: nn.Module, device: torch.device | None = None) -> Chain:
    # Hooked parameters are collected by name before the conversion, because a converted copy has no hooks.
    hooked = {name: p for name, p in model.named_parameters(remove_duplicate=False) if num_hooks(p)}
    ready = convert_if_needed(model, loaded.precision)
    chain = loaded.chain(ready if device is None else ready.to(device))
    check_hooks(hooked, chain.layers)
    for layer in chain.layers:
        if isinstance(layer.module, ModelStage):
            layer.module.keep_state()
    return chain


def model_changes(loaded: LoadedModel, profile: Profile) -> tuple[ModelChange, ...]:
    """Return the differences between a model and its profile, found on the CPU.

    Operators are compared if the layers have changed, or if the profile was made on a CPU with the same version of
    torch. Otherwise names, classes, shapes, data types and settings are compared.

    Raises:
        ModelError: The model cannot be built, cut, or run on its example batch.
    """
    chain, lean = find_chain(loaded, torch.device("cpu"))
    is_same = chain_digest(chain, loaded.settings, loaded.precision) == profile.model.digest
    # Operators depend on the device and on torch's version.
    if is_same and (profile.device.kind != "cpu" or profile.environment.torch != str(torch.__version__)):
        return ()
    before = {layer.name: layer for layer in profile.layers}
    changes = [ModelChange(name, "was profiled, but is missing now") for name in before if name not in chain.names]
    changes += [ModelChange(name, "is new") for name in chain.names if name not in before]
    units, _ = trace_layers(chain, loaded, profile.micro_batch_sizes[0], torch.device("cpu"), ghosts=lean)
    for layer, unit in zip(chain.layers, units, strict=True):
        profiled = before.get(layer.name)
        if profiled is None:
            continue
        if (now_bytes := unit.parameter_bytes) != profiled.parameter_bytes:
            message = (
                f"has {format_bytes(now_bytes)} of parameters, {format_bytes(profiled.parameter_bytes)} when profiled"
            )
            changes.append(ModelChange(layer.name, message))
        elif profiled.digest and unit.digest != profiled.digest:
            changes.append(ModelChange(layer.name, "computes something else than when it was profiled"))
    if is_same:
        # Digests of layers that draw indices differ in each trace.
        again, _ = trace_layers(chain, loaded, profile.micro_batch_sizes[0], torch.device("cpu"), ghosts=lean)
        varying = {a.name for a, b in zip(units, again, strict=True) if a.digest != b.digest}
        return tuple(change for change in changes if change.layer not in varying)
    return tuple(changes) or (ModelChange("", "the same layers with the same parameters, but another structure"),)
