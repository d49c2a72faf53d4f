"""Converted models, and models under autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.values.precision import PRECISIONS, Precision, precision_option_of
from planner.model import autocast
from planner.model.autocast import caching_only_with_graph, forward_context, weight_cast_cache
from planner.model.load import Batch
from planner.model.operators import OperatorWatch
from planner.model.precision import convert_if_needed, convert_in_place, in_precision
from tests.support.measure import loaded_model, profile_of_model

CPU = torch.device("cpu")


def tied_layers() -> nn.Sequential:
    """Return two layers with the same weight, and buffers of several dtypes."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    model.register_buffer("rotation", torch.ones(3, dtype=torch.complex64))
    return model


def test_precision_of_dtype_names() -> None:
    """`environment.dtype` of a profile without a requested precision gives none."""
    assert [precision_option_of(name) for name in PRECISIONS] == list(PRECISIONS)
    assert precision_option_of("float32") == precision_option_of("bfloat16") == precision_option_of("") == ""


def test_conversion_changes_floating_point_tensors_only() -> None:
    """Integers, complex numbers and ties stay."""
    model = tied_layers()
    assert convert_if_needed(model, "bf16") is not model
    assert convert_if_needed(model, "fp32") is model
    assert convert_if_needed(model, "bf16-mixed") is model
    convert_in_place(model, "bf16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model[2].weight is model[0].weight
    kinds = {name: buffer.dtype for name, buffer in model.named_buffers()}
    assert kinds["rotation"] == torch.complex64
    assert kinds["1.running_mean"] == torch.bfloat16
    assert kinds["1.num_batches_tracked"] == torch.int64


@pytest.mark.parametrize("precision", PRECISIONS)
def test_loss_is_float32_in_every_precision(precision: Precision) -> None:
    """Inputs are converted, targets are not."""
    loaded = in_precision(loaded_model(tied_layers, 64), precision)
    batch = loaded.example_batch(4)
    model = convert_in_place(loaded.build(), precision)
    assert batch.inputs.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    with forward_context(precision, CPU):
        loss = loaded.loss_fn(model(batch.inputs), batch.targets)
    assert loss.dtype == torch.float32
    loss.backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {next(model.parameters()).dtype}


def test_cast_weights_are_cached_across_micro_batches() -> None:
    layer, value = nn.Linear(8, 8), torch.randn(2, 8)
    with weight_cast_cache("bf16-mixed", CPU):
        assert not torch.is_autocast_enabled("cpu")
        results = []
        for _ in range(2):
            with forward_context("bf16-mixed", CPU):
                results.append(layer(value))
        first, second = (result.grad_fn.next_functions[0] for result in results)  # the bias's copy
        assert first == second
        with torch.no_grad(), forward_context("bf16-mixed", CPU):
            layer(value)
        sum(result.float().sum() for result in results).backward()
    assert layer.weight.grad is not None


TORCH_CACHES = pytest.mark.parametrize(
    "torch_caches", [autocast._copies_have_graphs, lambda: False], ids=["this torch", "no copies with graphs"]
)


@TORCH_CACHES
def test_a_forward_without_gradients_caches_no_cast_without_a_graph(monkeypatch, torch_caches):
    """A recomputed layer then gets its weight gradients."""
    monkeypatch.setattr(autocast, "_copies_have_graphs", torch_caches)
    layer, value = nn.Linear(8, 8), torch.randn(2, 8)
    with weight_cast_cache("bf16-mixed", CPU):
        with torch.no_grad(), forward_context("bf16-mixed", CPU), caching_only_with_graph():
            assert torch.is_autocast_cache_enabled() is torch_caches()
            layer(value)
        with forward_context("bf16-mixed", CPU), caching_only_with_graph():
            assert torch.is_autocast_cache_enabled()
            layer(value).float().sum().backward()
    assert layer.weight.grad is not None


class RecomputingFunction(torch.autograd.Function):
    """Recomputes a layer in its backward, as libraries did before torch had checkpoints."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, value: Tensor, *_parameters: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(value)
        return layer(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            result = ctx.layer(*ctx.saved_tensors)
        return (None, None, *torch.autograd.grad(result, list(ctx.layer.parameters()), gradient, allow_unused=True))


@TORCH_CACHES
def test_a_recomputing_autograd_function_caches_no_cast_without_a_graph(monkeypatch, torch_caches):
    monkeypatch.setattr(autocast, "_copies_have_graphs", torch_caches)
    layer, value = nn.Linear(8, 8), torch.randn(2, 8)
    copied: list[Any] = []
    with weight_cast_cache("bf16-mixed", CPU):
        note = OperatorWatch(before=lambda func, args, _: copied.append(args[0]) if "_to_copy" in str(func) else None)
        with forward_context("bf16-mixed", CPU), note:
            results = [RecomputingFunction.apply(layer, value, *layer.parameters()) for _ in range(2)]
        sum(result.float().sum() for result in results).backward()
    assert layer.weight.grad is not None
    num_copies = sum(tensor.shape == layer.weight.shape for tensor in copied)
    assert num_copies == (1 if torch_caches() else 2)


def test_batches_of_train_batches_are_converted() -> None:
    loaded = loaded_model(tied_layers, 64)
    object.__setattr__(loaded, "train_batches", lambda n: [Batch(torch.ones(n, 64), torch.ones(n))])
    batches = in_precision(loaded, "bf16").train_batches
    ((inputs, targets),) = batches(3)
    assert (inputs.dtype, targets.dtype) == (torch.bfloat16, torch.float32)


def test_profile_records_precision_and_cast_bytes() -> None:
    """Digests differ by precision, and a finished model is not converted."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64).requires_grad_(False))
    loaded = loaded_model(model, 64)
    profiles = {name: profile_of_model(in_precision(loaded, name)) for name in ("", "fp32", "bf16", "bf16-mixed")}
    assert [p.environment.dtype for p in profiles.values()] == ["float32", "fp32", "bf16", "bf16-mixed"]
    assert len({p.model.digest for p in profiles.values()}) == 4
    assert len({layer.digest for p in profiles.values() for layer in p.layers}) == 12
    assert next(model.parameters()).dtype == torch.float32
    casts = {name: [layer.cast_bytes for layer in p.layers] for name, p in profiles.items()}
    copy = 2 * 64 * 65
    assert casts == {"": [0, 0, 0], "fp32": [0, 0, 0], "bf16": [0, 0, 0], "bf16-mixed": [pytest.approx(copy, 64), 0, 0]}
    halves = [layer.parameter_bytes for layer in profiles["bf16"].layers]
    assert [2 * size for size in halves] == [layer.parameter_bytes for layer in profiles[""].layers]
