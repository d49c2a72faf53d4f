"""Tokens, model FLOPs, duration and cost of a training run, recomputed from the profile."""

from dataclasses import replace

import pytest

import planner
from planner.core.cost.workload import training_run, workload_of
from planner.core.errors import UsageError
from planner.core.values.devices import ACCELERATORS, peak_flops_per_s
from planner.core.values.plan import Plan
from planner.core.values.profile import Device, Model, Profile
from tests.support.profiles import inputs_of, profile_of

SHAPE = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 128, "vocabulary": 1000}


def by_formula(**other: object) -> Profile:
    options = {"device": "estimate:a100-80gb", "dtype": "bf16-mixed", "rate": "100TFLOP/s", "batch_sizes": "1,2"}
    return planner.profile(from_formula="transformer", **SHAPE, **{**options, **other})


def test_model_flops_are_three_times_the_forward() -> None:
    """The formulas count a backward as two forwards, so the utilization without a bubble is rate over peak."""
    profile = by_formula()
    forward = sum(layer.forward_flops[-1] for layer in profile.layers) / 2
    workload = workload_of(profile)
    assert workload.flops == pytest.approx(3 * forward)
    assert workload.tokens == 128
    plan = planner.solve(profile, devices=1, batch=8, recompute="never", schedule="gpipe")
    optimizer_us = sum(layer.optimizer_us for layer in profile.layers)
    computing = 1 - optimizer_us / plan.predicted.step_us
    # Attention's backward takes four products for two of the forward: also two forwards.
    assert plan.predicted.flops_utilization == pytest.approx(100 / 312 * computing, rel=1e-3)
    assert plan.predicted.tokens_per_s == pytest.approx(128 * plan.predicted.samples_per_s)


def test_recomputation_lowers_the_utilization() -> None:
    profile = by_formula()
    kept, again = (
        planner.solve(profile, devices=2, batch=8, recompute=r, schedule="gpipe") for r in ("never", "always")
    )
    ratio = kept.predicted.step_us / again.predicted.step_us
    assert again.predicted.flops_utilization == pytest.approx(kept.predicted.flops_utilization * ratio)
    assert ratio < 0.9


@pytest.mark.slow
def test_gpus_of_a_stage_share_its_flops() -> None:
    one, two = (
        planner.solve(
            by_formula(tensor_parallel=t),
            devices=2 * t,
            batch=8,
            recompute="never",
            schedule="gpipe",
            tokens="1M",
            price=2,
        )
        for t in (1, 2)
    )
    assert (one.training.gpus, two.training.gpus) == (2, 4)
    assert two.predicted.flops_utilization == pytest.approx(one.predicted.flops_utilization, rel=0.05)
    assert two.training.gpu_hours == pytest.approx(one.training.gpu_hours, rel=0.05)


def frozen(profile: Profile, *gradients: int) -> Profile:
    layers = [
        replace(layer, gradient_bytes=size, parameter_bytes=8, forward_flops=(10,))
        for layer, size in zip(profile.layers, gradients, strict=True)
    ]
    return replace(profile, layers=tuple(layers))


@pytest.mark.parametrize(
    ("gradients", "forwards"), [((8, 8, 8), 9), ((0, 8, 8), 7), ((0, 8, 0), 6), ((8, 0, 8), 8), ((0, 0, 0), 9)]
)
def test_model_flops_of_frozen_layers(gradients: tuple[int, ...], forwards: int) -> None:
    """Layers before the first trained one have no input gradients either.

    A profile without any gradients counts as trained.
    """
    profile = frozen(profile_of([1.0] * 3, [2.0] * 3), *gradients)
    assert workload_of(profile).flops == 10 * forwards


@pytest.mark.parametrize(
    ("model", "tokens"),
    [
        (Model(settings={"sequence": 512}), 512),
        (Model(sample_tokens=1024), 1024),
        (Model(settings={"sequence": 512}, sample_tokens=1024), 512),
        (Model(settings={"sequence": "long"}), 0),
        (Model(), 0),
    ],
)
def test_tokens_of_a_sample_are_a_setting_or_those_of_the_inputs(model: Model, tokens: int) -> None:
    assert workload_of(replace(profile_of([1.0]), model=model)).tokens == tokens


def solved(**options: object) -> Plan:
    return planner.solve(by_formula(), devices=2, batch=8, schedule="gpipe", **options)


def test_duration_and_cost_of_a_training_run() -> None:
    """A shorter last step counts as a whole one."""
    run = solved(tokens="1M", price="2.50").training
    assert run.steps == -(-(10**6) // (128 * 8)) == 977
    assert run.days == pytest.approx(977 * solved().predicted.step_us / 1e6 / 86400)
    assert run.gpu_hours == pytest.approx(2 * 24 * run.days)
    assert run.cost == pytest.approx(2.5 * run.gpu_hours)
    assert solved(samples=7813).training == replace(run, cost=None)
    step = solved(price=2.5).training
    assert (step.steps, step.gpu_hours) == (1, pytest.approx(run.gpu_hours / 977))
    assert solved().training is None


def test_cost_includes_unused_devices() -> None:
    inputs = replace(inputs_of(8, 4), samples=400, price=3.0)
    run = training_run(inputs, 3.6e9, workload_of(profile_of([1.0])))
    assert (run.steps, run.gpu_hours, run.cost) == (100, 800, 2400)


def test_invalid_training_lengths_and_prices_are_refused() -> None:
    with pytest.raises(UsageError, match="does not state the tokens of a sample") as refused:
        planner.solve(profile_of([1.0] * 2), devices=1, mem="1GB", tokens="1T")
    assert "--samples" in refused.value.hint
    with pytest.raises(UsageError, match="give one of them"):
        solved(tokens="1T", samples="1M")
    for price in ("0", "free", "-1", "inf", "nan"):
        with pytest.raises(UsageError, match="--price"):
            solved(price=price)
    for tokens in ("0", "1X", "0.T", "many"):
        with pytest.raises(UsageError):
            solved(tokens=tokens)


def test_check_recomputes_the_training_run() -> None:
    profile = by_formula()
    plan = solved(tokens="15T", price="2.50")
    verdict = planner.check(plan, profile=profile)
    assert verdict.plan.training == plan.training
    assert (plan.inputs.tokens, plan.inputs.price) == (15 * 10**12, 2.5)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.5e12),
        ("NVIDIA H100 80GB HBM3", "float32", 67e12),
        ("NVIDIA A100-SXM4-40GB", "torch.bfloat16", 312e12),
        ("Tesla V100-SXM2-32GB", "fp16-mixed", 125e12),
        ("NVIDIA H100 PCIe", "bf16", 0.0),
        ("AMD EPYC", "float32", 0.0),
        ("at 190 TFLOP/s", "bf16", 0.0),
        ("", "float32", 0.0),
    ],
)
def test_peak_rates_by_reported_name(name: str, dtype: str, peak: float) -> None:
    """Boards slower than that of the data sheet have no peak rate."""
    assert peak_flops_per_s(name, dtype) == peak


def test_full_names_find_their_own_rate() -> None:
    for known in ACCELERATORS:
        assert peak_flops_per_s(known.full_name, "bf16") == known.half_flops_per_s


def test_profile_without_flops_has_no_utilization() -> None:
    device = Device(kind="cuda", name="NVIDIA H100 80GB HBM3")
    workload = workload_of(replace(profile_of([1.0]), device=device))
    assert (workload.utilization(1.0, 1), workload.peak_flops_per_s) == (0, 67e12)
