"""Pipelines side by side: how many there may be, and what does not go with them."""

from planner.core.errors import UsageError
from planner.core.values.plan import Inputs


def replica_counts(inputs: Inputs) -> list[int]:
    """How many replicas there may be: as many as were asked for, else every number that shares the batch equally."""
    if inputs.replicas:
        return [inputs.replicas]
    return [r for r in range(1, inputs.devices + 1) if inputs.batch % r == 0]


def check_replicas(inputs: Inputs) -> None:
    """Refuses replicas that cannot be.

    Raises:
        UsageError: Devices are unlike or too few, or the batch cannot be shared.
    """
    unlike = len(set(inputs.memory_bytes)) > 1 or len(set(inputs.speeds)) > 1
    if inputs.replicas != 1 and unlike:
        raise UsageError("replicas of a pipeline need devices that are all alike, got unequal caps or speeds")
    if inputs.replicas > inputs.devices:
        raise UsageError(f"{inputs.replicas} replicas need at least as many devices, there are {inputs.devices}")
    if inputs.replicas > 1 and inputs.batch % inputs.replicas:
        raise UsageError(
            f"a batch of {inputs.batch} cannot be shared equally by {inputs.replicas} replicas",
            hint="choose a `--batch` that the replicas divide",
        )
