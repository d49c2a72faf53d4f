"""Peak rates of known accelerators: what a roofline (Williams, Waterman and Patterson, 2009) is drawn from.

By the names of `planner.core.devices`. Dense rates, without sparsity, per device as a pipeline stage sees it, at the
clocks of the data sheet named.
"""

from dataclasses import dataclass
from typing import Final

from planner.core.devices import accelerator
from planner.core.errors import UsageError

__all__ = ["RATES", "Rates", "rates_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Of one device."""

    full_name: str
    """As torch reports it, or nearly."""
    float32_flops_per_s: float
    half_flops_per_s: float
    """bfloat16, or float16 where the device has no bfloat16, with products added up in float32."""
    bytes_per_s: float
    """Between its memory and its cores."""
    source: str


RATES: Final = {
    "v100": Rates(full_name="Tesla V100-SXM2-16GB", float32_flops_per_s=15.7e12,
                  half_flops_per_s=125e12, bytes_per_s=900e9, source="NVIDIA V100 datasheet, January 2020, SXM2"),
    "v100-32gb": Rates(full_name="Tesla V100-SXM2-32GB", float32_flops_per_s=15.7e12,
                       half_flops_per_s=125e12, bytes_per_s=900e9, source="NVIDIA V100 datasheet, January 2020, SXM2"),
    "t4": Rates(full_name="Tesla T4", float32_flops_per_s=8.1e12, half_flops_per_s=65e12,
                bytes_per_s=320e9, source="NVIDIA T4 datasheet"),
    "a10": Rates(full_name="NVIDIA A10", float32_flops_per_s=31.2e12, half_flops_per_s=125e12,
                 bytes_per_s=600e9, source="NVIDIA A10 datasheet"),
    "rtx3090": Rates(full_name="NVIDIA GeForce RTX 3090", float32_flops_per_s=35.6e12,
                     half_flops_per_s=71e12, bytes_per_s=936e9, source="NVIDIA Ampere GA102 whitepaper"),
    "rtx4090": Rates(full_name="NVIDIA GeForce RTX 4090", float32_flops_per_s=82.6e12,
                     half_flops_per_s=165.2e12, bytes_per_s=1008e9, source="NVIDIA Ada whitepaper"),
    "a100-40gb": Rates(full_name="NVIDIA A100-SXM4-40GB", float32_flops_per_s=19.5e12,
                       half_flops_per_s=312e12, bytes_per_s=1555e9, source="NVIDIA A100 datasheet, SXM"),
    "a100-80gb": Rates(full_name="NVIDIA A100-SXM4-80GB", float32_flops_per_s=19.5e12,
                       half_flops_per_s=312e12, bytes_per_s=2039e9, source="NVIDIA A100 datasheet, SXM"),
    "l40s": Rates(full_name="NVIDIA L40S", float32_flops_per_s=91.6e12,
                  half_flops_per_s=362e12, bytes_per_s=864e9, source="NVIDIA L40S datasheet"),
    "h100": Rates(full_name="NVIDIA H100 80GB HBM3", float32_flops_per_s=67e12,
                  half_flops_per_s=989.5e12, bytes_per_s=3350e9, source="NVIDIA H100 datasheet, SXM"),
    "h200": Rates(full_name="NVIDIA H200", float32_flops_per_s=67e12,
                  half_flops_per_s=989.5e12, bytes_per_s=4800e9, source="NVIDIA H200 datasheet, SXM"),
    "mi300x": Rates(full_name="AMD Instinct MI300X", float32_flops_per_s=163.4e12,
                    half_flops_per_s=1307.4e12, bytes_per_s=5300e9, source="AMD Instinct MI300X data sheet"),
}  # fmt: skip


def rates_of(name: str) -> Rates:
    """The rates of the accelerator called `name`, in upper or lower case.

    Raises:
        UsageError: Not one of those known, or one whose rates are not.
    """
    known = accelerator(name)
    if known.name not in RATES:
        raise UsageError(f"the rates of `{known.name}` are not known", hint=f"one of {', '.join(RATES)}")
    return RATES[known.name]
