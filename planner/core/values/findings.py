"""Findings of `gpipe-plan check`: the meaning, severity and remedy of every code.

`gpipe-plan explain`, `docs/findings.md` and the SARIF rules take their texts from here. The first digit of a code is
its topic: 1 memory, 2 plan and profile, 3 profile and model, 4 comparison with another plan.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, Literal

from planner.core.errors import UsageError

Severity = Literal["error", "warning", "note"]
"""Severity: an error makes `check` fail; a warning does so with `--strict`; a note never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Kind of problem or remark that `gpipe-plan check` reports: its code, severity and texts."""

    code: str
    severity: Severity
    title: str
    meaning: str
    why: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Problem or remark about a plan."""

    code: str
    severity: Severity
    message: str
    hint: str = ""
    stage: int | None = None


RULES: Final = (
    Rule(
        code="GP101",
        severity="error",
        title="a stage needs more memory than its limit",
        meaning="The predicted peak of a stage, reserve included, exceeds the memory limit of its device: the limit in "
        "the plan, or the one given by `--mem` or `--device`.",
        why="Training would stop with an out-of-memory error on that device in the first step.",
        remedy="Solve again under this limit: `gpipe-plan solve` finds other cuts, more micro-batches or "
        "recomputation, or reports what would fit. Otherwise use devices with more "
        "memory, more devices, or a smaller batch. The finding also lists the smallest changes of "
        "this plan that would fit.",
    ),
    Rule(
        code="GP102",
        severity="warning",
        title="a stage leaves less memory free than requested",
        meaning="The stage fits its memory limit, but a smaller share of the limit than `--headroom` stays free.",
        why="Predictions are accurate to a few percent, and fragmentation and libraries differ between "
        "releases. A plan that fills a device completely may run out of memory after an upgrade.",
        remedy="Solve with the same headroom (`gpipe-plan solve --headroom 5%`), so that the search keeps "
        "this share free. Warnings change the exit code only with `check --strict`.",
    ),
    Rule(
        code="GP103",
        severity="note",
        title="the largest expected peak of a device is above its memory",
        meaning="The predicted peak fits, but its upper bound does not. This bound includes the largest errors of "
        "earlier predictions, and memory that PyTorch reserves in addition. The verdict is `tight`.",
        why="Training may stop with an out-of-memory error on that device.",
        remedy="Solve with `--headroom auto`, or compare a short run with the plan: `gpipe-plan verify`.",
    ),
    Rule(
        code="GP201",
        severity="error",
        title="the plan was made from another profile",
        meaning="The plan records the digest of its profile. The given profile has another digest. The digest "
        "depends on the values in the file, not on comments and layout.",
        why="The cuts were the best for other costs. They may no longer fit, and other cuts may be faster. "
        "`check` computes the reported memory from the given profile, not from that of the plan.",
        remedy="Solve again with the options of the plan's `inputs`, and commit profile and plan together. If "
        "the profile was changed by mistake, restore it.",
    ),
    Rule(
        code="GP202",
        severity="error",
        title="the profile's layers are not those of the plan",
        meaning="A stage names a layer that the profile does not have, or the number of layers differs.",
        why="The model was changed, so a cut by position may now be at the wrong layer.",
        remedy="Profile the current model and solve again.",
    ),
    Rule(
        code="GP203",
        severity="warning",
        title="numbers in the plan differ from the cost model's",
        meaning="Step time or memory in the plan differ from the values that the cost model computes from the "
        "plan's profile.",
        why="Usually the plan was edited by hand. This is allowed, and the edited cuts were checked. But "
        "the numbers and the lower bounds in the file belong to the original cuts.",
        remedy="If the edit is intended, nothing needs to be done. To get the new numbers, use "
        "`gpipe-plan check --format json`, or solve with `--balance` set to the edited cuts.",
    ),
    Rule(
        code="GP204",
        severity="note",
        title="times were measured on another device",
        meaning="`--device` names a device other than the profiled one; memory is checked for that device.",
        why="Memory is nearly the same on any device, but times differ. Step time, bubble and "
        "cuts still refer to the profiled device.",
        remedy="To plan for the device that you name, profile on it. If you check memory only, you need not do "
        "anything.",
    ),
    Rule(
        code="GP205",
        severity="warning",
        title="the plan is not as good as its certificate states",
        meaning="Solving again with the plan's inputs and number of micro-batches contradicts the status, the gap, the "
        "lower bound or the frontier in the file.",
        why="The plan was edited, or written by another tool. Readers rely on the word `optimal`.",
        remedy="Solve again. To evaluate fixed cuts, use `solve --balance`.",
    ),
    Rule(
        code="GP206",
        severity="note",
        title="the certificate was not recomputed",
        meaning="Solving again takes too long, or needs a missing package. The plan's status, gap, bound and "
        "frontier were read from the file. Everything else was recomputed.",
        why="These values may be correct, but they were not verified.",
        remedy="To be sure, solve again.",
    ),
    Rule(
        code="GP207",
        severity="note",
        title="the profile is not measured",
        meaning="Times and memory in the profile are estimated from a model of the device, or come from a compiler.",
        why="The verdict is only as reliable as the profile. An estimated time may be several times too short or too "
        "long.",
        remedy="Profile on the device before you rely on the numbers.",
    ),
    Rule(
        code="GP208",
        severity="warning",
        title="the micro-batch size is outside the profiled range",
        meaning="The plan's micro-batch size is not within the range of profiled sizes. Time and memory are "
        "extrapolated.",
        why="Peaks may be underestimated, so a stage reported as fitting may not fit.",
        remedy="Profile that size too: `gpipe-plan profile --batch-sizes …`, and solve again.",
    ),
    Rule(
        code="GP301",
        severity="error",
        title="the model is no longer the profiled one",
        meaning="The model file given by `--model`, built without weights, differs from the model behind the profile: "
        "a layer was added, removed or changed, or computes something else. If layers have the same names, classes and "
        "shapes as before, changed operators are found only if the profile was made on a CPU with the same version of "
        "torch.",
        why="Memory and time in the profile, and the result of the equivalence check, are those of the old model. The "
        "plan may no longer fit. If names, classes or shapes have changed, `train.py` refuses to run.",
        remedy="Profile the current model, solve again, and commit both files with the change to the model.",
    ),
    Rule(
        code="GP302",
        severity="error",
        title="a recomputed stage computes a different result",
        meaning="When the model was profiled, its stages were compared with the unpartitioned model. Without "
        "recomputation, the results were equal. With recomputation, loss, gradients, buffers or module attributes "
        "differed.",
        why="A layer changes state in each forward, and the executor cannot restore this state (such as its own random "
        "generator, or a counter in a dict). Training would continue with wrong gradients, without an error message.",
        remedy="The plan was edited, or the model has changed. Solve again: the solver recomputes no stage of such a "
        "model. To allow recomputation, let the layer use the global random generators, and store other state in a "
        "buffer, which the executor restores. Then profile again.",
    ),
    Rule(
        code="GP303",
        severity="warning",
        title="the stages were not compared with the model",
        meaning="No result in the profile shows that stages of this model train as the unpartitioned model does. The "
        "profile was made with `--proof-budget 0s`, or the comparison took too much time or memory.",
        why="Some wrong cuts are found only by comparing a run with the model. Without the comparison, training would "
        "continue with wrong gradients and without an error message.",
        remedy="Profile again. If the comparison was not finished, the finding gives the reason. Profiles written "
        "by hand have no model to compare with.",
    ),
    Rule(
        code="GP304",
        severity="note",
        title="not every cut was compared with the model",
        meaning="Some cuts, or the optimizer, were not compared with the unpartitioned model, because time or memory "
        "ran out. The finding gives the number of compared cuts.",
        why="Stages at a cut that was not compared may train with wrong gradients, without an error message.",
        remedy="Profile with more time (`--proof-budget 300s`), or on a machine with more memory. Or profile the model "
        "with fewer layers of the same kinds (`--set layers=4`). This smaller model has the same kinds of cuts, so its "
        "comparison is evidence for the large model, too, but `check` still reports this note.",
    ),
    Rule(
        code="GP401",
        severity="note",
        title="a stage needs more memory than before",
        meaning="Compared with the plan given by `--against`, the predicted memory of a stage has grown.",
        why="The stage may still be within its memory limit. Unintended growth is best noticed in the change that "
        "causes it.",
        remedy="Read the table of stages that `check` prints: bytes before, now, and the difference. This note does "
        "not make the check fail. Memory makes the check fail only if a stage exceeds its limit or, with "
        "`--strict`, leaves less memory free than `--headroom`.",
    ),
    Rule(
        code="GP402",
        severity="note",
        title="a step takes longer than before",
        meaning="Compared with the plan given by `--against`, fewer samples per second are predicted.",
        why="A layer has become slower, or the cuts no longer suit the costs.",
        remedy="In the table of stages, find the stage whose time has grown. Solving again may find better cuts.",
    ),
)

_BY_CODE: Final = {known.code: known for known in RULES}


def rule_of_code(code: str) -> Rule:
    """Return the rule with the code of a finding, such as `GP103` or `gp103`.

    Raises:
        UsageError: There is no such code; the hint lists similar codes.
    """
    if code.upper() in _BY_CODE:
        return _BY_CODE[code.upper()]
    near = get_close_matches(code.upper(), _BY_CODE, n=1, cutoff=0.7) or _BY_CODE
    raise UsageError(f"no finding has the code `{code}`", hint=f"one of {', '.join(near)}")


def finding(code: str, message: str, *, hint: str = "", stage: int | None = None) -> Finding:
    """Return a finding with the severity of its rule.

    Args:
        code: Code of the rule.
        message: Text of the finding.
        hint: Suggested action, if any.
        stage: Index of the stage, if the finding concerns one.
    """
    return Finding(code=code, severity=_BY_CODE[code].severity, message=message, hint=hint, stage=stage)
