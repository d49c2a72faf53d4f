"""A transformer's costs by formula, compared with the closed forms of papers."""

from typing import Any

import pytest

from planner.core.cost.costs import CostTable, costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.values.cluster import Cluster
from planner.core.values.profile import Device, Profile
from planner.profile.formula.costs import DeviceRates, transformer_profile
from planner.profile.formula.layers import ElementBytes, ExecutionSettings
from planner.profile.formula.shapes import gpt_transformer

GPT3 = {"layers": 96, "hidden": 12_288, "heads": 96, "sequence": 2048, "vocabulary": 51_200, "feed_forward": 49_152}
EXECUTION = ("tensor_parallel", "sequence_parallel", "keep_scores")
FP16 = ElementBytes(activation=2, parameter=2, gradient=2, optimizer=12)


def by_formula(widths: ElementBytes = FP16, sizes: tuple[int, ...] = (1,), **shape: Any) -> Profile:
    """Return a profile at one operation per second, so that seconds are operations."""
    execution = {name: shape.pop(name) for name in tuple(shape) if name in EXECUTION}
    return transformer_profile(
        gpt_transformer(**{**GPT3, **shape}),
        ExecutionSettings(**execution, fused=True),
        widths,
        DeviceRates(flops_per_s=1.0, bytes_per_s=2e12),
        device=Device(kind="cuda", how="estimated"),
        dtype="bf16",
        optimizer="adamw",
        micro_batch_sizes=sizes,
        updates_all_at_once=False,
    )


def test_parameters_and_operations_equal_those_of_megatron() -> None:
    """Narayanan et al. 2021, equations 2 and 3: GPT-3's 174.6 billion, and 72 bslh^2 (1 + s/6h + V/12lh) per step."""
    layers, h, s, v = (GPT3[name] for name in ("layers", "hidden", "sequence", "vocabulary"))
    profile = by_formula(tied=True, sizes=(1, 4))
    assert profile.model.parameters == pytest.approx(174.6e9, rel=1e-3)
    assert profile.model.parameters == pytest.approx(
        12 * layers * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * layers * h)), rel=1e-6
    )
    step = 72 * 4 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert sum(layer.forward_us[1] + layer.backward_us[1] for layer in profile.layers) / 1e6 == pytest.approx(step)
    assert sum(layer.forward_flops[1] for layer in profile.layers) == pytest.approx(step / 3)
    # Split as in Qi et al. 2023, table 1: W has no attention.
    _, block, *_, head = profile.layers
    assert block.backward_weight_us[0] / 1e6 == pytest.approx(24 * s * h**2)
    assert block.backward_input_us[0] / 1e6 == pytest.approx(s * h * (24 * h + 8 * s))
    assert head.backward_input_us == head.backward_weight_us == head.forward_us


@pytest.mark.parametrize(
    ("more", "block_bytes", "head_bytes"),
    [
        ({}, 34, 2),
        ({"keep_scores": True}, 34 + 5 * 96 * 2048 / 12_288, 2),
        ({"keep_scores": True, "tensor_parallel": 8}, 10 + (24 + 5 * 96 * 2048 / 12_288) / 8, 2),
        ({"tensor_parallel": 8, "sequence_parallel": True}, 34 / 8, 2 / 8),
    ],
    ids=["fused attention", "scores kept", "tensor parallel", "sequence parallel"],
)
def test_saved_bytes_equal_those_of_korthikanti(more: dict[str, Any], block_bytes: float, head_bytes: float) -> None:
    """Korthikanti et al. 2022, equations 1 to 4 and 6, per element of sbh; the head also saves logits, 4sbV/t."""
    profile, sbh = by_formula(**more, sizes=(2,)), 2048 * 2 * 12_288
    _, block, *_, head = profile.layers
    split = more.get("tensor_parallel", 1)
    assert block.saved_bytes[0] == pytest.approx(block_bytes * sbh)
    assert head.saved_bytes[0] == pytest.approx(head_bytes * sbh + 4 * 2048 * 2 * 51_200 / split)
    if not more:
        assert block.weight_held_bytes[0] == 32 * sbh


def test_tensor_parallelism_splits_all_but_positions_norms_and_late_biases() -> None:
    """As in Megatron-LM."""
    h, words, positions = 12_288, 51_200, 2048
    embedding, block, *_ = by_formula(tensor_parallel=8).layers
    assert embedding.parameter_bytes / 2 == words * h / 8 + positions * h
    parameters = (12 * h**2 + 7 * h) / 8 + 6 * h
    assert block.parameter_bytes / 2 == parameters
    assert block.optimizer_bytes == 6 * block.parameter_bytes
    # 2 + 2 + 12 bytes, of which all but the gradient are written as well.
    assert block.optimizer_us == pytest.approx(parameters * (2 * 2 + 2 + 2 * 12) / 2e12 * 1e6)


def test_formula_profiles_have_split_backward_times_and_memory() -> None:
    """Tied embeddings count once if one device has both layers."""
    small = {"layers": 2, "hidden": 256, "heads": 4, "feed_forward": 1024}
    assert not CostTable(by_formula(**small)).is_split_backward_assumed
    peaks = []
    for tied in (False, True):
        profile = by_formula(**small, tied=tied)
        alone = Partition(schedule="gpipe", micro_batches=2, balance=(4,), recompute=("never",))
        (stage,) = Evaluation(costs_at(profile, 1), alone, Cluster(memory_bytes=(2**50,))).stages
        peaks.append(stage.memory)
    words = 51_200 * 256
    assert peaks[0].parameters - peaks[1].parameters == 2 * words
    assert peaks[0].optimizer - peaks[1].optimizer == pytest.approx(12 * words, rel=1e-6)
