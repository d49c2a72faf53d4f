"""Parsing and formatting of quantities with units."""

from collections.abc import Callable

import pytest

from planner.core.errors import UsageError
from planner.core.values.units import (
    format_bytes,
    format_rate,
    format_us,
    parse_bytes,
    parse_bytes_per_s,
    parse_flops_per_s,
    parse_share,
    parse_us,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("8GB", 8 * 10**9),
        ("8GiB", 8 * 2**30),
        ("7.5GiB", 8053063680),
        ("0.1GB", 100_000_000),
        ("0.3GB", 300_000_000),
        ("1.1TB", 1_100_000_000_000),
        ("8.7PB", 8_700_000_000_000_000),
        ("0B", 0),
        ("1B", 1),
        ("1kB", 1000),
        ("1KB", 1000),
        ("1MB", 10**6),
        ("1TB", 10**12),
        ("1PB", 10**15),
        ("1KiB", 2**10),
        ("1MiB", 2**20),
        ("1TiB", 2**40),
        ("1PiB", 2**50),
        (".5GB", 500_000_000),
        ("5.GB", 5 * 10**9),
        ("1.9B", 1),
        ("9007199254740993B", 9007199254740993),
    ],
)
def test_sizes_are_exact_integers(text: str, size_bytes: int) -> None:
    parsed = parse_bytes(text)
    assert parsed == size_bytes
    assert type(parsed) is int


@pytest.mark.parametrize("text", ["8gb", "8Gb", "8GB", "8gB", " 8 GB ", "8.0GB", "8000 mb", "08GB"])
def test_sizes_ignore_case_and_spaces(text: str) -> None:
    assert parse_bytes(text) == 8 * 10**9


@pytest.mark.parametrize("parse", [parse_bytes, parse_bytes_per_s, parse_flops_per_s, parse_us, parse_share])
def test_numbers_without_unit_are_refused(parse: Callable[[str], float]) -> None:
    with pytest.raises(UsageError, match=r"`8` has no unit") as refused:
        parse("8")
    assert "for example" in refused.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GB",
        "-8GB",
        "+8GB",
        "1e9B",
        "1,5GB",
        "8 G B",
        "1_000B",
        "infGB",
        "nanGB",
        "8..5GB",
        "0x8B",
        "8GB/",
        ".",
    ],
)
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_bytes(text)
    assert f"`{text}`" in refused.value.message
    assert "8GB" in refused.value.hint


@pytest.mark.parametrize("text", ["8G", "8Gi", "8bytes", "8GBps", "8%", "8ms", "8bit"])
def test_unknown_units_of_size_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"unknown unit `{text[1:]}`") as refused:
        parse_bytes(text)
    assert "GiB" in refused.value.hint


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("25GB/s", 25e9),
        ("25gb/S", 25e9),
        ("1GiB/s", 2.0**30),
        ("12.5 MB/s", 12.5e6),
        ("1B/s", 1.0),
        ("3kB/s", 3000.0),
        ("2TB/s", 2e12),
    ],
)
def test_rates_are_bytes_per_second(text: str, bytes_per_s: float) -> None:
    assert parse_bytes_per_s(text) == bytes_per_s


@pytest.mark.parametrize("text", ["190TFLOP/s", "190 tflop/s", "0.19PFLOP/s", "190000 GFLOP/s"])
def test_compute_rates_are_operations_per_second(text: str) -> None:
    assert parse_flops_per_s(text) == 190e12


@pytest.mark.parametrize("text", ["190TFLOP", "190TFLOPS", "190TB/s", "0TFLOP/s", "2000PFLOP/s"])
def test_compute_rates_without_time_or_of_zero_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_flops_per_s(text)
    assert f"`{text}`" in refused.value.message


@pytest.mark.parametrize("text", ["25GB", "25GB/", "25GB/ms", "25/s", "25Gbps", "25GB/s/s", "0GB/s", "-1GB/s"])
def test_rates_without_time_or_of_zero_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_bytes_per_s(text)
    assert f"`{text}`" in refused.value.message


@pytest.mark.parametrize(
    ("text", "time_us"),
    [("5us", 5.0), ("5µs", 5.0), ("1.5ms", 1500.0), ("60s", 60e6), ("0us", 0.0), ("0.1ms", 100.0), (" 2 s", 2e6)],
)
def test_times_are_in_microseconds(text: str, time_us: float) -> None:
    assert parse_us(text) == time_us


def test_both_letters_mu_mean_micro() -> None:
    """Keyboards and Unicode normalization give the Greek letter (U+03BC) instead of the micro sign (U+00B5)."""
    assert parse_us("5\u00b5s") == 5.0
    assert parse_us("5\u03bcs") == 5.0


@pytest.mark.parametrize("text", ["5m", "5min", "5h", "5ns", "5 seconds", "5GB", "-5us", "5"])
def test_unknown_units_of_time_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_us(text)
    assert f"`{text}`" in refused.value.message


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0%", 0.0), ("99.9%", 0.999), (" 12.5 %", 0.125)])
def test_shares_are_percentages(text: str, share: float) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["100%", "250%", "0.05", "5", "-5%", "5 percent", "%"])
def test_shares_of_100_percent_or_without_percent_are_refused(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_share(text)
    assert f"`{text}`" in refused.value.message


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (8 * 10**9, "7.45 GiB"),
        (8 * 2**30, "8.00 GiB"),
        (80 * 2**30, "80.0 GiB"),
        (500 * 2**20, "500 MiB"),
        (2**40, "1.00 TiB"),
        (5000 * 2**40, "5000 TiB"),
        (-1500, "-1.46 KiB"),
    ],
)
def test_bytes_are_formatted_in_binary_units(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("bytes_per_s", "text"),
    [(25e9, "25.0 GB/s"), (999.0, "999 B/s"), (1000.0, "1.00 kB/s"), (1.25e6, "1.25 MB/s"), (3e15, "3000 TB/s")],
)
def test_rates_are_formatted_in_decimal_units(bytes_per_s: float, text: str) -> None:
    assert format_rate(bytes_per_s) == text


@pytest.mark.parametrize(
    ("time_us", "text"),
    [
        (0.0, "0.00 us"),
        (12.34, "12.3 us"),
        (999.0, "999 us"),
        (1000.0, "1.00 ms"),
        (812_400.0, "812 ms"),
        (3.6e9, "3600 s"),
    ],
)
def test_times_are_formatted_with_three_digits(time_us: float, text: str) -> None:
    assert format_us(time_us) == text


@pytest.mark.parametrize(
    ("show", "value", "text"),
    [
        (format_bytes, 9.999 * 2**30, "10.0 GiB"),
        (format_bytes, 99.99 * 2**30, "100 GiB"),
        (format_bytes, 1023.9 * 2**10, "1.00 MiB"),
        (format_us, 9.999, "10.0 us"),
        (format_us, 999.9996, "1.00 ms"),
        (format_rate, 999.9e3, "1.00 MB/s"),
    ],
)
def test_rounding_up_keeps_three_digits(show: Callable[[float], str], value: float, text: str) -> None:
    assert show(value) == text


@pytest.mark.parametrize("size_bytes", [1, 999, 1024, 123_456, 8 * 10**9, 85_017_493_504])
def test_sizes_in_bytes_survive_a_round_trip(size_bytes: int) -> None:
    assert parse_bytes(f"{size_bytes}B") == size_bytes
