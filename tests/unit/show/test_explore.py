"""Explorer page: same figures as `check`, no external resources, and commands that give the shown plan."""

import json
import os
import re
import shlex
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.api.exploring import notes_on_missing_options
from planner.api.options.solving import SolverOptions
from planner.api.solver_request import request_of
from planner.core.errors import StaleError
from planner.core.judge.certainty import certainty_of
from planner.core.judge.recut import with_cuts
from planner.core.schedule import SCHEDULES
from planner.core.values.plan import Plan
from planner.core.values.units import pluralize
from planner.show.explore import ExplorerRequest, explore_html
from planner.show.explore.data import page_data
from planner.show.explore.orders import schedule_menu
from planner.show.explore.page import page_script
from planner.show.views.certainty import peak_words, rate_words, step_words
from planner.solve import solve
from tests.support import gate
from tests.support.explorer import (
    NODE,
    Case,
    answers_of,
    edits_of,
    figures_of,
    plan_of_edit,
    question,
    ranges_of,
    reached,
    states_of_addresses,
)
from tests.unit.show.samples import in_a_v, plan, profile, renamed
from tests.unit.show.test_html import EVIL, Page

EDITS = int(os.environ.get("EDITS", "60"))
"""Number of random edits; use a thousand after changes of the cost model."""

needs_node = pytest.mark.skipif(NODE is None, reason="no node on this machine")


def asked(planned: Plan, counts: tuple[int, ...] = (2, 4)) -> ExplorerRequest:
    return ExplorerRequest(plan=planned, profile=profile(), micro_batches=counts, command=("gpipe-plan solve",))


@pytest.mark.slow
@needs_node
def test_random_edits_have_the_figures_of_check(tmp_path: Path) -> None:
    """Times agree up to rounding and bytes exactly, for ten edits of every plan.

    Among equally high peaks, the page and `check` may show different ones. The first complete command of every plan is
    also solved.
    """
    cases = [question(seed) for seed in range(EDITS // 10)]
    edits = [(case, edits_of(case, seed, 10)) for seed, case in enumerate(cases)]
    answered = answers_of(edits, tmp_path)
    num_itemized = 0
    for (case, wanted), answers in zip(edits, answered, strict=True):
        for edit, answer in zip(wanted, answers, strict=True):
            num_itemized += compare(case, edit, answer)
        sayable = (n for n, answer in enumerate(answers) if answer["lines"] and not answer["caveats"])
        for n in islice(sayable, 1):
            solved = solve(case.question.profile, request_of(*typed(case.question, answers[n]["lines"][0])))
            assert figures_of(solved)["step_us"] == pytest.approx(answers[n]["step_us"])
            assert (solved.balance, solved.schedule) == (wanted[n]["balance"], schedule_name(case, wanted[n]))
    assert num_itemized > 0.9 * EDITS


@pytest.mark.slow
@needs_node
def test_long_chains_have_figures_near_their_cuts_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles stop where the figures end, and a remark says so."""
    monkeypatch.setattr("planner.show.explore.data.MOST_BYTES", 4000)
    cases = [question(seed) for seed in range(3)]
    assert all(max(case.widths.values()) < len(case.data["names"]) for case in cases if case.data["devices"] > 1)
    edits = [(case, edits_of(case, seed, 10)) for seed, case in enumerate(cases)]
    for (case, wanted), answers in zip(edits, answers_of(edits, tmp_path), strict=True):
        for edit, answer in zip(wanted, answers, strict=True):
            compare(case, edit, answer)
    seed, case = next((n, each) for n, each in enumerate(cases) if each.data["start"]["balance"][1:])
    first, second = case.data["start"]["balance"][:2]
    moves, width = [(1, first + second - 1)], case.widths[len(case.data["start"]["balance"])]
    edit = {**case.data["start"], "recompute": "never", "scale": 0}
    (at,) = reached(case, edit, moves, tmp_path)
    assert at == {"at": first + width, "isEnd": True}
    assert f"moves by at most {pluralize(width, 'layer')}" in Page(explore_html(case.question)).words
    monkeypatch.undo()
    (free,) = reached(question(seed), edit, moves, tmp_path)
    assert free == {"at": first + second - 1, "isEnd": False}
    assert "moves by at most" not in Page(explore_html(asked(plan()))).words


@pytest.mark.slow
def test_tables_fit_the_size_limit_or_are_minimal(monkeypatch: pytest.MonkeyPatch) -> None:
    widths = []
    for room in range(8000, 64_000, 8000):
        monkeypatch.setattr("planner.show.explore.data.MOST_BYTES", room)
        case = question(6)
        own = len(case.data["start"]["balance"])
        size = len(json.dumps({name: case.data[name] for name in ("sizes", "bytes", "times")}, separators=(",", ":")))
        assert size <= room or case.widths[own] == 1
        widths.append(case.widths[own])
    assert widths[0] == 1
    assert widths[-1] == len(case.data["names"])


def compare(case: Case, edit: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Compare an edit's figures with those of `check`; return True if the memory components are equal too."""
    checked = figures_of(plan_of_edit(case, edit, tuple(answer["memory_bytes"])))
    items = checked.pop("items")
    for name, figure in checked.items():
        is_exact = name in ("recompute", "bytes")
        # The page's times have seven digits.
        assert answer[name] == (figure if is_exact else pytest.approx(figure, rel=1e-6, abs=1e-6)), (name, edit)
    return bool(answer["items"] == items)


def schedule_name(case: Case, edit: dict[str, Any]) -> str:
    return case.data["schedules"][edit["schedule"]]["name"]


def typed(asked_of: ExplorerRequest, line: str) -> tuple[Any, ...]:
    """Return the profile, its reference and the options of a `solve` command."""
    names = {field.name for field in fields(SolverOptions)}
    words, options = iter(shlex.split(line)[3:]), {}
    for word in words:
        name = word.removeprefix("--").replace("-", "_")
        assert name in names, line
        value = True if name == "extrapolate" else next(words)
        options[name] = int(value) if name in ("devices", "batch") else value
    return asked_of.profile, asked_of.plan.inputs.profile, SolverOptions(**options)


def test_explorer_page_is_self_contained() -> None:
    """Names are text, and the only script is the page's own."""
    planned = renamed(plan(), EVIL)
    named = replace(profile(), layers=tuple(replace(x, name=EVIL + x.name) for x in profile().layers))
    text = explore_html(replace(asked(planned), profile=named))
    page = Page(text)
    assert page.links == [link for link in page.links if link.startswith("#")]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert "alert(1)" not in page.words
    assert len(page.ids) == len(set(page.ids))
    assert set(re.findall(r'byId\("([\w-]+)"\)', page_script())) <= {*page.ids, "data"}


@needs_node
def test_address_of_a_view_restores_its_state(tmp_path: Path) -> None:
    case = question(0)
    edits = [edit | {"recompute": "auto"} for edit in edits_of(case, 0, 10)]
    good = f"schedule=gpipe&chunks=1&m=12&recompute=plan&limit=0&cuts={','.join(map(str, case.question.plan.balance))}"
    bad = ["", "timeline", *(re.sub(rf"{name}=[^&]*", f"{name}=x", good) for name in re.findall(r"(\w+)=", good))]
    layers = len(case.data["names"])
    bad += [re.sub("cuts=.*", f"cuts={words}", good) for words in ("", "1", f"0,{layers}", f"-1,{layers + 1}")]
    read, again = states_of_addresses(case, [good, *bad], edits, tmp_path)
    assert again == [{**edit, "balance": [*edit["balance"]]} for edit in edits]
    assert read[0] is not None
    assert read[0]["recompute"] == "as in the plan"
    assert read[1:] == [None] * len(bad)


@needs_node
def test_explorer_and_report_show_the_same_error_ranges(tmp_path: Path) -> None:
    planned = plan(of=profile())
    certainty = certainty_of(planned, profile())
    data = json.loads(page_data(asked(planned)).text)
    peak = max(planned.peak_bytes_by_device())
    figures = {"step_us": planned.predicted.step_us, "samples_per_s": planned.predicted.samples_per_s, "bytes": peak}
    _, step, _, per_s, memory = ranges_of(data, figures, tmp_path)
    assert step in step_words(planned, certainty)
    assert per_s in rate_words(planned, certainty)
    assert memory in peak_words(planned, certainty)
    assert all((step, per_s, memory))
    assert ranges_of(data | {"step_ratios": None, "peak_bound": None}, figures, tmp_path)[1::2] == ["", ""]


def test_explorer_has_action_orders_of_all_schedules() -> None:
    menu = schedule_menu(asked(in_a_v(), (2, 6)))
    listed = {one.schedule.name: one.orders for one in menu.schedules}
    assert set(listed) == set(SCHEDULES)
    assert {name: sorted(chunks) for name, chunks in listed.items()} == {
        name: [schedule.exact_chunks] if schedule.exact_chunks else [2] if schedule.is_chunked else [1]
        for name, schedule in SCHEDULES.items()
    }  # six layers on three devices
    assert sorted(listed["gpipe"][1]) == [2, 6]
    assert sorted(listed["1f1b"][1]) == [6]  # it needs as many micro-batches as stages
    assert [len(text) for (text,) in listed["gpipe"][1][2].devices] == [5] * 3  # with the optimizer's step


def test_long_action_orders_are_omitted_except_the_plans_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("planner.show.explore.orders.MOST_ACTIONS", 50)
    menu = schedule_menu(asked(in_a_v(), (3, 6)))
    assert [(one.schedule.name, {v: [*orders] for v, orders in one.orders.items()}) for one in menu.schedules] == [
        ("zbv", {2: [6]})
    ]
    assert not menu.is_complete
    assert "Very long action orders are left out" in explore_html(asked(in_a_v(), (3, 6)))


@needs_node
def test_action_orders_may_reorder_micro_batches(tmp_path: Path) -> None:
    rows = ("0F1 0F0 0B1 0B0", "1F1 1B1 1F0 1B0")
    case = Case(asked(replace(plan((3, 3), micro_batches=2), schedule="search", order=rows), (2,)))
    (at,) = (n for n, one in enumerate(case.data["schedules"]) if one["is_own"])
    _, devices = case.data["schedules"][at]["orders"]["1"]["2"]
    assert [micro_batches for _, micro_batches in devices] == [[1, 0, 1, 0], [1, 1, 0, 0]]
    edit = {"schedule": at, "chunks": 1, "micro_batches": 2, "balance": (2, 4), "recompute": "auto", "scale": 0}
    ((answer,),) = answers_of([(case, [edit])], tmp_path)
    figures = figures_of(with_cuts(case.question.plan, profile(), (2, 4)))
    del figures["items"]
    assert {name: answer[name] for name in figures} == {name: pytest.approx(of) for name, of in figures.items()}
    assert answer["lines"] == ["gpipe-plan check plan.yaml --balance 2,4"]


def test_explorer_refuses_stale_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    gate.write(tmp_path)
    page = planner.explore("plan.yaml", output="page.html")
    assert Path("page.html").read_text(encoding="utf-8") == page
    with pytest.raises(StaleError):
        planner.explore("plan.yaml", profile=gate.profile(widened=1))


@pytest.mark.parametrize("recomputed", [(), ((0,), (2, 3), (4, 5))], ids=["none of them", "some"])
def test_explorer_explains_that_it_recomputes_whole_stages_only(recomputed: tuple[tuple[int, ...], ...]) -> None:
    planned = plan(recomputed=recomputed)
    layered = replace(planned, inputs=replace(planned.inputs, recompute="layers"))
    assert "some layers of a stage; this page recomputes whole stages only" in Page(explore_html(asked(layered))).words
    assert "`--recompute layers`" in " ".join(notes_on_missing_options(layered))
    plain = plan()
    assert "some layers of a stage" not in Page(explore_html(asked(plain))).words
    assert not [*notes_on_missing_options(plain)]
