"""Error ranges of predictions, taken from earlier predictions with the same kind of profile (measured, estimated, …).

The ends of a range are the largest errors in the measurements under docs/measurements; of repeated runs, the median
counts. docs/cost-model.md names the pages for each kind. `tests/unit/core/test_certainty.py` fails if a range differs
from the measurements on these pages. A kind without measurements has no error range.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Final, Literal

from planner.core.cost.width import tensor_parallel_profile
from planner.core.errors import UsageError
from planner.core.values.devices import ACCELERATORS, TORCH_KINDS
from planner.core.values.findings import Finding, finding
from planner.core.values.plan import Plan
from planner.core.values.profile import LayerProfile, Profile
from planner.core.values.sustained import sustained_rate
from planner.core.values.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepErrorRange:
    """Error range of step times: smallest and largest ratio of measured to predicted time."""

    source: str
    """Phrase that says where the values of the profile come from, such as `measured on the CPU`."""
    least: float
    """Smallest ratio of measured to predicted step time."""
    most: float
    """Largest ratio of measured to predicted step time."""


STEP_ERRORS: Final = {
    # One process: time.md; two processes: verify.md and cpu.md.
    "one device": StepErrorRange(source="measured on the CPU, one process", least=0.918, most=1.072),
    "cpu": StepErrorRange(source="measured on the CPU", least=0.910, most=1.105),
    "short": StepErrorRange(source="measured on the CPU, micro-batches shorter than 20 ms", least=0.686, most=1.350),
    # Second run of a plan, predicted with the calibration of the first: verify.md.
    "calibrated": StepErrorRange(source="calibrated by a run", least=0.920, most=1.088),
    # Published layer times and step times: published.md. Runs on one GPU: gpu.md.
    "cuda": StepErrorRange(source="measured on GPUs", least=0.854, most=1.171),
    # Formulas with the rate of another run of the same engine and cluster, and with the peak rate: published.md.
    "rate": StepErrorRange(source="estimated by formula at a given rate", least=0.764, most=1.266),
    "A100": StepErrorRange(
        source="estimated by formula at the rate of published runs on A100", least=0.829, most=1.225
    ),
    "H100": StepErrorRange(
        source="estimated by formula at the rate of published runs on H100", least=0.700, most=1.250
    ),
    # Fewer than three sources say little about the next run, so that this range covers the errors of all kinds of runs.
    "few runs": StepErrorRange(
        source="estimated by formula at the rate of a few published runs", least=0.700, most=1.745
    ),
    "peak": StepErrorRange(source="estimated by formula at the peak rate", least=1.412, most=4.845),
}
"""Error range of the step time for each kind of prediction."""

SHORTEST_US: Final = 20_000.0
"""Threshold between `STEP_ERRORS["short"]` and `["cpu"]`: forward plus backward time of the slowest stage, in us."""

PEAK_RATIOS: Final = {
    "measured": 1 / 0.99,  # on a CPU: the 954 peaks of memory.md
    "cuda": 1.046,  # measured on a GPU: gpu.md
    "compiled": 1 / 0.952,  # single stages: tpu-composition.md
    "estimated": 1 / 0.960,  # published.md, which rounds to whole GB
}
"""Largest ratio of measured to predicted peak, by the origin of the profile's values."""

ALLOCATOR_RATIO: Final = 1.152
"""Largest ratio of reserved to allocated memory of PyTorch's CUDA allocator, from docs/measurements/published.md."""

SLACK_BYTES: Final = 64 * 2**10
"""Absolute tolerance of a peak in bytes, for stages of a few kilobytes."""


_EXCHANGE: Final = ", without more time to exchange tokens of experts"

MemoryFit = Literal["fits", "tight", "does not fit"]
"""Result for memory limits; `tight`: predicted peaks fit, but a limit lies within the error range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certainty:
    """Error ranges of the predicted step time and peaks of a plan."""

    source: str
    """Phrase that says where the values of the profile come from, such as `measured on the CPU`."""
    step_ratio: tuple[float, float] | None = None
    """Smallest and largest ratio of measured to predicted step time in earlier runs; None without earlier runs."""
    sampling: float = 0.0
    """Sampling error of the step time, from the spread of repeated measurements; divided by the step time."""
    round_ratios: tuple[float, float] = (1.0, 1.0)
    """10th and 90th percentile of the times of profiling rounds over all layers, divided by their median."""
    step_us: tuple[float, float] | None = None
    """Range of the step time in microseconds, computed from `step_ratio`, `round_ratios` and `sampling`."""
    peak_ratio: float | None = None
    """Largest ratio of measured to predicted peak in earlier runs; None without earlier runs."""
    allocator_ratio: float = 1.0
    """Largest ratio of reserved to allocated memory of the device's allocator."""
    device_bytes: tuple[int, ...] = ()
    """Upper end of the error range of each device's peak, in bytes; empty if `peak_ratio` is None."""


def certainty_of(plan: Plan, profile: Profile) -> Certainty:
    """Return the error ranges of a plan's predictions. The predictions must have been computed from `profile`."""
    errors, step_us = _step_errors(plan, profile), plan.predicted.step_us
    sampling = _sampling_error(plan, tensor_parallel_profile(profile, plan.cluster))
    if errors is None:
        source, step_ratio, range_us = f"{profile.device.how} for {profile.device.kind}", None, None
    else:
        source, step_ratio = errors.source, (errors.least, errors.most)
        least, most = errors.least * profile.fast_round_ratio, errors.most * profile.slow_round_ratio
        range_us = (step_us * least / (1 + sampling), step_us * most * (1 + sampling))
    if profile.expert_parallel > 1:
        source += _EXCHANGE
    ratio, reserved = _peak_ratios(profile)
    return Certainty(
        source=source,
        step_ratio=step_ratio,
        sampling=sampling,
        round_ratios=(profile.fast_round_ratio, profile.slow_round_ratio),
        step_us=range_us,
        peak_ratio=ratio,
        allocator_ratio=reserved,
        device_bytes=()
        if ratio is None
        else tuple(_most_bytes(n, ratio * reserved) for n in plan.peak_bytes_by_device()),
    )


def memory_fit(plan: Plan, certainty: Certainty | None = None) -> MemoryFit:
    """Return whether the predicted peaks of all devices fit.

    The result is `does not fit` if a peak exceeds its limit, `tight` if only the upper end of a peak's error range
    exceeds it, and `fits` otherwise.
    """
    limits = [chunks[0].memory_bytes for chunks in plan.by_device()]
    if any(need > limit for need, limit in zip(plan.peak_bytes_by_device(), limits, strict=True)):
        return "does not fit"
    return "tight" if certainty is not None and _tight_devices(plan, certainty) else "fits"


def tight_findings(plan: Plan, certainty: Certainty) -> Iterator[Finding]:
    """Yield a finding for each device that exceeds its limit only at the upper end of the error range of its peak."""
    chunks = plan.by_device()
    for device in _tight_devices(plan, certainty):
        most, limit = (
            certainty.device_bytes[device],
            plan.inputs.device_memory_for_limit(chunks[device][0].memory_bytes),
        )
        message = (
            f"device {device} may need {format_bytes(most)}, {format_bytes(most - limit)} over its "
            f"{format_bytes(limit)}, if the prediction is as far off as earlier predictions"
        )
        hint = "solve with `--headroom auto`, which keeps the error range free"
        yield finding("GP103", message, hint=hint, stage=chunks[device][0].index)


def _tight_devices(plan: Plan, certainty: Certainty) -> tuple[int, ...]:
    devices = zip(plan.by_device(), plan.peak_bytes_by_device(), certainty.device_bytes, strict=False)
    return tuple(
        device
        for device, (chunks, need, most) in enumerate(devices)
        if need <= chunks[0].memory_bytes and most > plan.inputs.device_memory_for_limit(chunks[0].memory_bytes)
    )


def _sampling_error(plan: Plan, profile: Profile) -> float:
    size, sizes = plan.micro_batch_size, profile.micro_batch_sizes
    below = max((each for each in sizes if each <= size), default=min(sizes))
    above = min((each for each in sizes if each >= size), default=max(sizes))
    indices = (sizes.index(below), sizes.index(above))
    return max((_stage_error(layers, indices) for layers in _stages(plan, profile)), default=0.0)


def headroom_for(profile: Profile, limits: Sequence[int]) -> float:
    """Return the share of memory to keep free, because measured peaks may be above predicted peaks.

    `limits` has the memory limit of each device, in bytes.

    Raises:
        UsageError: No peak was measured for this kind of profile.
    """
    ratio, reserved = _peak_ratios(profile)
    if ratio is None:
        raise UsageError(
            f"`--headroom auto`: there is no measured peak of a plan whose profile was {profile.device.how} on "
            f"{profile.device.kind}",
            hint="give the share to keep free: `--headroom 5%`",
        )
    # This inverts `_most_bytes`, whose constant term matters most for the smallest limit.
    share = max(1 - (limit - SLACK_BYTES) / (ratio * reserved) / limit if limit else 0.0 for limit in limits)
    return min(ceil(share * 1000 - 1e-9) / 1000, 0.999)


def _step_errors(plan: Plan, profile: Profile) -> StepErrorRange | None:
    how, kind = profile.device.how, profile.device.kind
    if how == "estimated":
        return _formula_errors(profile)
    if how == "compiled" or kind not in TORCH_KINDS:
        return None
    if kind != "cpu":
        return STEP_ERRORS["cuda"]
    if (ratio := plan.inputs.step_ratio) is not None:
        errors = STEP_ERRORS["calibrated"]
        return replace(errors, least=ratio * errors.least, most=ratio * errors.most)
    # Several processes on one machine slow each other down, so that a single process has an error range of its own.
    if plan.num_devices * plan.replicas == 1:
        return STEP_ERRORS["one device"]
    slowest_us = max(stage.forward_us + stage.backward_us for stage in plan.stages)
    return STEP_ERRORS["cpu" if slowest_us >= SHORTEST_US else "short"]


def _formula_errors(profile: Profile) -> StepErrorRange | None:
    settings = profile.model.settings
    if "formula" not in settings:
        return None
    called = [known for known in ACCELERATORS if known.full_name == profile.device.name]
    peaks = {f"{rate / 1e12:g} TFLOP/s" for of in called for rate in (of.half_flops_per_s, of.float32_flops_per_s)}
    for sustained in (sustained_rate(of.name, experts="experts" in settings) for of in called):
        if sustained is not None and settings.get("rate") == f"{sustained.flops_per_s / 1e12:g} TFLOP/s":
            return STEP_ERRORS.get(sustained.errors)
    return STEP_ERRORS["peak" if settings.get("rate") in peaks else "rate"]


def _peak_ratios(profile: Profile) -> tuple[float | None, float]:
    device = profile.device
    unseen = device.how == "measured" and device.kind not in TORCH_KINDS
    basis = "cuda" if device.how == "measured" and device.kind == "cuda" else device.how
    return None if unseen else PEAK_RATIOS[basis], ALLOCATOR_RATIO if device.kind == "cuda" else 1.0


def _most_bytes(need_bytes: int, ratio: float) -> int:
    return ceil(need_bytes * ratio) + SLACK_BYTES


def _stages(plan: Plan, profile: Profile) -> Iterator[tuple[LayerProfile, ...]]:
    end = 0
    for count in plan.balance:
        end += count
        yield profile.layers[end - count : end]


def _stage_error(layers: Sequence[LayerProfile], indices: Sequence[int]) -> float:
    total_us, errors_us = 0.0, defaultdict[str, float](float)
    for n, layer in enumerate(layers):
        time_us = layer.forward_us[indices[-1]] + layer.backward_us[indices[-1]]
        total_us += time_us
        # Costs are interpolated between two sizes; the larger error of the two is used.
        share = max(layer.spread[n] for n in indices) if layer.spread else 0.0
        errors_us[layer.digest or str(n)] += time_us * share
    return sqrt(sum(error * error for error in errors_us.values())) / total_us if total_us else 0.0
