"""Tests of what `solve` shows while it searches."""

from dataclasses import replace
from itertools import pairwise

import pytest

from planner.cli import console, solve
from planner.solve import Request
from planner.solve import solve as solve_plan
from planner.solve.deadline import SearchObserver
from tests.support.chains import random_profile
from tests.support.clocks import limited_cpu_time
from tests.support.profiles import inputs_of


def test_a_line_is_printed_every_ten_seconds_without_a_terminal(monkeypatch, capsys) -> None:
    """No plan is found for a minute, and later no faster plan."""
    now_s, printed_s = 0.0, [0.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now_s

    monkeypatch.setattr(console, "time", Clock)
    monkeypatch.setattr(solve, "time", Clock)
    texts: list[str] = []
    with console.Console().progress("solving", announces=False) as show:
        show("", 0, 0)
        line = solve._BestPlanLine(show)
        is_stopped = line.show_when_polled(lambda: False)
        for tick in range(1200):
            now_s = tick / 10
            if tick == 600:
                line.update(2000.0, "1f1b", 1000.0)
            assert not is_stopped()
            if text := capsys.readouterr().err:
                texts.append(text)
                printed_s.append(now_s)
    assert max(later - earlier for earlier, later in pairwise([*printed_s, 120.0])) <= 11
    assert texts[0] == "solving: no plan found yet\n"
    assert texts[-1] == "solving: best step 2.00 ms, 1F1B, gap at most 50.0 %\n"
    assert len(texts) <= 12


def test_searches_often_ask_if_they_are_stopped() -> None:
    """So the line of `solve` can be repeated, and Ctrl-C ends a search soon. This search takes about a second."""
    asked: list[None] = []
    watch = SearchObserver(is_stopped=lambda: bool(asked.append(None)))
    inputs = replace(inputs_of(4, 8), schedule="auto", chunks=0)
    solve_plan(random_profile(3, 24), Request(inputs=inputs, micro_batches=8, actions=50_000, watch=watch))
    assert len(asked) > 100


@pytest.mark.slow
@pytest.mark.timed
def test_first_plan_of_100_layers_on_16_devices_is_found_within_a_second() -> None:
    class FoundError(Exception):
        """End of the search at its first plan."""

    def end(*_: object) -> None:
        raise FoundError

    inputs = replace(inputs_of(16, 32), schedule="auto", chunks=0)
    request = Request(inputs=inputs, micro_batches=32, watch=SearchObserver(on_plan=end))
    with limited_cpu_time(1.0), pytest.raises(FoundError):
        solve_plan(random_profile(4, 100), request)
