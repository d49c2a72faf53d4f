"""Findings as SARIF 2.1.0 (OASIS standard), for code scanning and editors."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from planner import __version__
from planner.core.judge.verdict import Verdict
from planner.core.values.findings import RULES, Finding, Rule
from planner.show.gate.plan_file import PlanFile, full_message

SARIF_SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def sarif_log(verdict: Verdict, plan_file: PlanFile) -> str:
    """Return the SARIF log of a `check`, with all rules and a result per finding."""
    driver = {"name": "gpipe-plan", "semanticVersion": __version__, "rules": [_rule(rule) for rule in RULES]}
    run = {
        "tool": {"driver": driver},
        "automationDetails": {"id": f"gpipe-plan check/{plan_file.path}"},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding, verdict, plan_file) for finding in verdict.findings],
    }
    return json.dumps({"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.meaning},
        "help": {"text": f"{rule.why}\n\n{rule.remedy}"},
        "defaultConfiguration": {"level": rule.severity},
    }


def _result(finding: Finding, verdict: Verdict, plan_file: PlanFile) -> dict[str, Any]:
    codes = [rule.code for rule in RULES]
    same = hashlib.sha256(f"{finding.code}:{finding.stage}:{plan_file.path}".encode()).hexdigest()[:32]
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": codes.index(finding.code),
        "level": finding.severity,
        "message": {"text": full_message(finding, verdict)},
        # Identifies the finding in later runs. The message is left out, because its numbers change with the profile.
        "partialFingerprints": {"gpipePlan/v1": same},
    }
    location: dict[str, Any] = {}
    path = Path(plan_file.path)
    if plan_file.is_file:
        location["physicalLocation"] = {
            "artifactLocation": {"uri": path.as_uri() if path.is_absolute() else quote(path.as_posix())},
            "region": {"startLine": plan_file.line(finding)},
        }
    if finding.stage is not None:
        location["logicalLocations"] = [{"name": f"stage {finding.stage}", "kind": "element"}]
    if location:
        result["locations"] = [location]
    return result
