"""How sure a prediction is: how far runs of predictions of its kind came out from what was predicted.

No bound here is a guess. Each is the largest error of rows that are committed, of several runs of one row that of the
one in the middle: docs/cost-model.md names the pages, kind by kind, and `tests/unit/core/test_certainty.py` reads the
rows and fails where a bound is wider or narrower than they are. What no row tells is left open.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import Final

from planner.core.errors import UsageError
from planner.core.values.devices import TORCH_KINDS
from planner.core.values.plan import Plan
from planner.core.values.profile import LayerProfile, Profile
from planner.core.values.rates import RATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Steps of runs beside what was predicted of them."""

    source: str
    """What the predictions stood on, in words."""
    least: float
    """The smallest step, measured over predicted."""
    most: float


STEPS: Final = {
    # One process, time.md; two processes side by side, verify.md and cpu.md.
    "one device": Seen(source="measured on the CPU, one process", least=0.918, most=1.072),
    "cpu": Seen(source="measured on the CPU", least=0.910, most=1.105),
    "short": Seen(source="measured on the CPU, micro-batches shorter than 20 ms", least=0.686, most=1.222),
    # The same plan again, beside the run that it was calibrated with: verify.md.
    "calibrated": Seen(source="calibrated by a run", least=0.954, most=1.067),
    # From times that others measured, beside the steps that they measured: published.md.
    "cuda": Seen(source="measured on GPUs", least=0.986, most=1.171),
    # Formulas at the rate of another run, and at that of the data sheet: published.md.
    "rate": Seen(source="estimated by formula at a sustained rate", least=0.970, most=1.019),
    "peak": Seen(source="estimated by formula at the peak rate", least=1.479, most=1.835),
}
"""By what a prediction stands on; a kind of which no run was timed has no entry."""

SHORTEST_US: Final = 20_000.0
"""Forward and backward of a micro-batch on the slowest stage: no row of `STEPS["cpu"]` has a shorter one."""

PEAKS: Final = {
    "measured": 1 / 0.99,  # what memory.md promises of 954 peaks, and holds
    "compiled": 1 / 0.952,  # of a stage by itself: tpu-composition.md
    "estimated": 1 / 0.960,  # published.md, whole GB
}
"""The highest peak over what was predicted of it, by where a profile's numbers come from."""

ALLOCATOR: Final = 1.152
"""What PyTorch's allocator had reserved on CUDA over what was allocated, at most: published.md."""

SLACK_BYTES: Final = 64 * 2**10
"""How far a peak may be off whatever its size: of a stage of some kilobytes a number or two are percents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certainty:
    """How far the step and the peaks of a plan may come out from what is predicted."""

    source: str
    """What the prediction stands on, in words."""
    step_ratio: tuple[float, float] | None = None
    """The smallest and the largest step of such runs, measured over predicted; None where none was timed."""
    sampling: float = 0.0
    """How far the repeats of its layers leave the step open: a share of it, in either direction."""
    step_us: tuple[float, float] | None = None
    """From where to where the step may lie by both of these."""
    peak_ratio: float | None = None
    """The highest peak of such runs, measured over predicted; None where none was measured."""
    allocator_ratio: float = 1.0
    """What a device's allocator has reserved over what is allocated, at most."""
    device_bytes: tuple[int, ...] = ()
    """The most that each device of a pipeline may need, in pipeline order; empty where `peak_ratio` is None."""


def certainty_of(plan: Plan, profile: Profile) -> Certainty:
    """How sure the figures of a plan are.

    Args:
        plan: As predicted now.
        profile: Its profile.
    """
    seen, sampling, step_us = _seen(plan, profile), sampling_error(plan, profile), plan.predicted.step_us
    if seen is None:
        source, step_ratio, range_us = f"{profile.device.how} for {profile.device.kind}", None, None
    else:
        source, step_ratio = seen.source, (seen.least, seen.most)
        range_us = (step_us * seen.least / (1 + sampling), step_us * seen.most * (1 + sampling))
    ratio, reserved = _peak_ratios(profile)
    return Certainty(
        source=source,
        step_ratio=step_ratio,
        sampling=sampling,
        step_us=range_us,
        peak_ratio=ratio,
        allocator_ratio=reserved,
        device_bytes=() if ratio is None else tuple(_most_bytes(n, ratio * reserved) for n in plan.device_bytes()),
    )


def sampling_error(plan: Plan, profile: Profile) -> float:
    """How far the repeats of the layers leave the step open, as a share of it.

    A step is a largest of sums of the stages' times, so it is off by no larger share than the stage that is off most;
    links are taken to be exact. Layers that were measured apart err independently of each other. Those of one
    digest, which were measured once for all, err together.
    """
    size, sizes = plan.micro_batch_size, profile.micro_batch_sizes
    below = max((each for each in sizes if each <= size), default=min(sizes))
    above = min((each for each in sizes if each >= size), default=max(sizes))
    places = (sizes.index(below), sizes.index(above))
    return max((_stage_error(layers, places) for layers in _stages(plan, profile)), default=0.0)


def headroom_for(profile: Profile, caps: Sequence[int]) -> float:
    """The share of caps to keep free so that the highest peaks seen with such a profile fit, rounded up to 0.1 %.

    Args:
        profile: What is planned from.
        caps: In bytes, of each device.

    Raises:
        UsageError: No peak has been measured beside one that was predicted so.
    """
    ratio, reserved = _peak_ratios(profile)
    if ratio is None:
        raise UsageError(
            f"`--headroom auto`: no peak has been measured beside one predicted from a profile that was "
            f"{profile.device.how} on {profile.device.kind}",
            hint="say how much is to stay free: `--headroom 5%`",
        )
    # `_most_bytes` the other way round; what it adds weighs most where there is least.
    share = max(1 - (cap - SLACK_BYTES) / (ratio * reserved) / cap if cap else 0.0 for cap in caps)
    return min(ceil(share * 1000 - 1e-9) / 1000, 0.999)


def _seen(plan: Plan, profile: Profile) -> Seen | None:
    """Runs of predictions of the plan's kind."""
    how, kind = profile.device.how, profile.device.kind
    if how == "estimated":
        return _seen_of_formula(profile)
    if how == "compiled" or kind not in TORCH_KINDS:
        return None
    if kind != "cpu":
        return STEPS["cuda"]
    if (ratio := plan.inputs.step_ratio) is not None:
        again = STEPS["calibrated"]
        return replace(again, least=ratio * again.least, most=ratio * again.most)
    # Processes side by side slow each other; one by itself does not.
    if plan.num_devices * plan.replicas == 1:
        return STEPS["one device"]
    slowest_us = max(stage.forward_us + stage.backward_us for stage in plan.stages)
    return STEPS["cpu" if slowest_us >= SHORTEST_US else "short"]


def _seen_of_formula(profile: Profile) -> Seen | None:
    settings = profile.model.settings
    if "formula" not in settings:
        return None
    sheets = [rates for rates in RATES.values() if rates.full_name == profile.device.name]
    peaks = {f"{rate / 1e12:g} TFLOP/s" for of in sheets for rate in (of.half_flops_per_s, of.float32_flops_per_s)}
    return STEPS["peak" if settings.get("rate") in peaks else "rate"]


def _peak_ratios(profile: Profile) -> tuple[float | None, float]:
    """Allocated over predicted, and reserved over allocated."""
    device = profile.device
    unseen = device.how == "measured" and device.kind not in TORCH_KINDS
    return None if unseen else PEAKS[device.how], ALLOCATOR if device.kind == "cuda" else 1.0


def _most_bytes(need_bytes: int, ratio: float) -> int:
    return ceil(need_bytes * ratio) + SLACK_BYTES


def _stages(plan: Plan, profile: Profile) -> Iterator[tuple[LayerProfile, ...]]:
    end = 0
    for count in plan.balance:
        end += count
        yield profile.layers[end - count : end]


def _stage_error(layers: Sequence[LayerProfile], places: Sequence[int]) -> float:
    total_us, errors_us = 0.0, defaultdict[str, float](float)
    for n, layer in enumerate(layers):
        time_us = layer.forward_us[places[-1]] + layer.backward_us[places[-1]]
        total_us += time_us
        # The larger error of both sizes that the costs are interpolated between.
        share = max(layer.spread[place] for place in places) if layer.spread else 0.0
        errors_us[layer.digest or str(n)] += time_us * share
    return sqrt(sum(error * error for error in errors_us.values())) / total_us if total_us else 0.0
