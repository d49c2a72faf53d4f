"""HTML report: one self-contained file for any names."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from planner.core.cost.evaluate import Evaluation
from planner.core.schedule import KINDS as COMPUTED
from planner.core.values.cluster import Link
from planner.core.values.plan import SolverReport
from planner.show.html import plan_html, profile_html
from planner.show.html.measured import run_section
from planner.show.step import simulated_step
from planner.show.terminal.run import plan_and_run_text
from planner.show.views.memory import COMPONENTS
from tests.unit.show.samples import MIB, explained, interleaved, plan, profile, report, step_of_sample, style, unlike

EVIL = "<script>alert(1)</script>\"'&</style><img src=x onerror=alert(1)>\u202e\x1b"
VOID = {"meta", "br", "wbr", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Parser of a page that records tags, ids, links and text, and fails on unmatched tags."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in {"href", "src", "action", "data", "srcset"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.open and self.open[-1] not in {"script", "style"}:
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def page_of(planned, *, measured=None, profiled=True, stepped=True):
    step = step_of_sample(planned) if stepped else None
    return plan_html(planned, profile() if profiled else None, step, measured, digest="sha256:1234")


PAGES = {
    "plan": lambda: page_of(plan()),
    "explained": lambda: page_of(explained()),
    "interleaved": lambda: page_of(interleaved()),
    "unlike devices": lambda: page_of(unlike()),
    "over its caps": lambda: page_of(plan(cap=1000)),
    "replicas": lambda: page_of(plan(replicas=2)),
    "one stage": lambda: page_of(plan((6,))),
    "with a run": lambda: page_of(plan(), measured=report(plan())),
    "without a profile": lambda: page_of(plan(), measured=report(plan()), profiled=False, stepped=False),
    "a run of other stages": lambda: page_of(plan(), measured=report(plan((3, 3)))),
    "profile": lambda: profile_html(profile()),
}
ALL = pytest.mark.parametrize("make", PAGES.values(), ids=PAGES)


@ALL
def test_tags_match_and_ids_are_unique(make):
    page = Page(make())
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)


@ALL
def test_page_loads_nothing(make):
    """A content security policy forbids loading, too."""
    text = make()
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'<]*", text))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\((?!#)", text)
    assert "default-src 'none'" in text


@ALL
def test_same_values_give_the_same_page(make):
    assert make() == make()


def test_page_is_below_300_kilobytes():
    """K = 8 and M = 32, with transfers, recomputation and a run."""
    names = tuple(f"encoder.layers.{n}.mlp" for n in range(24))
    big = profile(names)
    planned = plan((3,) * 8, micro_batches=32, recompute="always", of=big)
    step = simulated_step(Evaluation.of(planned, big))
    assert len(plan_html(planned, big, step, report(planned), digest="sha256:1").encode()) < 300_000


def test_names_are_escaped_in_the_page():
    evil = profile((EVIL, "b", "c", "d", "e", "f"))
    evil = replace(
        evil, model=replace(evil.model, source=EVIL, settings={EVIL: EVIL}), device=replace(evil.device, name=EVIL)
    )
    planned = plan(of=evil)
    planned = replace(planned, solver=SolverReport(method=EVIL, status="optimal"))
    measured = replace(report(planned), device=replace(report(planned).device, name=EVIL))
    step = step_of_sample(plan())
    for text in (plan_html(planned, evil, step, measured, digest=EVIL), profile_html(evil)):
        page = Page(text)
        assert [attrs for tag, attrs in page.tags if tag == "img"] == []
        assert sum(tag == "script" for tag, _ in page.tags) == 2
        assert all(not name.startswith("on") for _, attrs in page.tags for name in attrs)
        assert "<script>alert(1)</script>" in page.words
        assert "\u202e" not in text
        assert "\x1b" not in text


def test_page_data_have_every_span():
    """The script decodes them to a tenth of a microsecond."""
    planned = plan(recompute="except-last")
    step = step_of_sample(planned)
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page_of(planned))[1])
    kinds = (*(kind.label for kind in COMPUTED.values()), "receive", "optimizer", "send forward", "send backward")
    assert len(data["labels"]) == len(kinds)
    found = set()
    for device, flat in enumerate(data["rows"]):
        at = 0
        for code, micro_batch, gap, duration in zip(*(iter(flat),) * 4, strict=True):
            at += gap
            found.add((device, kinds[code % len(kinds)], micro_batch, at, at + duration))
    wanted = {(s.device, s.kind, s.micro_batch, round(s.start_us * 10), round(s.end_us * 10)) for s in step.spans}
    assert found == wanted
    assert data["again"] == {str(s.index): round(s.forward_us * 10) for s in planned.stages}
    assert data["spared"] == [0, 1, 2]


def test_sections_without_a_profile_explain_how_to_get_them():
    words = Page(page_of(plan(), profiled=False, stepped=False)).words
    assert "The timeline is computed from the profile, which was not found" in words
    assert "The profile, which has the layers, was not found" in words


def test_report_has_no_empty_sections():
    titles = set(re.findall(r"<h2[^>]*>([^<]*)</h2>", page_of(plan())))
    assert titles == {"Assumptions", "Timeline", "Memory", "Stages", "Layers", "Provenance"}


def test_report_begins_with_the_assumptions():
    gbs = Link(bytes_per_s=25e9, latency_us=5.0)
    inputs = replace(plan().inputs, link=gbs, inter_link=replace(gbs, blocking=True), node_devices=2, reserve_bytes=MIB)
    planned = replace(plan(), replicas=2, inputs=replace(inputs, allreduce=gbs, dtype="bf16-mixed", compute=1.25))
    text = page_of(planned)
    box = Page(re.search(r'<section id="assumptions".*?</section>', text, re.DOTALL)[0]).words
    for words in (
        "layer times measured for cuda",
        "multiplied by 1.25 after a calibration",
        "precision bf16-mixed",
        "links within a node 25.0 GB/s, 5.00 us",
        "links between nodes 25.0 GB/s, 5.00 us, not overlapping with compute",
        "gradient reduction 25.0 GB/s, 5.00 us",
        "reserve of each device 1.00 MiB",
    ):
        assert words in box


def test_trade_off_in_the_report_marks_the_plan():
    words = Page(page_of(explained())).words
    assert words.count("◆") == words.count("4 ◆") == 1
    assert "no plan fits" in words


def test_memory_over_the_limit_is_marked_in_words():
    assert Page(page_of(plan(cap=1000))).words.count("! over") == 3


def test_groups_of_gpus_and_headroom_are_explained():
    """A reader of the report alone learns what a device is, and why the limit is below the GPU's memory."""
    planned = replace(plan(), tensor_parallel=8, inputs=replace(plan().inputs, headroom=0.25))
    text = page_of(planned, profiled=False, stepped=False)
    assert "Each device is a group of 8 GPUs that share its layers; memory is of one GPU." in text
    assert "25.0 % of the memory stays free in addition" in text
    assert "is a group of" not in page_of(plan())


def test_report_compares_the_run_with_its_plan():
    words = Page(page_of(plan(), measured=report(plan()))).words
    assert words.count("+10.0 %") >= 6
    assert words.count("-1.0 %") == 3
    assert "The run had other stages" in Page(page_of(plan(), measured=report(plan((3, 3))))).words


def of_two_replicas(planned):
    """Return a run in which the second replica has slower forwards and needs more memory."""
    run = report(planned)
    second = [replace(s, replica=1, forward_us=1.3 * s.forward_us, peak_bytes=s.peak_bytes + MIB) for s in run.stages]
    return replace(run, stages=(*run.stages, *second))


def differences(lines):
    """Return the last cell of each row of a comparison by its first cell."""
    rows = [re.fullmatch(r"(step|(?:forward|backward|peak memory), stage \d).*?([+-][\d.]+ %)", line) for line in lines]
    return {row[1]: row[2] for row in rows if row}


def test_report_compares_the_slowest_replica_with_the_plan():
    planned = plan((3, 3), replicas=2)
    run = of_two_replicas(planned)
    page = page_of(planned, measured=run)
    rows = ["".join(re.findall(r"<td[^>]*>([^<]+)", row)) for row in re.findall("<tr>(.*?)</tr>", page)]
    in_terminal = differences(plan_and_run_text(planned, run, style(120, wrap=False)).splitlines())
    assert len(in_terminal) == 1 + 3 * len(planned.stages)
    assert differences(rows) == in_terminal
    assert in_terminal["forward, stage 1"] == "+43.0 %"
    assert "Measured: the slowest and the largest of the replicas." in Page(page).words


def test_report_shows_losses_that_are_not_numbers():
    assert "nan" in run_section(replace(report(plan()), losses=(8.0, 7.0, float("nan")))).body


def cards(text):
    """Return the small text of each key figure."""
    found = re.search('<dl class="figures">(.*?)</dl>', text, re.DOTALL)
    return re.findall("<small>(.*?)</small>", found[1])


@pytest.mark.parametrize("how", ["estimated", "compiled"])
def test_numbers_that_were_not_measured_are_marked(how):
    """Every card is marked, because a card may be copied alone."""
    measured = plan()
    guessed = replace(measured, inputs=replace(measured.inputs, profile=replace(measured.inputs.profile, how=how)))
    assert all(card.startswith(how) for card in cards(page_of(guessed)))
    assert f"{how}, not measured: profile on the device" in Page(page_of(guessed)).words
    assert not any(how in card for card in cards(page_of(measured)))
    profiled = replace(profile(), device=replace(profile().device, how=how))
    counts, costs = cards(profile_html(profiled))[:2], cards(profile_html(profiled))[2:]
    assert (counts, len(costs)) == (["", ""], 3)
    assert all(card.startswith(how) for card in costs)
    assert f"{how}, not measured: profile on the device" in Page(profile_html(profiled)).words
    assert not any(how in card for card in cards(profile_html(profile())))


def test_every_memory_component_has_its_own_color():
    styled = page_of(plan())
    colours = [re.search(rf"[.]m-{kind}{{--c:(#[0-9a-f]+)", styled) for kind in COMPONENTS]
    assert all(colours)
    assert len({colour[1] for colour in colours}) == len(COMPONENTS)
