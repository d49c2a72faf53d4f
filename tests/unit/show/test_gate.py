"""Verdicts, comparisons and sweeps in every format: golden texts, and requirements of their readers."""

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import planner
from planner import files
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
from planner.show.terminal.plans import plan_comparison_text, sweep_text
from planner.show.terminal.verdict import verdict_text
from tests.support import gate
from tests.support.golden import assert_golden
from tests.unit.show.samples import style

GOLDEN = Path(__file__).parent / "golden"
PLACE = PlanFile(path="plans/plan.yaml", stage_lines=(21, 22, 23))
WIDE = style(120, wrap=False)


def odd(**changes: object) -> Verdict:
    """Return a verdict whose text has characters that are special in some format."""
    message = 'a|b, c:d%e\nf <g> & "h" \x1b[31m `i` *j* \udc80 \u202e ]]>'.replace("\udc80", "\ufffe")
    finding = Finding(code="GP101", severity="error", message=message, hint="k", stage=1)
    return Verdict(fits=False, findings=(finding,), plan=gate.plan(), **changes)


FORMATS = {
    "verdict.txt": lambda v: verdict_text(v, WIDE) + "\n",
    "verdict.json": lambda v: files.dump(v, as_json=True),
    "verdict.github": lambda v: github_annotations(v, PLACE) + "\n",
    "verdict.junit.xml": lambda v: junit_xml(v, PLACE),
    "verdict.sarif": lambda v: sarif_log(v, PLACE),
    "verdict.md": lambda v: verdict_markdown(v, PLACE),
}


@pytest.mark.parametrize("name", FORMATS)
def test_verdict_equals_its_golden_text(name: str) -> None:
    """The plan is stale, over its limit and larger than before, with suggestions and a difference."""
    assert_golden(GOLDEN / name, FORMATS[name](gate.over_the_cap()))


@pytest.mark.parametrize("name", FORMATS)
def test_fitting_plan_has_an_answer_in_every_format(name: str) -> None:
    """No reader takes the text for a failure."""
    text = FORMATS[name](planner.check(gate.plan(), profile=gate.profile()))
    assert not re.search("GP[0-9]{3} |::error|<failure", text)
    assert text


def test_github_annotations_are_escaped() -> None:
    """Unescaping in the order of the runner gives the message again."""
    line, answer = github_annotations(odd(), PlanFile(path="a,b:c%.yaml", stage_lines=(5, 6))).splitlines()
    found = re.fullmatch(r"::error file=([^,:]*),line=6,title=([^,:]*)::(.*)", line)
    assert found[1] == "a%2Cb%3Ac%25.yaml"
    data = found[3].replace("%0A", "\n").replace("%0D", "\r").replace("%25", "%")
    text = f"{odd().findings[0].message}\nk"
    assert data == "\n".join(map(escape_unprintable, text.split("\n")))
    assert answer == "a,b:c%25.yaml: does not fit (1 error)"


@pytest.mark.parametrize(("severity", "command"), [("error", "error"), ("warning", "warning"), ("note", "notice")])
def test_github_annotations_have_the_severity_of_the_finding(severity: str, command: str) -> None:
    """GitHub calls a note a notice. A plan from standard input has no file."""
    finding = Finding(code="GP203", severity=severity, message="m")
    text = github_annotations(Verdict(fits=True, findings=(finding,), plan=None), PlanFile(path="-"))
    assert text.startswith(f"::{command} title=GP203 ")


def test_junit_has_a_case_for_the_plan_and_one_per_stage() -> None:
    """Notes are not failures."""
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


def test_junit_escapes_unprintable_characters() -> None:
    """XML does not allow all of them."""
    failure = ET.fromstring(junit_xml(odd(), PLACE)).find(".//failure")
    text = "\n".join(map(escape_unprintable, f"{odd().findings[0].message}\nk".split("\n")))
    assert failure.text == text
    assert not {"\x1b", "\ufffe", "\u202e"} & set(text)


def test_warnings_are_failures_with_strict() -> None:
    verdict = planner.check(gate.plan(), profile=gate.profile(), headroom="9%", strict=True)
    assert ET.fromstring(junit_xml(verdict, PLACE)).get("failures") == "1"
    assert verdict_text(verdict, WIDE).endswith("refused, because warnings are errors (1 warning)")


def _check_sarif(log: dict[str, object]) -> None:
    """Check the requirements of SARIF 2.1.0 (sections 3.13, 3.14, 3.18, 3.19, 3.27, 3.49) on the written parts."""
    assert set(log) == {"$schema", "version", "runs"}
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    driver = run["tool"]["driver"]
    assert driver["name"]
    ids = [rule["id"] for rule in driver["rules"]]
    assert len(set(ids)) == len(ids) == len(RULES)
    for rule in driver["rules"]:
        assert rule["shortDescription"]["text"]
        assert rule["fullDescription"]["text"]
        assert rule["help"]["text"]
        assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
    for result in run["results"]:
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
    for verdict in (gate.over_the_cap(), odd()):
        _check_sarif(json.loads(sarif_log(verdict, PlanFile(path=path, stage_lines=(3, 4, 5)))))


def test_sarif_of_standard_input_has_no_file() -> None:
    log = json.loads(sarif_log(odd(), PlanFile(path="-")))
    (result,) = log["runs"][0]["results"]
    assert result["locations"] == [{"logicalLocations": [{"name": "stage 1", "kind": "element"}]}]


def test_sarif_fingerprints_do_not_depend_on_bytes() -> None:
    prints = []
    for widened in (400_000, 500_000):
        verdict = planner.check(gate.plan(), profile=gate.profile(widened))
        results = json.loads(sarif_log(verdict, PLACE))["runs"][0]["results"]
        prints.append([result["partialFingerprints"] for result in results])
    assert prints[0] == prints[1]
    assert prints[0][0] != prints[0][1]


def test_markdown_escapes_names() -> None:
    text = verdict_markdown(odd(), PLACE)
    assert r"a\|b" in text
    assert r"\<g\>" in text
    assert r"\*j\*" in text


def test_comparisons_and_sweeps_equal_their_golden_texts() -> None:
    comparison = planner.compare(gate.plan(), gate.plan(gate.profile(400_000), cap=2_000_000))
    assert_golden(GOLDEN / "compare.txt", plan_comparison_text(comparison, WIDE) + "\n")
    assert_golden(GOLDEN / "compare.md", comparison_markdown(comparison))
    found = planner.sweep(gate.profile(), devices=(1, 2, 3, 8), mem="500kB,900kB,2MB", batch=4)
    assert_golden(GOLDEN / "sweep.txt", sweep_text(found, WIDE) + "\n")
    assert_golden(GOLDEN / "sweep.md", sweep_markdown(found))


def test_comparisons_report_plans_of_different_models() -> None:
    other = replace(gate.plan(), inputs=replace(gate.plan().inputs, model_digest="another"))
    for plan, count in ((gate.plan(), 0), (other, 1)):
        comparison = planner.compare(gate.plan(), plan)
        texts = plan_comparison_text(comparison, WIDE), comparison_markdown(comparison)
        assert [text.count("the plans are not of the same model") for text in texts] == [count, count]


@pytest.mark.parametrize("width", [60, 80, 120])
def test_comparisons_and_sweeps_fit_the_terminal(width: int) -> None:
    narrow = style(width)
    comparison = planner.compare(gate.plan(), gate.plan(gate.profile(400_000), cap=2_000_000))
    found = planner.sweep(gate.profile(), devices=(1, 2, 3), mem="500kB,2MB", batch=4)
    for text in (
        plan_comparison_text(comparison, narrow),
        sweep_text(found, narrow),
        verdict_text(gate.over_the_cap(), narrow),
    ):
        assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("width", [60, 84])
def test_narrow_tables_drop_columns_instead_of_cutting_numbers(width: int) -> None:
    narrow = style(width)
    found = planner.sweep(gate.profile(), devices=(1, 2, 3), mem="500kB,2MB", batch=4, schedule="gpipe")
    comparison = planner.compare(gate.plan(), gate.plan(gate.profile(400_000), cap=2_000_000))
    lines = sweep_text(found, narrow).splitlines()
    assert lines[-3] == "smallest that trains: 1 device with 2MB, 44.4 samples/s"
    assert any(line.split()[:2] == ["3", "2MB"] and "111.1" in line for line in lines)
    assert any("does not fit" in line for line in lines)
    text = plan_comparison_text(comparison, narrow)
    assert re.search(r"^plan 2 .*111\.1", text, re.MULTILINE)
    assert "+781 KiB" in text
