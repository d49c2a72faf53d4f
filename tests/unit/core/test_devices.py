"""Known accelerators and their names."""

import pytest

from planner.core.errors import UsageError
from planner.core.values.devices import ACCELERATORS, accelerator, accelerators_with


def test_accelerator_names_are_unique_and_lower_case() -> None:
    names = [known.name for known in ACCELERATORS]
    assert len(set(names)) == len(names)
    assert all(name == name.lower() for name in names)
    assert all(accelerator(name.upper()).name == name for name in names)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("h100", 80 * 10**9),
        ("a100-40gb", 40 * 10**9),
        ("h200", 141 * 10**9),
        ("tpu:v2", 748 * 2**30 // 100),
        ("t4", 16 * 10**9),
    ],
)
def test_accelerator_memory_equals_the_data_sheet(name: str, size: int) -> None:
    """GB are decimal. Programs can use 7.48 of the 8 GiB of a TPU core."""
    assert accelerator(name).memory_bytes == size


@pytest.mark.parametrize(
    ("reported", "name", "is_it"),
    [
        ("NVIDIA H100 80GB HBM3", "h100", True),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", True),
        ("NVIDIA A100-SXM4-80GB", "a100-40gb", False),
        ("NVIDIA A100-SXM4-80GB", "a10", False),
        ("NVIDIA GeForce RTX 4090", "rtx4090", True),
        ("AMD EPYC", "h100", False),
    ],
)
def test_reported_names_are_matched_by_word(reported: str, name: str, is_it: bool) -> None:  # noqa: FBT001
    assert accelerator(name).matches_name(reported) is is_it


def test_unknown_accelerator_names_get_suggestions() -> None:
    for name, near in (("a100", "`a100-40gb` or `a100-80gb`"), ("h1000", "`h100`"), ("abacus", "one of ")):
        with pytest.raises(UsageError, match=f"unknown device `{name}`") as refused:
            accelerator(name)
        assert near in refused.value.hint
        assert "--mem" in refused.value.hint


def test_smallest_sufficient_accelerator_comes_first() -> None:
    assert accelerators_with(70 * 10**9)[0].memory_bytes == 80 * 10**9
    assert accelerators_with(10**12) == ()
