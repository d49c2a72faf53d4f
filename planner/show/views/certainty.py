"""Figures of a plan with their error ranges as texts, without uncertain digits."""

from collections.abc import Callable
from math import ceil, floor, log10

from planner.core.judge.certainty import Certainty, memory_fit
from planner.core.values.plan import Plan
from planner.core.values.units import decimals_for_three_digits, format_bytes, format_us, unit_of_bytes, unit_of_us
from planner.show.views.memory import device_memory, fullest_device
from planner.show.views.numbers import percent, rate_text


def step_words(plan: Plan, certainty: Certainty | None) -> str:
    """Return the step time with its range, such as `530 ms (500 to 590)`.

    If no similar run was measured, the text is `about 530 ms`. If the range excludes the prediction, the range comes
    first: `570 to 710 ms (390 predicted)`.
    """
    step_us = plan.predicted.step_us
    if certainty is None or not step_us:
        return format_us(step_us)
    unit_us, unit = unit_of_us(step_us)
    if certainty.step_us is None:
        return f"about {_ending(step_us / unit_us, _digits_end(step_us / unit_us, 2))} {unit}"
    step, low, high = (time_us / unit_us for time_us in (step_us, *certainty.step_us))
    # If the range is wider than the step time, one digit of the step time is kept.
    end = max(_digits_end(step, 1), min(decimals_for_three_digits(step), num_certain_decimals(low, high)))
    return _with_range(step, (low, high), end, f" {unit}")


def rate_words(plan: Plan, certainty: Certainty | None) -> str:
    """Return samples per second with their range, as `18.6 (15.4 to 19.0)`."""
    predicted = plan.predicted
    if certainty is None or not predicted.step_us:
        return rate_text(predicted.samples_per_s)
    per_s = predicted.samples_per_s
    if certainty.step_us is None:
        return _ending(per_s, min(1, _digits_end(per_s, 2)))
    high, low = (per_s * predicted.step_us / time_us for time_us in certainty.step_us)
    end = max(_digits_end(per_s, 1), min(1 if per_s < 1000 else 0, num_certain_decimals(low, high)))
    return _with_range(per_s, (low, high), end, "")


def _with_range(value: float, ends: tuple[float, float], end: int, unit: str) -> str:
    words = f"{_ending(ends[0], end, floor)} to {_ending(ends[1], end, ceil)}"
    # A prediction is outside its range if earlier ones were all too low or too high. The value alone would mislead.
    # Rounded numbers are compared, because the reader sees only these.
    is_outside = not _steps(ends[0], end, floor) <= _steps(value, end) <= _steps(ends[1], end, ceil)
    return (
        f"{words}{unit} ({_ending(value, end)} predicted)" if is_outside else f"{_ending(value, end)}{unit} ({words})"
    )


def fit_words(plan: Plan, certainty: Certainty | None) -> str:
    """Return the `memory_fit` of a plan in words.

    If the peaks have no error range, because no similar plan was measured, `fits` becomes `fits as predicted`.
    """
    fit = memory_fit(plan, certainty)
    unknown = certainty is not None and not certainty.device_bytes
    return "fits as predicted" if unknown and fit == "fits" else fit


def amount_words(value: float, ratios: tuple[float, float] | None, unit: str = "") -> str:
    """Return an amount with at most three digits and its range, as `25.3 days (24 to 27)`.

    Args:
        value: The amount, at least 0.
        ratios: Smallest and largest ratio of the true amount to `value`; None if they are not known.
        unit: Name of the unit.
    """
    end, of = _digits_end(value, 3), f" {unit}" if unit else ""
    if ratios is None:
        return f"{_ending(value, end)}{of}"
    low, high = (value * ratio for ratio in ratios)
    end = max(_digits_end(value, 1), min(end, num_certain_decimals(low, high)))
    return f"{_ending(value, end)}{of} ({_ending(low, end, floor)} to {_ending(high, end, ceil)})"


def peak_words(plan: Plan, certainty: Certainty | None) -> str:
    """Return the peak memory of the fullest device with an upper bound, as `12.4 GiB (at most 13.0)`."""
    needs = device_memory(plan.by_device())
    nearest = fullest_device(needs)
    size_bytes = nearest.total_bytes
    if certainty is None or not certainty.device_bytes:
        return format_bytes(size_bytes)
    unit_bytes, unit = unit_of_bytes(size_bytes)
    size, most = size_bytes / unit_bytes, certainty.device_bytes[needs.index(nearest)] / unit_bytes
    end = 0 if unit == "B" else min(decimals_for_three_digits(size), num_certain_decimals(size, most))
    limit = plan.inputs.device_memory_for_limit(nearest.limit_bytes) / unit_bytes
    if most <= limit < ceil(round(most * 10.0**end, 6)) / 10.0**end:
        end += 1  # a bound that is rounded up above the limit would contradict the verdict
    return f"{_ending(size, end)} {unit} (at most {_ending(most, end, ceil)})"


def accuracy_words(certainty: Certainty) -> str:
    """Return a line about the errors of earlier predictions, from which the error ranges come."""
    words = [f"accuracy: {certainty.source}"]
    if certainty.step_ratio is None:
        words.append("no similar step was measured")
    else:
        least, most = (_signed(ratio) for ratio in certainty.step_ratio)
        words.append(f"earlier step predictions were off by {least} to {most}")
    if certainty.sampling:
        words.append(f"layer times are known to ±{percent(certainty.sampling)}")
    if varied := speed_words(*certainty.round_ratios):
        words.append(varied)
    if certainty.peak_ratio is None:
        words.append("no similar peak was measured")
    else:
        words.append(f"peaks were off by at most {_signed(certainty.peak_ratio)}")
    if certainty.peak_ratio is not None and certainty.allocator_ratio > 1:
        words.append(f"PyTorch reserves up to {percent(certainty.allocator_ratio - 1)} more")
    return "; ".join(words)


def speed_words(fast_ratio: float, slow_ratio: float) -> str:
    """Return a phrase about a device whose speed varied by more than 10 % during `profile`, else an empty string.

    The arguments are `Profile.fast_round_ratio` and `Profile.slow_round_ratio`.
    """
    if max(1 / fast_ratio, slow_ratio) <= _STEADY_RATIO:
        return ""
    return f"the device's speed varied: rounds over all layers took {_signed(fast_ratio)} to {_signed(slow_ratio)}"


_STEADY_RATIO = 1.1
"""Largest ratio of times for which `speed_words` returns an empty string."""


def num_certain_decimals(low: float, high: float) -> int:
    """Return the number of decimals to print of a value between `low` and `high`; -1 means tens, -2 hundreds."""
    # Rule of the Particle Data Group (Review of Particle Physics, Introduction, 5.3): half of the range has two
    # significant digits if its first three digits are at most 354, otherwise one.
    half = (high - low) / 2
    if half <= 0:
        return _MOST_DIGITS
    power = floor(log10(half))
    return min(_MOST_DIGITS, int(half < 3.545 * 10.0**power) - power)


_MOST_DIGITS = 9


def _digits_end(value: float, digits: int) -> int:
    return digits - 1 - floor(log10(value)) if value > 0 else 0


def _ending(value: float, end: int, whole: Callable[[float], int] = round) -> str:
    return f"{_steps(value, end, whole) / 10.0**end:,.{max(0, end)}f}"


def _steps(value: float, end: int, whole: Callable[[float], int] = round) -> int:
    # Floating-point errors are removed first, so that `floor` and `ceil` keep numbers that have `end` decimals.
    return whole(round(value * 10.0**end, 6))


def _signed(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"
