"""Profiles of devices that are not in this machine: memory as in a real run, times by the data sheet."""

from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import planner
from benchmarks.gpu_estimates import MEASURED, estimates_of
from planner.api.options.solving import SolverOptions
from planner.api.solver_request import request_of
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import CostTable, costs_at
from planner.core.cost.memory import stage_memory
from planner.core.cost.stages import stage_memory_table
from planner.core.errors import ModelError, UsageError
from planner.core.values.devices import ACCELERATORS, ASSUMED_RESERVE_BYTES, accelerator, accelerator_with_rates
from planner.core.values.plan import ProfileReference
from planner.core.values.profile import Profile
from planner.core.values.sustained import matmul_flops_per_s, sustained_rate
from planner.files import read_profile
from planner.model.ghosts import ghost_like
from planner.model.load import LoadedModel
from planner.profile.backends.estimated import EstimatedBackend, GhostMeter, RooflineClock
from planner.profile.backends.gpu_kernels import GpuSavedTensorsMode
from planner.profile.profiler import profile_model
from planner.profile.task import ProfilerOptions
from planner.show.terminal.profile import profile_text
from planner.show.terminal.style import Style
from planner.solve import solve
from tests.support.measure import loaded_model, profile_of_model
from tests.support.peak_points import peak_points_with
from tests.zoo.real_models import REAL_MODELS


def estimated(loaded: LoadedModel, *sizes: int, device: str = "h100") -> Profile:
    """Return a profile for this device."""
    return profile_model(loaded, ProfilerOptions(micro_batch_sizes=sizes, device=f"estimate:{device}"))


def blocks() -> nn.Sequential:
    layers: list[nn.Module] = [nn.Embedding(512, 64), nn.Flatten(), nn.Linear(1024, 256)]
    for _ in range(3):
        layers += [nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))]
    return nn.Sequential(*layers, nn.Linear(256, 512))


def words(size: int) -> Tensor:
    return torch.randint(0, 512, (size, 16))


def loss_of_first_word(output: Tensor, _targets: Any) -> Tensor:
    return cross_entropy(output, torch.zeros(len(output), dtype=torch.long))


@cache
def estimated_blocks() -> Profile:
    """Return a profile of `blocks` with AdamW."""
    return estimated(loaded_model(blocks, words, loss_fn=loss_of_first_word, build_optimizer=torch.optim.AdamW), 2)


def split_memory(costs: ChainCosts, first: int, end: int) -> dict[str, float]:
    """Return the memory components of a stage with split backward, by name."""
    stage = stage_memory_table(
        costs, np.array([first]), slice(first, end), micro_batches=3, splits_backward=True
    ).split_backward
    assert stage is not None
    return {field.name: float(np.ravel(getattr(stage, field.name))[-1]) for field in fields(stage)}


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Return AdamW as a CPU runs it, so that the temporaries of its step can be compared."""
    return torch.optim.AdamW(parameters, foreach=False)


# Memory


@pytest.mark.slow
def test_an_estimated_device_has_an_assumed_reserve() -> None:
    """The profile states it, and it is the default of `solve`."""
    profile = estimated_blocks()
    assert profile.device.reserve_bytes == ASSUMED_RESERVE_BYTES == 10**9
    assert "reserve 954 MiB, assumed" in profile_text(profile, Style(width=100, color=False))
    request = request_of(
        profile, ProfileReference(path="", digest=""), SolverOptions(devices=2, batch=2, schedule="gpipe")
    )
    assert {stage.memory.reserve for stage in solve(profile, request).stages} == {10**9}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["blocks", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("GPT-2", "ViT"))]
)
def test_estimated_memory_equals_measured_memory(name: str) -> None:
    """Peaks are within 3 %: they lack only what kernels allocate themselves."""
    if name == "blocks":
        loaded = loaded_model(blocks, words, loss_fn=loss_of_first_word, build_optimizer=adam)
    else:
        known = REAL_MODELS[name]
        loaded = loaded_model(known.build, known.inputs, build_optimizer=adam)
    guess, truth = estimated(loaded, 4), profile_of_model(loaded, sizes=(4,))
    for a, b in zip(guess.layers, truth.layers, strict=True):
        assert (a.name, a.parameter_bytes, a.optimizer_bytes) == (b.name, b.parameter_bytes, b.optimizer_bytes)
        assert a.output_bytes == b.output_bytes
    costs = [costs_at(profile, 4) for profile in (guess, truth)]
    count = len(truth.layers)
    for first, end in ((0, count), (0, count // 2), (count // 2, count)):
        for recompute in ("never", "always"):
            totals = [stage_memory(c, first, end, peak_points_with(3), recompute=recompute).total for c in costs]
            assert totals[0] / totals[1] == pytest.approx(1.0, abs=0.03)
        split = [split_memory(c, first, end) for c in costs]
        assert split[0] == pytest.approx(split[1], rel=0.03)


def kept_bytes(work: Any) -> int:
    """Return the bytes that an operation on a GPU keeps for its backward, with its result."""
    results = []
    with GpuSavedTensorsMode():
        return GhostMeter().measure(lambda: results.append(work())).end_bytes


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_and_dropout_save_the_bytes_of_a_gpu(dtype: torch.dtype, dropout: float) -> None:
    """Attention saves its result, a number per row and the mask; a CPU saves the scores."""
    cpu = torch.device("cpu")
    query, key, value = (
        ghost_like(torch.empty(2, 4, 64, 16, dtype=dtype, device="meta"), cpu).requires_grad_() for _ in range(3)
    )
    positions = ghost_like(torch.empty(1, 4, 64, 64, dtype=dtype, device="meta"), cpu).requires_grad_()
    attention = torch.nn.functional.scaled_dot_product_attention
    result = 2 * 4 * 64 * 16 * dtype.itemsize
    kept = kept_bytes(lambda: attention(query, key, value, attn_mask=positions, dropout_p=dropout))
    assert kept == pytest.approx(result + 2 * 4 * 64 * 4, abs=64)
    dropped = kept_bytes(lambda: torch.nn.functional.dropout(query, 0.1))
    assert dropped == result + 2 * 4 * 64 * 16


def test_ghost_meter_counts_allocated_and_released_bytes() -> None:
    """Views and earlier tensors count nothing."""
    meter = GhostMeter()
    given = ghost_like(torch.empty(100), torch.device("cpu"))
    kept: list[Tensor] = []

    def work() -> None:
        twice = given * 2
        kept.append((twice + 1).view(10, 10))

    usage = meter.measure(work)
    assert (usage.peak_bytes, usage.end_bytes) == (800, 400)
    usage = meter.measure(kept.clear)
    assert (usage.peak_bytes, usage.end_bytes) == (0, -400)


# Time


def test_a_large_product_is_timed_by_its_operations() -> None:
    for dtype, rate in ((torch.float32, 67e12), (torch.bfloat16, 989.5e12)):
        a = ghost_like(torch.empty(8192, 8192, dtype=dtype, device="meta"), torch.device("cpu"))
        clock = RooflineClock(accelerator("h100"))
        taken_us = clock.time_us(lambda a=a: _discard(a @ a))
        assert clock.flops == 2 * 8192**3
        assert taken_us == pytest.approx(2 * 8192**3 / rate * 1e6)


def test_a_sum_is_timed_by_its_bytes() -> None:
    """A view takes no time, and a tiny operation the time of a launch."""
    a = ghost_like(torch.empty(10**8, device="meta"), torch.device("cpu"))
    clock = RooflineClock(accelerator("a100-80gb"))
    assert clock.time_us(lambda: _discard(a + a)) == pytest.approx(3 * 4e8 / 2039e9 * 1e6)
    assert clock.time_us(lambda: _discard(a.view(10, -1).t())) == 0
    assert 0 < clock.time_us(lambda: _discard(a[:1] + 1)) < 10


@pytest.mark.slow
def test_estimated_times_follow_device_and_batch_size() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048))

    loaded = loaded_model(build, 2048)
    old, new = estimated(loaded, 1024, 2048, device="v100"), estimated(loaded, 1024, 2048)
    # The second layer's backward has two products, the first one's, whose input needs no gradient, has one.
    assert new.layers[1].backward_us[1] / new.layers[1].forward_us[1] == pytest.approx(2, rel=0.2)
    assert new.layers[1].backward_input_us[1] == pytest.approx(new.layers[1].backward_weight_us[1], rel=0.1)
    for a, b in zip(old.layers, new.layers, strict=True):
        assert all(x > y for x, y in zip(a.forward_us, b.forward_us, strict=True))
        assert b.forward_us[1] > b.forward_us[0]


@pytest.mark.slow
def test_estimated_backwards_are_split_by_operator() -> None:
    """Both passes add up to the backward. Products of attention, without weights, are in I."""

    def build() -> nn.Module:
        block = nn.TransformerEncoderLayer(2048, 16, 8192, dropout=0.0, batch_first=True, norm_first=True)
        return nn.Sequential(nn.Linear(2048, 2048), block, nn.Conv1d(512, 512, 3, padding=1))

    profile = estimated(loaded_model(build, lambda size: torch.randn(size, 512, 2048)), 2)
    assert not CostTable(profile).is_split_backward_assumed
    for layer in profile.layers:
        both_us = layer.backward_input_us[0] + layer.backward_weight_us[0]
        assert both_us == pytest.approx(layer.backward_us[0], rel=0.01)
    first, block, last = profile.layers
    # Nobody wants a gradient of its input.
    assert first.backward_input_us[0] < 0.2 * first.backward_weight_us[0]
    # As many as the sequence over three widths makes of those with weights.
    attention = 8 * 512 / (24 * 2048)
    assert block.backward_input_us[0] == pytest.approx(block.backward_weight_us[0] * (1 + attention), rel=0.1)
    assert last.backward_input_us[0] == pytest.approx(last.backward_weight_us[0], rel=0.1)


@pytest.mark.slow
def test_an_estimated_profile_names_its_device() -> None:
    profile = estimated_blocks()
    assert (profile.device.how, profile.device.kind) == ("estimated", "cuda")
    assert profile.device.name == "NVIDIA H100 80GB HBM3"
    assert profile.device.memory_bytes == 80 * 10**9


@pytest.mark.slow
def test_an_estimated_gpu_steps_all_parameters_at_once() -> None:
    """As AdamW does by default on a GPU."""
    profile = estimated_blocks()
    assert profile.optimizer_peak == "sum"
    assert all(layer.optimizer_peak_bytes == layer.parameter_bytes for layer in profile.layers)


# What cannot be estimated


def test_an_unknown_device_is_refused_with_similar_names() -> None:
    with pytest.raises(UsageError, match="`h1000`") as refused:
        accelerator_with_rates("h1000")
    assert "h100" in refused.value.hint


def test_a_model_that_branches_on_values_cannot_be_estimated() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, value: Tensor) -> Tensor:
            for block in self.blocks:
                value = block(value)
            return value if bool(value.sum() > 0) else -value

    with pytest.raises(ModelError, match="cannot be estimated") as refused:
        estimated(loaded_model(Gate), 2)
    assert "--device" in refused.value.hint


@pytest.mark.parametrize("name", [known.name for known in ACCELERATORS if known.bytes_per_s])
def test_rates_are_plausible_and_have_a_source(name: str) -> None:
    rates = accelerator(name)
    assert rates.half_flops_per_s >= rates.float32_flops_per_s > 1e12
    assert 1e11 < rates.bytes_per_s < 1e13
    assert rates.source


def large_product_us(chip: str, dtype: torch.dtype) -> float:
    """Return the microseconds of a large product."""
    a = torch.empty(8192, 8192, dtype=dtype, device="meta")
    return EstimatedBackend(accelerator(chip)).clock().time_us(lambda: a @ a)


@pytest.mark.parametrize(
    ("chip", "rate"),
    [
        ("h100", matmul_flops_per_s("h100")),  # measured
        ("a100-80gb", sustained_rate("a100-80gb").flops_per_s),  # of published runs
        ("l40s", accelerator("l40s").half_flops_per_s),  # of the data sheet
    ],
)
def test_products_in_half_precision_run_at_the_best_known_rate(chip: str, rate: float) -> None:
    assert large_product_us(chip, torch.bfloat16) == pytest.approx(1e6 * 2 * 8192**3 / rate)


def test_products_in_float32_run_at_the_rate_of_the_data_sheet() -> None:
    expected_us = 1e6 * 2 * 8192**3 / accelerator("h100").float32_flops_per_s
    assert large_product_us("h100", torch.float32) == pytest.approx(expected_us)


def test_fused_attention_runs_at_the_rate_of_its_result() -> None:
    """The kernel also returns a statistic in float32."""
    query = torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
    clock = EstimatedBackend(accelerator("h100")).clock()
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    time_us = clock.time_us(lambda: attention(query, query, query))
    assert time_us == pytest.approx(1e6 * 4 * 16 * 4096**2 * 128 / matmul_flops_per_s("h100"))


@pytest.mark.nightly
def test_estimates_of_a_llama_are_near_the_times_on_a_gpu() -> None:
    pytest.importorskip("transformers")
    estimate, by_formula = estimates_of("llama-3-70b")
    measured = read_profile(str(MEASURED / "llama-3-70b.yaml"))
    total_us, real_us, formula_us = (
        sum(layer.forward_us[0] + layer.backward_us[0] for layer in of.layers)
        for of in (estimate, measured, by_formula)
    )
    assert total_us == pytest.approx(real_us, rel=0.03)
    assert formula_us > 1.1 * real_us  # its rate also pays for communication


MODEL = """\
import torch
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def example_batch(size):
    return torch.randn(size, 8), torch.randn(size, 4)


def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)
"""


@pytest.mark.slow
def test_an_estimated_gpu_computes_in_mixed_precision_by_default(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    notes: list[str] = []
    options: dict[str, Any] = {"device": "estimate:h100", "batch_sizes": [1], "proof_budget": "0s"}
    path = tmp_path / "model.py"
    assert planner.profile(path, **options, note=notes.append).environment.dtype == "bf16-mixed"
    assert any("precision bf16-mixed" in note for note in notes)
    assert planner.profile(path, **options, dtype="fp32").environment.dtype == "fp32"


def _discard(_value: Any) -> None:
    """Drop the value."""


@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="torch has no grouped products")
@pytest.mark.parametrize(
    ("a", "b"),
    [((12, 8), (3, 8, 4)), ((8, 12), (12, 4)), ((3, 4, 8), (8, 12))],
    ids=["forward", "gradient of the weights", "transposed"],
)
def test_grouped_products_of_experts_count_each_token_once(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    """Twelve tokens on three experts cost the operations of one product with 12 rows."""
    offsets = torch.tensor([4, 8, 12], dtype=torch.int32)
    clock = RooflineClock(accelerator("h100"))
    clock.time_us(lambda: nn.functional.grouped_mm(torch.ones(a), torch.ones(b), offs=offsets))
    assert clock.flops == 2 * 12 * 8 * 4


class Routed(nn.Module):
    """Two experts, each with half of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4096, 4096))

    def forward(self, value: Tensor) -> Tensor:
        offsets = torch.arange(1, 3, dtype=torch.int32, device=value.device) * (len(value) // 2)
        return nn.functional.grouped_mm(value, self.weight, offs=offsets)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="torch has no grouped products")
def test_models_with_grouped_products_run_at_the_rate_of_experts() -> None:
    """In all of their layers, because the rate is that of whole steps."""

    def tokens(size: int) -> Tensor:
        return torch.zeros(size, 4096, dtype=torch.bfloat16)

    def first_us(*others: type[nn.Module]) -> float:
        def build() -> nn.Module:
            return nn.Sequential(nn.Linear(4096, 4096), *(of() for of in others), nn.Linear(4096, 4096)).bfloat16()

        return estimated(loaded_model(build, tokens), 2048).layers[0].forward_us[0]

    dense, routed = matmul_flops_per_s("h100"), sustained_rate("h100", experts=True)
    assert first_us(Routed) / first_us() == pytest.approx(dense / routed.flops_per_s, rel=1e-3)
