"""Accelerators by name, as in `gpipe-plan check --device h100` and `profile --device estimate:h100`.

Memory is the vendor's figure, with "GB" read as 10^9 bytes. Boards often have a little more (an H100 of "80 GB" reports
85.0 GB), so results for a name are on the safe side; `--mem` takes exact sizes. For a TPU, memory is what programs can
use, because the compiler reserves a part.

Peak rates are for a roofline estimate (Williams, Waterman and Patterson, 2009). They are dense (without sparsity), per
device that runs a pipeline stage, at the clocks of the cited data sheet.
"""

import re
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final

from planner.core.errors import UsageError
from planner.core.values.cluster import Link
from planner.core.values.precision import Precision

TORCH_KINDS: Final = ("cpu", "cuda")
"""Kinds of device that the bundled executor trains on; each has a class in `planner.device.kinds`."""

_GB = 10**9
_GIB = 2**30

ASSUMED_RESERVE_BYTES: Final = _GB
"""Reserve assumed for a device that is not present. It is not measured; `--reserve` overrides it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Kind of accelerator: a card, a chip, or a core of a chip, whichever runs one stage."""

    name: str
    full_name: str
    """Name that torch reports, at least approximately."""
    called: tuple[str, ...]
    """Lower-case words that all occur in the name reported by such a device (`device.name` of a profile)."""
    memory_bytes: int
    float32_flops_per_s: float = 0.0
    """Peak rate; 0 if the device's rates are not known."""
    half_flops_per_s: float = 0.0
    """bfloat16 rate, or float16 if the device has no bfloat16, with products accumulated in float32."""
    bytes_per_s: float = 0.0
    """Bandwidth between its memory and its cores."""
    link: Link = field(default_factory=Link)
    """Link to a neighbor, in one direction; the default link if machines with this device differ in their links."""
    has_bfloat16: bool = True
    source: str

    @property
    def usual_precision(self) -> Precision:
        """Precision in which models are usually trained on the device; empty for TPUs."""
        if self.name.startswith("tpu"):
            return ""
        return "bf16-mixed" if self.has_bfloat16 else "fp16-mixed"

    def matches_name(self, reported: str) -> bool:
        """Return True if a device that reports the name `reported` may be this accelerator."""
        return set(self.called) <= set(re.split(r"[^a-z0-9]+", reported.lower()))


_NVLINK_2, _NVLINK_3, _NVLINK_4, _NVLINK_5 = (
    Link(latency_us=5.0, bytes_per_s=rate) for rate in (150e9, 300e9, 450e9, 900e9)
)
"""Half of the data sheets' 300, 600, 900 and 1800 GB/s, which count both directions. The latency is assumed."""

ACCELERATORS: Final = (
    Accelerator(name="v100", full_name="Tesla V100-SXM2-16GB", called=("v100",), memory_bytes=16 * _GB,
                float32_flops_per_s=15.7e12, half_flops_per_s=125e12, bytes_per_s=900e9, link=_NVLINK_2,
                has_bfloat16=False, source="NVIDIA V100 datasheet, January 2020, SXM2"),
    Accelerator(name="v100-32gb", full_name="Tesla V100-SXM2-32GB", called=("v100", "32gb"), memory_bytes=32 * _GB,
                float32_flops_per_s=15.7e12, half_flops_per_s=125e12, bytes_per_s=900e9, link=_NVLINK_2,
                has_bfloat16=False, source="NVIDIA V100 datasheet, January 2020, SXM2"),
    Accelerator(name="t4", full_name="Tesla T4", called=("t4",), memory_bytes=16 * _GB, float32_flops_per_s=8.1e12,
                half_flops_per_s=65e12, bytes_per_s=320e9, has_bfloat16=False, source="NVIDIA T4 datasheet"),
    Accelerator(name="a10", full_name="NVIDIA A10", called=("a10",), memory_bytes=24 * _GB, float32_flops_per_s=31.2e12,
                half_flops_per_s=125e12, bytes_per_s=600e9, source="NVIDIA A10 datasheet"),
    Accelerator(name="rtx3090", full_name="NVIDIA GeForce RTX 3090", called=("rtx", "3090"), memory_bytes=24 * _GB,
                float32_flops_per_s=35.6e12, half_flops_per_s=71e12, bytes_per_s=936e9,
                source="NVIDIA Ampere GA102 whitepaper"),
    Accelerator(name="rtx4090", full_name="NVIDIA GeForce RTX 4090", called=("rtx", "4090"), memory_bytes=24 * _GB,
                float32_flops_per_s=82.6e12, half_flops_per_s=165.2e12, bytes_per_s=1008e9,
                source="NVIDIA Ada whitepaper"),
    Accelerator(name="a100-40gb", full_name="NVIDIA A100-SXM4-40GB", called=("a100", "40gb"), memory_bytes=40 * _GB,
                float32_flops_per_s=19.5e12, half_flops_per_s=312e12, bytes_per_s=1555e9, link=_NVLINK_3,
                source="NVIDIA A100 datasheet, SXM"),
    Accelerator(name="a100-80gb", full_name="NVIDIA A100-SXM4-80GB", called=("a100", "80gb"), memory_bytes=80 * _GB,
                float32_flops_per_s=19.5e12, half_flops_per_s=312e12, bytes_per_s=2039e9, link=_NVLINK_3,
                source="NVIDIA A100 datasheet, SXM"),
    Accelerator(name="l40s", full_name="NVIDIA L40S", called=("l40s",), memory_bytes=48 * _GB,
                float32_flops_per_s=91.6e12, half_flops_per_s=362e12, bytes_per_s=864e9,
                source="NVIDIA L40S datasheet"),
    Accelerator(name="h100", full_name="NVIDIA H100 80GB HBM3", called=("h100",), memory_bytes=80 * _GB,
                float32_flops_per_s=67e12, half_flops_per_s=989.5e12, bytes_per_s=3350e9, link=_NVLINK_4,
                source="NVIDIA H100 datasheet, SXM"),
    Accelerator(name="h200", full_name="NVIDIA H200", called=("h200",), memory_bytes=141 * _GB,
                float32_flops_per_s=67e12, half_flops_per_s=989.5e12, bytes_per_s=4800e9, link=_NVLINK_4,
                source="NVIDIA H200 datasheet, SXM"),
    # 1,440 GB over 8 GPUs (NVIDIA DGX B200 datasheet)
    Accelerator(name="b200", full_name="NVIDIA B200", called=("b200",), memory_bytes=180 * _GB,
                float32_flops_per_s=75e12, half_flops_per_s=2250e12, bytes_per_s=8000e9, link=_NVLINK_5,
                source="NVIDIA HGX B200 datasheet, a GPU of eight"),
    # 13.4 TB over 72 GPUs
    Accelerator(name="gb200", full_name="NVIDIA GB200", called=("gb200",), memory_bytes=186 * _GB,
                float32_flops_per_s=80e12, half_flops_per_s=2500e12, bytes_per_s=8000e9, link=_NVLINK_5,
                source="NVIDIA GB200 NVL72 datasheet, a GPU of 72"),
    # 128 GB over two dies, which are two devices
    Accelerator(name="mi250x", full_name="AMD Instinct MI250X", called=("mi250x",), memory_bytes=64 * _GB,
                source="AMD Instinct MI250X data sheet"),
    Accelerator(name="mi300x", full_name="AMD Instinct MI300X", called=("mi300x",), memory_bytes=192 * _GB,
                float32_flops_per_s=163.4e12, half_flops_per_s=1307.4e12, bytes_per_s=5300e9,
                source="AMD Instinct MI300X data sheet"),
    # Memory of TPUs is what libtpu 0.0.52 reports as available in its error message ("exceeds available HBM"). That is
    # a little less than in Google Cloud's "TPU system architecture". v2 and v3 chips have two cores, which are separate
    # devices with half of the chip's rates. From v4 on, the two cores of a chip (v5e and v6e have one) are one device.
    # TPUs multiply bfloat16 numbers, also for float32 matrices unless the model requests another precision. A link is
    # one link of the chip to a neighbor.
    Accelerator(name="tpu:v2", full_name="TPU v2 core", called=("tpu", "v2"), memory_bytes=int(7.48 * _GIB),
                float32_flops_per_s=23e12, half_flops_per_s=23e12, bytes_per_s=350e9,
                link=Link(latency_us=1.0, bytes_per_s=62e9),
                source="Jouppi et al., CACM 63(7), 2020, table 3: 46 TFLOPS, 700 GB/s, 496 Gbit/s per link"),
    Accelerator(name="tpu:v3", full_name="TPU v3 core", called=("tpu", "v3"), memory_bytes=int(15.48 * _GIB),
                float32_flops_per_s=61.5e12, half_flops_per_s=61.5e12, bytes_per_s=450e9,
                link=Link(latency_us=1.0, bytes_per_s=82e9),
                source="Jouppi et al., CACM 63(7), 2020, table 3: 123 TFLOPS, 900 GB/s, 656 Gbit/s per link"),
    Accelerator(name="tpu:v4", full_name="TPU v4", called=("tpu", "v4"), memory_bytes=int(30.75 * _GIB),
                float32_flops_per_s=275e12, half_flops_per_s=275e12, bytes_per_s=1200e9,
                link=Link(latency_us=1.0, bytes_per_s=50e9),
                source="Jouppi et al., ISCA 2023, table 4: 275 TFLOPS, 1200 GB/s, 6 links of 50 GB/s"),
    Accelerator(name="tpu:v5e", full_name="TPU v5e", called=("tpu", "v5e"), memory_bytes=int(15.75 * _GIB),
                float32_flops_per_s=197e12, half_flops_per_s=197e12, bytes_per_s=819e9,
                link=Link(latency_us=1.0, bytes_per_s=50e9),
                source="Google Cloud, TPU v5e: 197 TFLOPS, 819 GB/s, 1600 Gbit/s over 4 links"),
    Accelerator(name="tpu:v5p", full_name="TPU v5p", called=("tpu", "v5p"), memory_bytes=int(95.73 * _GIB),
                float32_flops_per_s=459e12, half_flops_per_s=459e12, bytes_per_s=2765e9,
                link=Link(latency_us=1.0, bytes_per_s=100e9),
                source="Google Cloud, TPU v5p: 459 TFLOPS, 2765 GB/s, 4800 Gbit/s over 6 links"),
    Accelerator(name="tpu:v6e", full_name="TPU v6e", called=("tpu", "v6e"), memory_bytes=int(31.24 * _GIB),
                float32_flops_per_s=918e12, half_flops_per_s=918e12, bytes_per_s=1640e9,
                link=Link(latency_us=1.0, bytes_per_s=112e9),
                source="Google Cloud, TPU v6e: 918 TFLOPS, 1640 GB/s, 3584 Gbit/s over 4 links"),
)  # fmt: skip


def accelerator(name: str) -> Accelerator:
    """Return the accelerator called `name`, in upper or lower case.

    Raises:
        UsageError: The name is unknown; the hint lists similar names.
    """
    by_name = {listed.name: listed for listed in ACCELERATORS}
    wanted = name.lower()
    if wanted in by_name:
        return by_name[wanted]
    near = [listed for listed in by_name if listed.startswith(wanted)] or get_close_matches(wanted, by_name, n=3)
    hint = f"did you mean {' or '.join(f'`{listed}`' for listed in near)}?" if near else f"one of {', '.join(by_name)}"
    raise UsageError(f"unknown device `{name}`", hint=f"{hint}; `--mem` takes any size")


def accelerator_with_rates(name: str) -> Accelerator:
    """Return the accelerator called `name`, whose peak rates are known.

    Raises:
        UsageError: The name or the rates are unknown.
    """
    requested = accelerator(name)
    if not requested.bytes_per_s:
        known = ", ".join(listed.name for listed in ACCELERATORS if listed.bytes_per_s)
        raise UsageError(f"the rates of `{requested.name}` are not known", hint=f"one of {known}")
    return requested


_NARROW: Final = frozenset({"bf16", "bf16-mixed", "fp16-mixed", "bfloat16", "float16"})
"""Precisions whose matrix products have 16-bit operands."""

_OTHER_BOARDS: Final = ("pcie", "nvl")
"""Words in the names of boards that are slower than the board in the data sheet, so that their rates are unknown."""


def peak_flops_per_s(reported: str, dtype: str) -> float:
    """Return the peak FLOP/s for `dtype` of a device that reports the name `reported`; 0 if not known."""
    lower = reported.lower()
    if any(word in lower for word in _OTHER_BOARDS):
        return 0.0
    # A reported name may match `v100` and `v100-32gb`, whose rates are equal, so that the first match is enough.
    match = next((of for of in ACCELERATORS if of.full_name.lower() == lower or of.matches_name(reported)), None)
    if match is None:
        return 0.0
    return match.half_flops_per_s if dtype.removeprefix("torch.") in _NARROW else match.float32_flops_per_s


def accelerators_with(need_bytes: int) -> tuple[Accelerator, ...]:
    """Return the accelerators with at least `need_bytes` of memory, the smallest first."""
    able = [listed for listed in ACCELERATORS if listed.memory_bytes >= need_bytes]
    return tuple(sorted(able, key=lambda listed: listed.memory_bytes))


def training_device_kind(profiled: str) -> str:
    """Return the kind of device to train on: `profiled`, or `cpu` if torch cannot train on this kind."""
    return profiled if profiled in TORCH_KINDS else "cpu"
