"""Compute the profile of a transformer by published formulas, to make plans before code or devices exist.

    s   tokens of a sample           h   width of the model      V   words of the vocabulary
    b   samples of a micro-batch     f   width of the            t   devices that share each layer
    a   attention heads                  feed-forward layers     e   bytes of an activation

FLOP of one micro-batch, on all t devices together (Narayanan et al., "Efficient Large-Scale Language Model Training on
GPU Clusters Using Megatron-LM", arXiv:2104.04473; split backward as in Qi et al., "Zero Bubble Pipeline Parallelism",
arXiv:2401.10241, table 1; both have f = 4h). F is the forward, I the input-gradient pass, W the weight-gradient pass:

                  F                           I                           W
    block         8bsh^2 + 4bshf + 4bs^2h     8bsh^2 + 4bshf + 8bs^2h     8bsh^2 + 4bshf
    head          2bshV                       2bshV                       2bshV

Bytes that each device keeps of one micro-batch for its backward (Korthikanti et al., "Reducing Activation Recomputation
in Large Transformer Models", arXiv:2205.05198, equations 1 to 4, where f = 4h and e = 2). Tensor parallelism splits
some tensors among the t devices (column "split"). Only sequence parallelism also splits the others (column "whole"):

                  whole                split
    embedding     bsh (e + 1)          -
    block         bsh (4e + 2)         e (4bsh + 2bsf) / t; if scores are kept, also b a s^2 (2e + 1) / t
    head          bsh e                4bsV / t: logits in float32

Between passes I and W, a block keeps the inputs of its products and the gradients of their results. Whole tensors have
4bsh e bytes, split tensors e (4bsh + 2bsf) / t. With t = 1, f = 4h and e = 2, all these tensors together have 32bsh
bytes.

The papers' formulas include no temporary tensors. This module adds two. One is a second copy of the head's logits. The
other is the gradient of a layer's largest weight, before autograd adds it to the gradients of earlier micro-batches.

Each product whose inputs are split among the t devices is followed by an all-reduce of bsh e bytes. Each block has two
all-reduces in forward and two in backward. The embedding has one in forward, the head has one in backward. With
sequence parallelism, gathers and scatters of as many bytes replace the all-reduces.

The formulas do not count workspaces of kernels, nor the time of memory-bound operators. A rate (FLOP/s) that was
measured in training runs includes the time of these operators.
"""

from dataclasses import dataclass, fields, replace
from hashlib import sha256

from planner.core.values.profile import (
    THIS_TOOL,
    Device,
    Environment,
    LayerProfile,
    Model,
    Profile,
    Setting,
    WidthCosts,
)
from planner.profile.formula.layers import ElementBytes, ExecutionSettings, LayerCosts, layer_costs
from planner.profile.formula.shapes import Transformer


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRates:
    """Speed of a device in FLOP per second and bytes per second."""

    flops_per_s: float
    bytes_per_s: float = 0.0
    """Bandwidth of the device's memory, which determines the time of an optimizer's update. If it is 0 (unknown), the
    update takes no time."""


def transformer_profile(
    shape: Transformer,
    execution: ExecutionSettings,
    element_bytes: ElementBytes,
    rates: DeviceRates,
    *,
    device: Device,
    dtype: str,
    optimizer: str,
    micro_batch_sizes: tuple[int, ...],
    updates_all_at_once: bool,
    other_tensor_parallel: tuple[int, ...] = (),
) -> Profile:
    """Return the profile of a transformer: embedding, blocks, and head with the loss.

    Args:
        shape: Shape of the model.
        execution: Parallelism within layers, and kernels.
        element_bytes: Bytes per activation and per parameter.
        rates: Rates of the device.
        device: Device to name in the profile.
        dtype: Precision to name in the profile.
        optimizer: Optimizer to name in the profile.
        micro_batch_sizes: Micro-batch sizes in samples.
        updates_all_at_once: True if the optimizer updates all parameters at once, with temporary memory of their size.
        other_tensor_parallel: Further numbers of devices per layer (t). The profile also has the costs for each.
    """

    def layers_of(execution: ExecutionSettings) -> tuple[LayerProfile, ...]:
        layers = [
            _layer_profile(
                layer, element_bytes, rates, sizes=micro_batch_sizes, updates_all_at_once=updates_all_at_once
            )
            for layer in layer_costs(shape, execution, element_bytes)
        ]
        if shape.tied:
            words = element_bytes.parameter * (shape.vocabulary * shape.hidden // execution.tensor_parallel)
            first, last = layers[0], layers[-1]
            layers[0] = replace(first, tied=(f"{last.name}.weight",), tied_bytes=words)
            layers[-1] = replace(last, tied=(f"{first.name}.weight",), tied_bytes=words)
        return tuple(layers)

    return Profile(
        generator=THIS_TOOL,
        model=Model(settings=_settings(shape, execution, rates), parameters=shape.parameters),
        device=device,
        environment=Environment(dtype=dtype),
        optimizer=optimizer,
        optimizer_peak="sum" if updates_all_at_once else "largest",
        micro_batch_sizes=micro_batch_sizes,
        tensor_parallel=execution.tensor_parallel,
        expert_parallel=execution.expert_parallel,
        layers=layers_of(execution),
        widths=tuple(
            WidthCosts(tensor_parallel=t, layers=layers_of(replace(execution, tensor_parallel=t)))
            for t in other_tensor_parallel
        ),
    )


def _settings(shape: Transformer, execution: ExecutionSettings, rates: DeviceRates) -> dict[str, Setting]:
    block = shape.blocks[-1]
    # For models with layer norms, the formulas are the same with and without fused kernels.
    left_out = {"tensor_parallel", "counts_collectives", *(["fused"] if shape.layer_norms else [])}
    names = [of.name for of in fields(execution) if of.name not in left_out]
    options: dict[str, Setting] = {
        name: getattr(execution, name)
        for name in names
        if getattr(execution, name) != getattr(ExecutionSettings(), name)
    }
    return {
        "formula": shape.family,
        "layers": len(shape.blocks),
        "hidden": shape.hidden,
        "heads": block.attention.heads,
        "sequence": shape.sequence,
        "vocabulary": shape.vocabulary,
        "feed_forward": block.feed_forward.width,
        **options,
        **({"experts": True} if shape.has_experts else {}),
        **({"tied": True} if shape.tied else {}),
        "rate": f"{rates.flops_per_s / 1e12:g} TFLOP/s",
    }


def _layer_profile(
    layer: LayerCosts,
    element_bytes: ElementBytes,
    rates: DeviceRates,
    *,
    sizes: tuple[int, ...],
    updates_all_at_once: bool,
) -> LayerProfile:
    def times_us(flops: float) -> tuple[float, ...]:
        return tuple(b * flops / rates.flops_per_s * 1e6 for b in sizes)

    def each(bytes_of_one: float, more: int = 0) -> tuple[int, ...]:
        return tuple(round(b * bytes_of_one) + more for b in sizes)

    # An update reads and writes each parameter and each number of the optimizer's state, and reads each gradient.
    touched = 2 * element_bytes.parameter + element_bytes.gradient + 2 * element_bytes.optimizer
    described = replace(layer, name="", modules=()), element_bytes, rates, sizes
    return LayerProfile(
        name=layer.name,
        modules=layer.modules,
        digest=sha256(repr(described).encode()).hexdigest()[:16],
        parameter_bytes=element_bytes.parameter * layer.parameters,
        gradient_bytes=element_bytes.gradient * layer.parameters,
        optimizer_bytes=element_bytes.optimizer * layer.parameters,
        cast_bytes=element_bytes.cast * layer.cast_parameters,
        optimizer_us=layer.parameters * touched / rates.bytes_per_s * 1e6 if rates.bytes_per_s else 0.0,
        optimizer_peak_bytes=element_bytes.parameter * layer.parameters if updates_all_at_once else 0,
        forward_us=times_us(layer.forward_flops),
        backward_us=times_us(layer.input_flops + layer.weight_flops),
        backward_input_us=times_us(layer.input_flops),
        backward_weight_us=times_us(layer.weight_flops),
        output_bytes=each(layer.output_bytes),
        saved_bytes=each(layer.saved_bytes, round(layer.shared_saved_bytes)),
        weight_held_bytes=each(layer.weight_held_bytes),
        forward_peak_bytes=each(layer.transient_bytes),
        backward_peak_bytes=each(layer.transient_bytes, element_bytes.parameter * layer.largest_weight),
        forward_flops=each(layer.forward_flops),
        collective_bytes=each(layer.collective_bytes) if layer.collectives else (),
        collectives=layer.collectives,
    )
