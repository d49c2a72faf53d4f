"""Facts of a profile, and its table of layers."""

from dataclasses import replace

import pytest

from planner.core.values.profile import Device, LayerProfile, Profile
from planner.show.terminal.profile import profile_text
from planner.show.views.numbers import TimeUnit, format_count, percent_difference
from tests.unit.show.samples import layer, profile, style

WIDE = style(120, wrap=False)


def row(text, start):
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line


def test_profile_facts_come_first():
    text = profile_text(profile(), WIDE)
    for fact in (
        "4,718,592 parameters",
        "depth=6",
        "cuda NVIDIA H100",
        "80.0 GiB",
        "measured",
        "micro-batch sizes 1, 2",
    ):
        assert fact in text


def test_layers_with_one_digest_share_a_row():
    line = row(profile_text(profile(), WIDE), "block")
    assert line.startswith("block.0 … block.2 (3) ")
    assert "3.00 MiB" in line


def test_layers_with_different_costs_have_separate_rows():
    """Layers without a digest never share a row."""
    layers = (layer("a", digest="x"), layer("b", digest="x", forward_us=5.0), layer("c"), layer("d"))
    text = profile_text(replace(profile(), layers=layers), WIDE)
    assert "(" not in text.split("total")[0].split("layer ")[1]


def test_costs_are_those_at_the_largest_micro_batch_size():
    text = profile_text(profile(), WIDE)
    first, total = row(text, "[bold]stem").split(), row(text, "total").split()
    assert first[3:5] == ["2.000", "4.000"]
    assert total[1:5] == ["18.0", "MiB", "12.000", "24.000"]
    assert "12.0 G" in row(text, "total")


def test_time_per_sample_at_the_smallest_and_largest_size():
    text = profile_text(profile(), WIDE)
    assert "at 1" in text
    assert row(text, "[bold]stem").split()[-2:] == ["3.000", "3.000"]


def test_profile_with_only_required_fields_is_shown():
    bare = LayerProfile(
        name="a", parameter_bytes=0, forward_us=(1.0,), backward_us=(2.0,), output_bytes=(0,), saved_bytes=(0,)
    )
    text = profile_text(Profile(device=Device(kind="cpu"), micro_batch_sizes=(4,), layers=(bare,)), WIDE)
    assert row(text, "a ").split() == ["a", "0", "B", "1.0", "2.0", "0", "B", "0", "B", "-"]
    assert "certain" not in text


def test_tied_layers_and_noise_are_shown():
    layers = (layer("wte"), layer("head", tied=("wte.weight",)))
    text = profile_text(replace(profile(), layers=layers), WIDE)
    assert "head shares wte.weight" in text
    assert "at micro-batch size 2, ±2.0 %" in text


def test_layers_that_all_share_parameters_take_one_line():
    names = ("a", "b", "c")
    layers = tuple(layer(name, tied=tuple(other for other in names if other != name)) for name in names)
    text = profile_text(replace(profile(), layers=layers), WIDE)
    assert "3 layers share parameters: a b c" in text
    assert " shares " not in text


@pytest.mark.parametrize(
    ("largest_us", "text"),
    [
        (0.4, "0.4 us"),
        (999.0, "999.0 us"),
        (1234.5, "1.234 ms"),
        (45_678.0, "45.68 ms"),
        (5e6, "5000.0 ms"),
        (2e7, "20.00 s"),
    ],
)
def test_time_unit_fits_the_largest_value(largest_us, text):
    scale = TimeUnit.fitting([0.1, largest_us])
    assert f"{scale.text(largest_us)} {scale.unit}" == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (999_600, "1.00 M"), (1.75e9, "1.75 G"), (218e6, "218 M")],
)
def test_counts_have_three_digits_and_a_decimal_prefix(count, text):
    assert format_count(count) == text


def test_differences_are_relative_to_the_prediction():
    assert percent_difference(200.0, 210.0) == "+5.0 %"
    assert percent_difference(200.0, 190.0) == "-5.0 %"
    assert percent_difference(0.0, 1.0) == "-"
