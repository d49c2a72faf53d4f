"""Verdicts, comparisons and sweeps in every form: as they were looked at, and as their readers take them."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from planner import api, files
from planner.core.judge.verdict import Verdict
from planner.core.values.findings import RULES, Finding
from planner.core.values.printable import escape_unprintable
from planner.show.gate import (
    PlanFile,
    comparison_markdown,
    github_annotations,
    junit_xml,
    sarif_log,
    sweep_markdown,
    verdict_markdown,
)
from planner.show.terminal.plans import plans_text, sweep_text
from planner.show.terminal.verdict import verdict_text
from tests.support import gate
from tests.support.golden import assert_golden
from tests.unit.show.samples import style

GOLDEN = Path(__file__).parent / "golden"
PLACE = PlanFile(path="plans/plan.yaml", stage_lines=(21, 22, 23))
WIDE = style(120, wrap=False)


def odd(**changes: object) -> Verdict:
    """A verdict whose text holds whatever could break a format."""
    message = 'a|b, c:d%e\nf <g> & "h" \x1b[31m `i` *j* \udc80 \u202e ]]>'.replace("\udc80", "\ufffe")
    finding = Finding(code="GP101", severity="error", message=message, hint="k", stage=1)
    return Verdict(fits=False, findings=(finding,), plan=gate.plan(), **changes)  # type: ignore[arg-type]


FORMATS = {
    "verdict.txt": lambda v: verdict_text(v, WIDE) + "\n",
    "verdict.json": lambda v: files.dump(v, as_json=True),
    "verdict.github": lambda v: github_annotations(v, PLACE) + "\n",
    "verdict.junit.xml": lambda v: junit_xml(v, PLACE),
    "verdict.sarif": lambda v: sarif_log(v, PLACE),
    "verdict.md": lambda v: verdict_markdown(v, PLACE),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_verdict_looks_as_it_was_looked_at(name: str) -> None:
    """Stale, over a cap, grown, with advice and with a difference: all that there is to show."""
    assert_golden(GOLDEN / name, FORMATS[name](gate.over_the_cap()))


@pytest.mark.parametrize("name", FORMATS)
def test_a_plan_that_fits_is_told_in_every_format(name: str) -> None:
    """No finding, the answer all the same, and nothing that a reader would take for a failure."""
    text = FORMATS[name](api.check(gate.plan(), profile=gate.profile()))
    assert not re.search("GP[0-9]{3} |::error|<failure", text)
    assert text


def test_annotations_are_escaped_as_the_runner_unescapes_them() -> None:
    """One line per finding whatever is in it; unescaped in the runner's order it is the message again."""
    line, answer = github_annotations(odd(), PlanFile(path="a,b:c%.yaml", stage_lines=(5, 6))).splitlines()
    found = re.fullmatch(r"::error file=([^,:]*),line=6,title=([^,:]*)::(.*)", line)
    assert found is not None
    assert found[1] == "a%2Cb%3Ac%25.yaml"
    data = found[3].replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%")
    told = f"{odd().findings[0].message}\nk"
    assert data == "\n".join(map(escape_unprintable, told.split("\n")))
    assert answer == "a,b:c%25.yaml: does not fit (1 error)"


@pytest.mark.parametrize(("severity", "command"), [("error", "error"), ("warning", "warning"), ("note", "notice")])
def test_annotations_have_the_severity_of_the_finding(severity: str, command: str) -> None:
    """GitHub calls a note a notice. A plan from standard input has no file to point at."""
    finding = Finding(code="GP203", severity=severity, message="m")  # type: ignore[arg-type]
    text = github_annotations(Verdict(fits=True, findings=(finding,), plan=None), PlanFile(path="-"))
    assert text.startswith(f"::{command} title=GP203 ")


def test_junit_has_a_case_for_the_plan_and_one_per_stage() -> None:
    """Counts agree with what is there; failures stand in the case of their stage, and notes are no failures."""
    root = ET.fromstring(junit_xml(gate.over_the_cap(), PLACE))
    (suite,) = root
    cases = {case.get("name"): [f.get("type") for f in case.findall("failure")] for case in suite.findall("testcase")}
    assert cases == {
        "plan": ["GP201"],
        "stage 0: h.0 to h.1": [],
        "stage 1: h.2 to h.3": ["GP101"],
        "stage 2: h.4 to h.5": [],
    }
    assert root.tag == "testsuites"
    for element in (root, suite):
        assert (element.get("tests"), element.get("failures"), element.get("errors")) == ("4", "2", "0")
    assert "GP401 note" in "".join(suite.itertext())


def test_junit_holds_any_text() -> None:
    """Characters that do not print, which XML may have no place for, are spelled out; all others are as they were."""
    failure = ET.fromstring(junit_xml(odd(), PLACE)).find(".//failure")
    assert failure is not None
    text = "\n".join(map(escape_unprintable, f"{odd().findings[0].message}\nk".split("\n")))
    assert failure.text == text
    assert not {"\x1b", "\ufffe", "\u202e"} & set(text)


def test_with_strict_a_warning_is_a_failure() -> None:
    """The formats agree with the exit code."""
    verdict = api.check(gate.plan(), profile=gate.profile(), headroom="9%", strict=True)
    assert ET.fromstring(junit_xml(verdict, PLACE)).get("failures") == "1"
    assert verdict_text(verdict, WIDE).endswith("refused, because warnings are errors (1 warning)")


def _check_sarif(log: dict[str, object]) -> None:
    """What SARIF 2.1.0 requires (sections 3.13, 3.14, 3.18, 3.19, 3.27, 3.49), of the parts that we write."""
    assert set(log) == {"$schema", "version", "runs"}
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]  # type: ignore[misc]
    driver = run["tool"]["driver"]  # type: ignore[index]
    assert driver["name"]
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(set(ids)) == len(ids) == len(RULES)
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
        assert rule["fullDescription"]["text"]
        assert rule["help"]["text"]
        assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
    for result in run["results"]:  # type: ignore[index]
        assert set(result) <= {"ruleId", "ruleIndex", "level", "message", "locations", "partialFingerprints"}
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]
        for location in result.get("locations", ()):
            physical = location["physicalLocation"]
            assert physical["region"]["startLine"] >= 1
            assert re.fullmatch(r"[A-Za-z0-9._~/%:-]+", physical["artifactLocation"]["uri"])


@pytest.mark.parametrize("path", ["plan.yaml", "/abs/plan.yaml", "a b/plän#1.yaml"])
def test_sarif_has_the_structure_of_the_standard(path: str) -> None:
    """Levels, rules by index, locations with URIs; whatever the file is called."""
    for verdict in (gate.over_the_cap(), odd()):
        _check_sarif(json.loads(sarif_log(verdict, PlanFile(path=path, stage_lines=(3, 4, 5)))))


def test_sarif_of_standard_input_points_nowhere() -> None:
    """There is no file; the stage is named all the same."""
    log = json.loads(sarif_log(odd(), PlanFile(path="-")))
    (result,) = log["runs"][0]["results"]
    assert result["locations"] == [{"logicalLocations": [{"name": "stage 1", "kind": "element"}]}]


def test_sarif_fingerprints_outlive_the_numbers() -> None:
    """The same stage over the same cap by other bytes is the same alert."""
    prints = []
    for widened in (400_000, 500_000):
        verdict = api.check(gate.plan(), profile=gate.profile(widened))
        results = json.loads(sarif_log(verdict, PLACE))["runs"][0]["results"]
        prints.append([result["partialFingerprints"] for result in results])
    assert prints[0] == prints[1]
    assert prints[0][0] != prints[0][1]


def test_markdown_takes_names_literally() -> None:
    """A bar does not end a cell, and nothing of a name is markup."""
    text = verdict_markdown(odd(), PLACE)
    assert r"a\|b" in text
    assert r"\<g\>" in text
    assert r"\*j\*" in text


def test_comparisons_and_sweeps_look_as_they_were_looked_at() -> None:
    """Two plans, with what differs per stage; clusters, with those that do not fit."""
    comparison = api.compare(gate.plan(), gate.plan(gate.profile(400_000), cap=2_000_000))
    assert_golden(GOLDEN / "compare.txt", plans_text(comparison, WIDE) + "\n")
    assert_golden(GOLDEN / "compare.md", comparison_markdown(comparison))
    found = api.sweep(gate.profile(), devices=(1, 2, 3, 8), mem="500kB,900kB,2MB", batch=4)
    assert_golden(GOLDEN / "sweep.txt", sweep_text(found, WIDE) + "\n")
    assert_golden(GOLDEN / "sweep.md", sweep_markdown(found))


@pytest.mark.parametrize("width", [60, 80, 120])
def test_pictures_keep_within_the_terminal(width: int) -> None:
    """Comparison, sweep and difference."""
    narrow = style(width)
    comparison = api.compare(gate.plan(), gate.plan(gate.profile(400_000), cap=2_000_000))
    found = api.sweep(gate.profile(), devices=(1, 2, 3), mem="500kB,2MB", batch=4)
    for text in (
        plans_text(comparison, narrow),
        sweep_text(found, narrow),
        verdict_text(gate.over_the_cap(), narrow),
    ):
        assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [60, 84])
def test_numbers_are_never_broken(width: int) -> None:
    """Where there is no room a column goes, and what stays is whole; the plan and the rate always stay."""
    narrow = style(width)
    found = api.sweep(gate.profile(), devices=(1, 2, 3), mem="500kB,2MB", batch=4, schedule="gpipe")
    comparison = api.compare(gate.plan(), gate.plan(gate.profile(400_000), cap=2_000_000))
    lines = sweep_text(found, narrow).splitlines()
    assert lines[-3] == "smallest that trains: 1 device with 2MB, 44.4 samples/s"
    assert any(line.split()[:2] == ["3", "2MB"] and "111.1" in line for line in lines)
    assert any("does not fit" in line for line in lines)
    text = plans_text(comparison, narrow)
    assert re.search(r"^plan 2 .*111\.1", text, re.MULTILINE)
    assert "+781 KiB" in text
