"""Verdict as JUnit XML, which nearly every CI server shows: a test case for the plan and one for each stage."""

from collections.abc import Iterable
from xml.etree import ElementTree as ET

from planner.core.judge.verdict import Verdict
from planner.core.values.findings import Finding, rule_of_code
from planner.core.values.plan import Stage
from planner.core.values.printable import escape_unprintable
from planner.core.values.units import format_bytes
from planner.show.gate.plan_file import PlanFile, full_message

_SUITE = "gpipe-plan check"


def junit_xml(verdict: Verdict, plan_file: PlanFile) -> str:
    """Return the verdict as a test suite, in which findings that make `check` fail are failures."""
    cases = [_case("plan", _of_stage(verdict, None), verdict, plan_file)]
    for stage in verdict.plan.stages if verdict.plan is not None else ():
        name = f"stage {stage.index}: {stage.first} to {stage.last}"
        cases.append(_case(name, _of_stage(verdict, stage.index), verdict, plan_file, stage=stage))
    failures = sum(case.find("failure") is not None for case in cases)
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": "0", "skipped": "0", "time": "0"}
    suites = ET.Element("testsuites", {"name": _SUITE, **counts})
    suite = ET.SubElement(suites, "testsuite", {"name": _xml(plan_file.path), **counts})
    suite.extend(cases)
    ET.indent(suites)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def _of_stage(verdict: Verdict, stage: int | None) -> list[Finding]:
    return [finding for finding in verdict.findings if finding.stage == stage]


def _case(
    name: str, findings: Iterable[Finding], verdict: Verdict, plan_file: PlanFile, *, stage: Stage | None = None
) -> ET.Element:
    case = ET.Element("testcase", {"classname": _xml(plan_file.path), "name": _xml(name), "time": "0"})
    if plan_file.is_file:
        case.set("file", _xml(plan_file.path))
    said = [f"{format_bytes(stage.memory.total)} of {format_bytes(stage.memory_bytes)}"] if stage is not None else []
    for finding in findings:
        text = full_message(finding, verdict)
        if finding.severity in verdict.failing_severities:
            attributes = {"type": finding.code, "message": _xml(f"{finding.code} {rule_of_code(finding.code).title}")}
            ET.SubElement(case, "failure", attributes).text = _xml(text)
        else:
            said.append(f"{finding.code} {finding.severity}: {text}")
    if said:
        ET.SubElement(case, "system-out").text = _xml("\n".join(said))
    return case


def _xml(text: str) -> str:
    # XML 1.0 allows no control characters, not even escaped ones (section 2.2). Bidirectional characters would change
    # what viewers show.
    return "\n".join(map(escape_unprintable, text.split("\n")))
