"""Workload: tokens and floating-point operations of a training step, and duration and cost of a training run.

The model FLOPs of a sample are the FLOPs of one forward and one backward, without recomputation. A backward needs twice
the FLOPs of the forward, because each of a product's two gradients takes as many operations as the product. The forward
of N parameters takes 2 N operations per token, so that forward and backward take the 6 N of Kaplan et al.,
arXiv:2001.08361. The model FLOPs utilization (MFU) is the model FLOPs divided by the FLOPs that the devices could
compute in the same time at their peak rate (Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B).
"""

from dataclasses import dataclass
from math import ceil
from typing import Final

from planner.core.values.devices import peak_flops_per_s
from planner.core.values.plan import Inputs, TrainingRunEstimate
from planner.core.values.profile import LayerProfile, Profile

_US_PER_HOUR: Final = 3.6e9
_HOURS_PER_DAY: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWork:
    """Tokens and floating-point operations of one sample, and the peak rate of a GPU."""

    tokens: int = 0
    """Tokens of a sample; 0 if they are not known."""
    flops: float = 0.0
    """Model FLOPs of a sample, on one GPU of a tensor-parallel group; 0 if the profile has none."""
    peak_flops_per_s: float = 0.0
    """Peak rate of a GPU in the profile's precision; 0 if it is not known."""

    def utilization(self, samples_per_s: float, devices: int) -> float:
        """Return the model FLOPs utilization (MFU) of `devices` devices; 0 if it is not known."""
        able = devices * self.peak_flops_per_s
        return self.flops * samples_per_s / able if able else 0.0


def workload_of(profile: Profile) -> SampleWork:
    """Return the tokens and FLOPs of a sample, from the costs at the largest profiled micro-batch size."""
    sizes = profile.micro_batch_sizes
    n = sizes.index(max(sizes))
    return SampleWork(
        tokens=_tokens(profile),
        flops=sum(
            passes * layer.forward_flops[n]
            for layer, passes in zip(profile.layers, _flops_per_forward_flop(profile.layers), strict=True)
            if layer.forward_flops
        )
        / sizes[n],
        peak_flops_per_s=peak_flops_per_s(profile.device.name, profile.environment.dtype),
    )


def training_run(
    inputs: Inputs, step_us: float, workload: SampleWork, *, devices: int = 0
) -> TrainingRunEstimate | None:
    """Return the duration and cost of a training run, or of one step if the request gives only a price.

    Args:
        inputs: The request, with the length of the run or a price.
        step_us: Time of a step in microseconds.
        workload: Work of a sample.
        devices: Number of devices to pay for; 0 for all devices of the request.

    Returns:
        The training run. None if the request gives neither a length nor a price, or if the length is in tokens and
        the number of tokens of a sample is not known.
    """
    samples = inputs.samples
    if inputs.tokens and workload.tokens:
        samples = ceil(inputs.tokens / workload.tokens)
    if not samples and (inputs.tokens or not inputs.price):
        return None
    steps = max(1, ceil(samples / inputs.batch))
    gpus = devices or inputs.devices
    hours = steps * step_us / _US_PER_HOUR
    return TrainingRunEstimate(
        gpus=gpus,
        steps=steps,
        days=hours / _HOURS_PER_DAY,
        gpu_hours=gpus * hours,
        cost=gpus * hours * inputs.price if inputs.price else None,
    )


def _tokens(profile: Profile) -> int:
    length = profile.model.settings.get("sequence", 0)
    return length if isinstance(length, int) and length else profile.model.sample_tokens


def _flops_per_forward_flop(layers: tuple[LayerProfile, ...]) -> list[int]:
    if not any(layer.created_gradient_bytes for layer in layers):
        return [3] * len(layers)  # The profile does not say what is trained.
    passes, trained = [], False
    for layer in layers:
        passes.append(3 if layer.created_gradient_bytes else 1 + trained)
        trained = trained or layer.created_gradient_bytes > 0
    return passes
