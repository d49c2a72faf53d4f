"""Memory bars: scale, marks of limits, and excess in words."""

import codecs

from planner.cli.console import spell_in_ascii
from planner.show.terminal.memory import _FILLS
from planner.show.views.memory import COMPONENTS
from tests.unit.show.samples import MIB, memory_text, stage, style


def bars(text):
    """Return the text from the bar's first column, per stage."""
    lines = text.splitlines()[1:]
    return [line[len("stage 0 ") :] for line in lines if line.startswith("stage ") and line[7] != ":"]


def test_every_component_has_its_own_fill():
    """ASCII fills differ too, also from the mark of the limit."""
    codecs.register_error("spelled", spell_in_ascii)
    for fills in ("│" + _FILLS, ("│" + _FILLS).encode("ascii", "spelled").decode()):
        assert len(fills) == 1 + len(COMPONENTS) == len(set(fills))


def test_bar_is_followed_by_need_limit_and_share():
    text = memory_text([stage(parameters=93 * MIB)], style())
    assert "93.0 MiB of 100 MiB · 93 %" in text


def test_bar_is_to_scale():
    (bar,) = bars(memory_text([stage(parameters=25 * MIB, in_flight=25 * MIB)], style(100)))
    mark = bar.index("│")
    assert abs(bar.count("█") - mark / 4) <= 1
    assert abs(bar.count("░") - mark / 4) <= 1
    assert bar[:mark].count(" ") == mark - bar.count("█") - bar.count("░")


def test_stage_exactly_at_its_limit_is_not_over():
    text = memory_text([stage(parameters=100 * MIB)], style())
    assert "█│" in text
    assert "OVER" not in text


def test_stage_over_its_limit_is_marked_in_words():
    text = memory_text([stage(parameters=100 * MIB + 1), stage(1, working=150 * MIB)], style())
    first, second = bars(text)
    assert first.endswith("100 % ! OVER")
    assert second.endswith("150 % ! OVER")
    assert "▌│▌" in second


def test_unequal_limits_share_one_scale():
    text = memory_text([stage(cap=100 * MIB, buffers=30 * MIB), stage(1, cap=50 * MIB, buffers=40 * MIB)], style())
    first, second = bars(text)
    assert abs(first.index("│") - 2 * second.index("│")) <= 1


def test_bars_are_scaled_to_the_largest_need_if_limits_are_far():
    text = memory_text([stage(cap=10**18, parameters=MIB), stage(1, cap=10**18, parameters=2 * MIB)], style())
    first, second = bars(text)
    assert "to the largest peak (2.00 MiB)" in text
    assert "│" not in text
    assert abs(2 * first.count("█") - second.count("█")) <= 1


def test_small_limits_are_marked_next_to_a_huge_one():
    text = memory_text([stage(cap=2 * MIB, parameters=MIB), stage(1, cap=10**12, parameters=3 * MIB)], style())
    first, second = bars(text)
    assert "│" in first
    assert "│" not in second


def test_legend_lists_the_components_of_the_fullest_stage():
    text = memory_text([stage(parameters=MIB, in_flight=MIB), stage(1, parameters=60 * MIB)], style())
    legend = text[text.index("stage 1:") :]
    assert "█ parameters 60.0 MiB" in legend
    assert "in flight 0 B" in legend
    assert "gradients" not in legend


def test_chunks_of_a_device_share_a_bar():
    chunks = [stage(k, parameters=(k + 1) * 10 * MIB, in_flight=5 * MIB) for k in range(4)]
    text = memory_text(chunks, style(100), num_devices=2)
    title, first, second, legend, *_ = text.splitlines()
    assert title == "memory per device"
    assert first.startswith("device 0 ████")
    assert first.endswith("50.0 MiB of 100 MiB · 50 %")
    assert second.endswith("70.0 MiB of 100 MiB · 70 %")
    assert legend == "device 1:  █ parameters 60.0 MiB  ░ in flight 10.0 MiB"
    assert abs(first.count("█") * 60 - second.count("█") * 40) <= 60


def test_device_over_its_limit_is_marked_although_its_chunks_fit():
    text = memory_text([stage(parameters=60 * MIB), stage(1, parameters=60 * MIB)], style(), num_devices=1)
    assert text.splitlines()[1].endswith("120 MiB of 100 MiB · 120 % ! OVER")


def test_empty_memory_or_limit_has_an_empty_bar():
    assert "0 B of 100 MiB" in memory_text([stage()], style())
    assert "OVER" in memory_text([stage(cap=0, parameters=1)], style())
