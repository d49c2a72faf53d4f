"""Peak rates of known accelerators, for a roofline estimate (Williams, Waterman and Patterson, 2009).

Names are those of `planner.core.values.devices`. Rates are dense (without sparsity), per device that runs a pipeline
stage, at the clocks of the cited data sheet.
"""

from dataclasses import dataclass, field
from typing import Final

from planner.core.errors import UsageError
from planner.core.values.cluster import Link
from planner.core.values.devices import ACCELERATORS, accelerator
from planner.core.values.precision import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Peak rates of one device."""

    full_name: str
    """Name that torch reports, at least approximately."""
    float32_flops_per_s: float
    half_flops_per_s: float
    """bfloat16 rate, or float16 if the device has no bfloat16, with products accumulated in float32."""
    bytes_per_s: float
    """Bandwidth between its memory and its cores."""
    source: str
    link: Link = field(default_factory=Link)
    """Link to a neighbor, in one direction; the default link if machines with this device differ in their links."""


_NVLINK_2, _NVLINK_3, _NVLINK_4, _NVLINK_5 = (
    Link(latency_us=5.0, bytes_per_s=rate) for rate in (150e9, 300e9, 450e9, 900e9)
)
"""Half of the data sheets' 300, 600, 900 and 1800 GB/s, which count both directions. The latency is assumed."""

RATES: Final = {
    "v100": Rates(full_name="Tesla V100-SXM2-16GB", float32_flops_per_s=15.7e12,
                  half_flops_per_s=125e12, bytes_per_s=900e9,
                  link=_NVLINK_2, source="NVIDIA V100 datasheet, January 2020, SXM2"),
    "v100-32gb": Rates(full_name="Tesla V100-SXM2-32GB", float32_flops_per_s=15.7e12,
                       half_flops_per_s=125e12, bytes_per_s=900e9,
                       link=_NVLINK_2, source="NVIDIA V100 datasheet, January 2020, SXM2"),
    "t4": Rates(full_name="Tesla T4", float32_flops_per_s=8.1e12, half_flops_per_s=65e12,
                bytes_per_s=320e9, source="NVIDIA T4 datasheet"),
    "a10": Rates(full_name="NVIDIA A10", float32_flops_per_s=31.2e12, half_flops_per_s=125e12,
                 bytes_per_s=600e9, source="NVIDIA A10 datasheet"),
    "rtx3090": Rates(full_name="NVIDIA GeForce RTX 3090", float32_flops_per_s=35.6e12,
                     half_flops_per_s=71e12, bytes_per_s=936e9, source="NVIDIA Ampere GA102 whitepaper"),
    "rtx4090": Rates(full_name="NVIDIA GeForce RTX 4090", float32_flops_per_s=82.6e12,
                     half_flops_per_s=165.2e12, bytes_per_s=1008e9, source="NVIDIA Ada whitepaper"),
    "a100-40gb": Rates(full_name="NVIDIA A100-SXM4-40GB", float32_flops_per_s=19.5e12,
                       half_flops_per_s=312e12, bytes_per_s=1555e9,
                       link=_NVLINK_3, source="NVIDIA A100 datasheet, SXM"),
    "a100-80gb": Rates(full_name="NVIDIA A100-SXM4-80GB", float32_flops_per_s=19.5e12,
                       half_flops_per_s=312e12, bytes_per_s=2039e9,
                       link=_NVLINK_3, source="NVIDIA A100 datasheet, SXM"),
    "l40s": Rates(full_name="NVIDIA L40S", float32_flops_per_s=91.6e12,
                  half_flops_per_s=362e12, bytes_per_s=864e9, source="NVIDIA L40S datasheet"),
    "h100": Rates(full_name="NVIDIA H100 80GB HBM3", float32_flops_per_s=67e12,
                  half_flops_per_s=989.5e12, bytes_per_s=3350e9, link=_NVLINK_4, source="NVIDIA H100 datasheet, SXM"),
    "h200": Rates(full_name="NVIDIA H200", float32_flops_per_s=67e12,
                  half_flops_per_s=989.5e12, bytes_per_s=4800e9, link=_NVLINK_4, source="NVIDIA H200 datasheet, SXM"),
    "b200": Rates(full_name="NVIDIA B200", float32_flops_per_s=75e12,
                  half_flops_per_s=2250e12, bytes_per_s=8000e9,
                  link=_NVLINK_5, source="NVIDIA HGX B200 datasheet, a GPU of eight"),
    "gb200": Rates(full_name="NVIDIA GB200", float32_flops_per_s=80e12,
                   half_flops_per_s=2500e12, bytes_per_s=8000e9,
                   link=_NVLINK_5, source="NVIDIA GB200 NVL72 datasheet, a GPU of 72"),
    "mi300x": Rates(full_name="AMD Instinct MI300X", float32_flops_per_s=163.4e12,
                    half_flops_per_s=1307.4e12, bytes_per_s=5300e9, source="AMD Instinct MI300X data sheet"),
    # TPUs multiply bfloat16 numbers, also for float32 matrices unless the model requests another precision. Rates are
    # per device as in `planner.core.values.devices`: half a chip's for v2 and v3. Links: one link of the chip to a
    # neighbor.
    "tpu:v2": Rates(full_name="TPU v2 core", float32_flops_per_s=23e12, half_flops_per_s=23e12, bytes_per_s=350e9,
                    link=Link(latency_us=1.0, bytes_per_s=62e9),
                    source="Jouppi et al., CACM 63(7), 2020, table 3: 46 TFLOPS, 700 GB/s, 496 Gbit/s per link"),
    "tpu:v3": Rates(full_name="TPU v3 core", float32_flops_per_s=61.5e12, half_flops_per_s=61.5e12, bytes_per_s=450e9,
                    link=Link(latency_us=1.0, bytes_per_s=82e9),
                    source="Jouppi et al., CACM 63(7), 2020, table 3: 123 TFLOPS, 900 GB/s, 656 Gbit/s per link"),
    "tpu:v4": Rates(full_name="TPU v4", float32_flops_per_s=275e12, half_flops_per_s=275e12, bytes_per_s=1200e9,
                    link=Link(latency_us=1.0, bytes_per_s=50e9),
                    source="Jouppi et al., ISCA 2023, table 4: 275 TFLOPS, 1200 GB/s, 6 links of 50 GB/s"),
    "tpu:v5e": Rates(full_name="TPU v5e", float32_flops_per_s=197e12, half_flops_per_s=197e12, bytes_per_s=819e9,
                     link=Link(latency_us=1.0, bytes_per_s=50e9),
                     source="Google Cloud, TPU v5e: 197 TFLOPS, 819 GB/s, 1600 Gbit/s over 4 links"),
    "tpu:v5p": Rates(full_name="TPU v5p", float32_flops_per_s=459e12, half_flops_per_s=459e12, bytes_per_s=2765e9,
                     link=Link(latency_us=1.0, bytes_per_s=100e9),
                     source="Google Cloud, TPU v5p: 459 TFLOPS, 2765 GB/s, 4800 Gbit/s over 6 links"),
    "tpu:v6e": Rates(full_name="TPU v6e", float32_flops_per_s=918e12, half_flops_per_s=918e12, bytes_per_s=1640e9,
                     link=Link(latency_us=1.0, bytes_per_s=112e9),
                     source="Google Cloud, TPU v6e: 918 TFLOPS, 1640 GB/s, 3584 Gbit/s over 4 links"),
}  # fmt: skip


_WITHOUT_BFLOAT16: Final = frozenset({"v100", "v100-32gb", "t4"})


def usual_precision(name: str) -> Precision:
    """Return the precision in which models are usually trained on the accelerator `name`; empty for TPUs."""
    if name.startswith("tpu"):
        return ""
    return "fp16-mixed" if name in _WITHOUT_BFLOAT16 else "bf16-mixed"


_NARROW: Final = frozenset({"bf16", "bf16-mixed", "fp16-mixed", "bfloat16", "float16"})
"""Precisions whose matrix products have 16-bit operands."""

_OTHER_BOARDS: Final = ("pcie", "nvl")
"""Words in the names of boards that are slower than the board in the data sheet, so that their rates are unknown."""


def peak_flops_per_s(reported: str, dtype: str) -> float:
    """Return the peak FLOP/s of a device for `dtype`, by the name that it reports; 0 if not known."""
    lower = reported.lower()
    if any(word in lower for word in _OTHER_BOARDS):
        return 0.0
    rates = next((of for of in RATES.values() if of.full_name.lower() == lower), None)
    if rates is None:
        called = [kind.name for kind in ACCELERATORS if kind.name in RATES and kind.matches_name(reported)]
        # A reported name may match `v100` and `v100-32gb`, whose rates are equal, so that the first match is enough.
        rates = RATES[called[0]] if called else None
    if rates is None:
        return 0.0
    return rates.half_flops_per_s if dtype.removeprefix("torch.") in _NARROW else rates.float32_flops_per_s


def rates_of(name: str) -> Rates:
    """Return the rates of the accelerator called `name`, in upper or lower case.

    Raises:
        UsageError: The name or its rates are unknown.
    """
    device = accelerator(name)
    if device.name not in RATES:
        raise UsageError(f"the rates of `{device.name}` are not known", hint=f"one of {', '.join(RATES)}")
    return RATES[device.name]
