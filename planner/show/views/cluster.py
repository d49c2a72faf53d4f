"""Figures of a training run as texts: tokens per second, utilization, duration and cost."""

from dataclasses import replace
from typing import Final

from planner.core.cost.workload import SampleWork, training_run
from planner.core.judge.certainty import Certainty
from planner.core.values.plan import Inputs, Plan, TrainingRunEstimate
from planner.core.values.units import format_count, pluralize
from planner.show.views.certainty import amount_words
from planner.show.views.numbers import percent

_USUAL_TOKENS: Final = 10**12
"""Tokens of the training run that is shown if the request gives no length."""


def throughput_words(plan: Plan, certainty: Certainty | None) -> list[str]:
    """Return tokens per second and model FLOPs utilization as texts, if they are known."""
    predicted = plan.predicted
    words = []
    if predicted.tokens_per_s:
        words.append(f"{tokens_per_second_text(plan, certainty)} tokens/s")
    if predicted.flops_utilization:
        words.append(f"model FLOPs utilization {percent(predicted.flops_utilization)}")
    return words


def tokens_per_second_text(plan: Plan, certainty: Certainty | None) -> str:
    """Return the number of tokens per second with its error range."""
    ratios = measured_to_predicted_ratios(plan, certainty)
    return amount_words(plan.predicted.tokens_per_s, None if ratios is None else (1 / ratios[1], 1 / ratios[0]))


def training_words(plan: Plan, certainty: Certainty | None) -> list[str]:
    """Return duration, GPU-hours and cost of the plan's training run as texts; an empty list if they are unknown."""
    shown = shown_run(plan)
    return run_words(*shown, measured_to_predicted_ratios(plan, certainty)) if shown is not None else []


def shown_run(plan: Plan) -> tuple[TrainingRunEstimate, Inputs] | None:
    """Return the training run to show, and the inputs of the plan. The inputs contain the length of this run.

    If a run was requested, it is returned with the unchanged inputs. Otherwise, the result is a run of 1T tokens, and
    the number of tokens in the returned inputs is set to 1T. For such a run, the number of tokens per sample and the
    peak rate of the GPUs must be known. If one of them is unknown, the result is None.
    """
    inputs, predicted = plan.inputs, plan.predicted
    if plan.training is not None:
        return plan.training, inputs
    if not predicted.tokens_per_s or not predicted.flops_utilization:
        return None
    tokens = SampleWork(tokens=round(predicted.tokens_per_s / predicted.samples_per_s))
    inputs = replace(inputs, tokens=_USUAL_TOKENS)
    run = training_run(inputs, predicted.step_us, tokens)
    return None if run is None else (run, inputs)


def run_words(run: TrainingRunEstimate, inputs: Inputs, ratios: tuple[float, float] | None = None) -> list[str]:
    """Return length and duration of a training run, its GPU-hours, and its cost if the price is known.

    Args:
        run: The training run.
        inputs: Inputs of the plan, with the length of the run and the price.
        ratios: Smallest and largest ratio of measured to predicted times; None if they are not known.
    """
    words = [f"{training_length_words(inputs)} in {days_words(run, ratios)}", hours_words(run, ratios)]
    if run.cost is not None:
        words.append(f"cost {amount_words(run.cost, ratios)} at {inputs.price:g} per GPU-hour")
    return words


def training_length_words(inputs: Inputs) -> str:
    """Return the length of the training run, such as `1T tokens`; `1 step` if the request has no length."""
    if inputs.tokens:
        return f"{format_count(inputs.tokens)} tokens"
    return f"{format_count(inputs.samples)} samples" if inputs.samples else "1 step"


def hours_words(run: TrainingRunEstimate, ratios: tuple[float, float] | None) -> str:
    """Return the GPU-hours of a training run with their error range, and its number of GPUs."""
    return f"{amount_words(run.gpu_hours, ratios, 'GPU-hours')} on {pluralize(run.gpus, 'GPU')}"


def days_words(run: TrainingRunEstimate, ratios: tuple[float, float] | None) -> str:
    """Return a training run's duration with its error range, in days, hours or seconds."""
    units = ((1.0, "days"), (24.0, "hours"), (86_400.0, "s"))
    factor, unit = next(of for of in units if run.days * of[0] >= 2 or of is units[-1])
    return amount_words(factor * run.days, ratios, unit)


def measured_to_predicted_ratios(plan: Plan, certainty: Certainty | None) -> tuple[float, float] | None:
    """Return the smallest and largest ratio of measured to predicted step times; None if they are unknown."""
    step_us = plan.predicted.step_us
    if certainty is None or certainty.step_us is None or not step_us:
        return None
    low, high = (time_us / step_us for time_us in certainty.step_us)
    return low, high
