"""Choose the backend that finds the times and memory of a profile, given the option `--device`."""

from typing import Protocol

import torch

from planner.core.errors import UsageError
from planner.core.extensions import load_extension, registered_names
from planner.core.values.devices import accelerator_with_rates
from planner.core.values.profile import Device
from planner.device.kinds import DEVICE_KINDS
from planner.model.load import LoadedModel
from planner.profile.backends.estimated import EstimatedBackend
from planner.profile.backends.measured import MeasuredBackend
from planner.profile.layers import BackendResult
from planner.profile.task import ProfilingTask

_ESTIMATE = "estimate:"


class Backend(Protocol):
    """Source of the costs of layers on one device."""

    device: torch.device
    """Torch device on which the backend runs layers."""

    def describe(self) -> Device:
        """Return the device to which the costs apply. `Device.how` says if they are measured, compiled or estimated."""

    def measure(self, task: ProfilingTask) -> BackendResult:
        """Return time and memory of every layer at every micro-batch size.

        Raises:
            ModelError: A layer fails when it runs, or cannot be compiled.
            MeasurementError: Memory does not suffice.
        """

    def check(self, loaded: LoadedModel, *, lean: bool) -> None:
        """Raise an error if the backend cannot run a model. `lean` is True if the parameters have no values.

        Raises:
            ModelError: The layers read values of tensors, but the backend runs them without values.
            UsageError: The device does not support the model's precision.
        """


def backend_of(name: str) -> Backend:
    """Return the backend for the device called `name` in the option `--device`.

    Raises:
        UsageError: The name is unknown, or this machine has no such device.
        MissingPackageError: A package that the backend needs is not installed.
    """
    if name.startswith(_ESTIMATE):
        return EstimatedBackend(accelerator_with_rates(name.removeprefix(_ESTIMATE)))
    kind = name.partition(":")[0]
    if kind in registered_names("BACKENDS"):
        backend: Backend = load_extension("BACKENDS", kind)(name)
        return backend
    return MeasuredBackend(_device(name))


def _device(name: str) -> torch.device:
    kind, colon, number = name.partition(":")
    if kind not in DEVICE_KINDS or (colon and not (DEVICE_KINDS[kind].has_own_memory and number.isdecimal())):
        kinds = ", ".join(f"`{known}`" for known in (*DEVICE_KINDS, *registered_names("BACKENDS")))
        hint = f"use one of {kinds}, or without the device itself `estimate:h100` or `tpu:v2`"
        raise UsageError(f"unknown device `{name}`", hint=hint)
    if not DEVICE_KINDS[kind].device_count():
        raise UsageError(
            f"no {DEVICE_KINDS[kind].title} device here for `--device {name}`",
            hint="profile on the machine that has it",
        )
    return torch.device(name)
