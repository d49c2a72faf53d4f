"""Options as text from the command line, or as values from Python."""

import pytest

from planner.api import texts
from planner.core.errors import UsageError
from planner.core.values.cluster import Link


@pytest.mark.parametrize(
    ("asked", "found"), [("1,2,4", (1, 2, 4)), (4, (4,)), ([1, 2], (1, 2)), ((3,), (3,)), ("8", (8,))]
)
def test_integers_are_texts_or_values(asked, found) -> None:
    assert texts.parse_integers("--x", asked) == found


@pytest.mark.parametrize("asked", ["", "1,", "a", "1.5", [], ["x"], 0, "0", [None]])
def test_invalid_integers_are_refused_with_their_option(asked) -> None:
    with pytest.raises(UsageError, match="--x"):
        texts.parse_integers("--x", asked)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("8GB", (8 * 10**9,) * 2),
        ("1GB,2GiB", (10**9, 2 * 2**30)),
        (5, (5, 5)),
        ([1, "2kB"], (1, 2000)),
    ],
)
def test_memory_limits_are_texts_or_values(asked, found) -> None:
    assert texts.parse_memory_limits(asked, 2) == found


@pytest.mark.parametrize("asked", ["8", "1GB,1GB,1GB", [1, 2, 3], -1])
def test_wrong_memory_limits_are_refused(asked) -> None:
    with pytest.raises(UsageError):
        texts.parse_memory_limits(asked, 2)


def test_shares_links_and_speeds_are_texts_or_values() -> None:
    assert texts.parse_fraction("--m", "5%") == texts.parse_fraction("--m", 0.05) == 0.05
    link = Link(bytes_per_s=25e9, latency_us=5.0)
    assert texts.parse_link("25GB/s,5us") == texts.parse_link(link) == link
    assert texts.parse_speeds("1,2.5", 2) == texts.parse_speeds([1, 2.5], 2) == (1.0, 2.5)
    assert texts.parse_speeds(2, 2) == (2.0, 2.0)
    assert (
        texts.parse_layer_names("--together", "a,b") == texts.parse_layer_names("--together", ["a", "b"]) == ("a", "b")
    )
    assert texts.parse_node_counts("4x8") == (4, 8)
    for refuse in (
        lambda: texts.parse_fraction("--m", 1.0),
        lambda: texts.parse_fraction("--m", "5"),
        lambda: texts.parse_speeds([0], 1),
        lambda: texts.parse_layer_names("--apart", ["a"]),
        lambda: texts.parse_node_counts("4x0"),
        lambda: texts.parse_integer("--m", [1, 2]),
        lambda: texts.parse_choice("--solver", "x", ("gpipe", "1f1b")),
    ):
        with pytest.raises(UsageError):
            refuse()


def test_auto_is_zero() -> None:
    assert texts.parse_count_or_auto("--chunks", "auto") == 0
    assert texts.parse_count_or_auto("--chunks", 3) == texts.parse_count_or_auto("--chunks", "3") == 3


def test_settings_are_texts_or_values() -> None:
    assert texts.parse_settings(["width=16", "name=a=b"]) == {"width": "16", "name": "a=b"}
    assert texts.parse_settings({"width": 16}) == {"width": "16"}
    with pytest.raises(UsageError, match="--set width"):
        texts.parse_settings(["width"])
