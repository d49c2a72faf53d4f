"""TPUs as JAX devices: the attached TPU, and chips that are not attached."""

from collections.abc import Sequence
from pathlib import Path

import jax
from jax.experimental import topologies

from planner.core.errors import UsageError
from planner.tpu.extra import TOPOLOGIES


def attached_tpu() -> tuple[str, int]:
    """Return the name of the attached TPU, and its memory in bytes.

    Raises:
        UsageError: No TPU is attached.
    """
    try:
        device = jax.devices("tpu")[0]
    except RuntimeError as error:
        raise UsageError(
            "no TPU on this machine for `--device tpu`",
            hint="profile on a machine with a TPU, or compile for a TPU that is not attached: `--device tpu:v2`",
        ) from error
    return device.device_kind, (device.memory_stats() or {}).get("bytes_limit", 0)


def chip_devices(name: str, num: int) -> list[jax.Device]:
    """Return `num` neighboring devices of a TPU such as `v2`, which need not be attached.

    Raises:
        UsageError: No known topology of this TPU has `num` devices.
    """
    if not jax._src.xla_bridge._backends:
        # Prevent JAX from searching for an attached TPU, which takes long.
        jax.config.update("jax_platforms", "cpu")
    shapes, options = TOPOLOGIES[name]
    for shape in shapes:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape}", **options).devices
        if len(devices) >= num:
            return list(devices[:num])
    raise UsageError(f"no topology of TPU {name} with {num} devices is known here")


def target_device(chip: str) -> jax.Device:
    """Return a device of the TPU `chip`, which need not be attached; if `chip` is empty, JAX's first device."""
    return chip_devices(chip, 1)[0] if chip else jax.devices()[0]


def platform_devices(platform: str | None, num: int) -> Sequence[jax.Device]:
    """Return the first `num` devices of a JAX platform; None means JAX's default platform.

    Raises:
        UsageError: The platform has fewer devices.
    """
    if platform == "cpu" or (platform is None and not _may_have_accelerators()):
        # Create one CPU device per stage. JAX reads this setting only once, when it is initialized.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num)
    devices = jax.devices(platform) if platform else jax.devices()
    if len(devices) < num:
        raise UsageError(f"the plan has {num} stages, but JAX finds {len(devices)} devices ({devices[0].device_kind})")
    return list(devices[:num])


def _may_have_accelerators() -> bool:
    """Return True if this machine may have accelerators. This check does not initialize JAX."""
    if jax._src.xla_bridge._backends:
        return bool(jax.default_backend() != "cpu")
    return (
        any(Path("/dev").glob("accel*"))
        or any(Path("/dev").glob("nvidia[0-9]*"))
        or any(Path("/dev/vfio").glob("[0-9]*"))
    )
