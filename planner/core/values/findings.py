"""What `gpipe-plan check` can find: every code with what it means, why it matters, and what to do.

The one place for these texts: `gpipe-plan explain`, `docs/findings.md`, and the rules in SARIF come from here.
Hundreds group them: 1 memory, 2 plan and profile, 3 profile and model, 4 against another plan.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final, Literal

from planner.core.errors import UsageError

Severity = Literal["error", "warning", "note"]
"""An error makes the answer no; a warning does so with `--strict`; a note never does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One kind of finding."""

    code: str
    severity: Severity
    title: str
    meaning: str
    why: str
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing to know about a plan."""

    code: str
    severity: Severity
    message: str
    hint: str = ""
    stage: int | None = None


RULES: Final = (
    Rule(
        code="GP101",
        severity="error",
        title="a stage needs more memory than its cap",
        meaning="The predicted peak of a stage, reserve included, is above the memory of its device: the cap in "
        "the plan, or the one that `--mem` or `--device` puts in its place.",
        why="Training would end with an out-of-memory error in the first step, on that device, and with it everywhere.",
        remedy="Solve again under this cap: `gpipe-plan solve` finds other cuts, more micro-batches or "
        "recomputation, or says that nothing fits and what would. Otherwise take devices with more "
        "memory, more devices, or a smaller batch. The finding is followed by what would fit, computed "
        "for this plan.",
    ),
    Rule(
        code="GP102",
        severity="warning",
        title="a stage leaves less room than asked for",
        meaning="The stage fits its cap, but less than the share given by `--headroom` stays free.",
        why="Predictions are tested to within a few percent, fragmentation and libraries differ from one "
        "release to the next: a plan that fills a device to the last percent may fail after an upgrade.",
        remedy="Solve with the same headroom (`gpipe-plan solve --headroom 5%`), so that the search keeps it "
        "free. Warnings do not change the exit code; `check --strict` makes them.",
    ),
    Rule(
        code="GP201",
        severity="error",
        title="the plan was made from another profile",
        meaning="The digest of the profile that the plan records is not that of the profile beside it. The digest "
        "is over what the file means: comments and layout do not count, any number does.",
        why="The cuts were the best for other costs. They may no longer fit, and there may be faster ones; "
        "what is said of memory is recomputed from the profile of today.",
        remedy="Solve again with the options of the plan's `inputs`, and commit profile and plan together. If "
        "the profile was changed by mistake, restore it.",
    ),
    Rule(
        code="GP202",
        severity="error",
        title="the profile's layers are not those of the plan",
        meaning="A stage names a layer that the profile does not have, or the number of layers differs.",
        why="The model was changed: a cut by position would now fall elsewhere than intended.",
        remedy="Profile the model of today and solve again.",
    ),
    Rule(
        code="GP203",
        severity="warning",
        title="numbers in the plan are not those of the profile",
        meaning="Recomputed from the very profile that the plan was made from, step time or memory differ from "
        "what is written in the plan.",
        why="Somebody edited the plan by hand, which is allowed: what was checked are the edited cuts. But "
        "the numbers and the solver's certificate in the file belong to others, and people read them.",
        remedy="Nothing, if the edit is meant. To write the numbers anew: `gpipe-plan check --format json`, or "
        "solve with `--balance` set to the edited cuts.",
    ),
    Rule(
        code="GP204",
        severity="note",
        title="times were taken on another device",
        meaning="With `--device` memory is judged for a device other than the profiled one.",
        why="Bytes are nearly the same on any device; times are not. Step time, the bubble and the choice of "
        "cuts still speak of the profiled device.",
        remedy="Profile on that device to plan for it. For the question whether it fits, nothing is to be done.",
    ),
    Rule(
        code="GP205",
        severity="warning",
        title="the plan is not as good as it says",
        meaning="Solved again with the plan's own inputs and number of micro-batches, the certificate does not hold: "
        "the status, the gap, the lower bound or the frontier in the file are others.",
        why="Somebody edited the plan, or another tool wrote it. People read `optimal` and look no further.",
        remedy="Solve again. Cuts that are meant to stay as they are are judged with `solve --balance`.",
    ),
    Rule(
        code="GP206",
        severity="note",
        title="the certificate was not recomputed",
        meaning="Solving the same question again takes longer than a gate may: the plan's status, gap, bound and "
        "frontier are as written in the file. Everything else is recomputed.",
        why="What is written may be true; nobody has looked.",
        remedy="To be sure, solve again.",
    ),
    Rule(
        code="GP207",
        severity="note",
        title="the profile is not measured",
        meaning="Times and memory in the profile are estimated from a model of the device, or come from a compiler.",
        why="The verdict is no surer than they are: an estimate may be wrong by a factor.",
        remedy="Profile on the device before you rely on the numbers.",
    ),
    Rule(
        code="GP208",
        severity="warning",
        title="the plan lies outside the profiled sizes",
        meaning="Its micro-batch size was not profiled, nor lies it between sizes that were: time and memory are "
        "extrapolated.",
        why="Peaks may be under-estimated: what is said to fit may not.",
        remedy="Profile that size too: `gpipe-plan profile --batch-sizes …`, and solve again.",
    ),
    Rule(
        code="GP301",
        severity="error",
        title="the model is no longer the profiled one",
        meaning="The model file given by `--model`, built without weights, differs from the model behind the profile: "
        "a layer came or went, has other parameters, or computes something else.",
        why="Memory and time in the profile are those of the old model. The plan may no longer fit, and the executor "
        "refuses to run it.",
        remedy="Profile the model of today, solve again, and commit both files with the change to the model.",
    ),
    Rule(
        code="GP302",
        severity="error",
        title="a stage is recomputed that then computes something else",
        meaning="When the model was profiled, its stages were compared with the unpartitioned model. Without "
        "recomputation they were equal. With recomputation, loss, gradients, buffers or numbers of modules differed.",
        why="A layer changes what it runs on each time it runs, in a way that cannot be put back (a counter in an "
        "attribute, say). Training would go on with wrong gradients, and nothing would show it.",
        remedy="Solve again: the solver recomputes nothing of such a model. To have recomputation, let the layer keep "
        "what changes in a buffer, which the executor puts back, and profile again.",
    ),
    Rule(
        code="GP303",
        severity="warning",
        title="the stages were not compared with the model",
        meaning="The profile does not say that stages of this model train as the unpartitioned model does. It was "
        "made with `--proof-budget 0s`, or the comparison could not be run.",
        why="A cut can be wrong in ways that only a run shows: training would go on with wrong gradients, and nothing "
        "would show it.",
        remedy="Profile again. If the comparison could not be run, the finding says why. Profiles that were written "
        "by hand have no model to compare with.",
    ),
    Rule(
        code="GP304",
        severity="note",
        title="not every cut was compared with the model",
        meaning="Some cuts, or the optimizer, were not compared with the unpartitioned model, because time or memory "
        "did not suffice. The finding counts them.",
        why="A cut that was not compared can be wrong, and nothing would show it.",
        remedy="Profile with more time (`--proof-budget 300s`) or on a machine with more memory; or build a smaller "
        "instance of the model (`--set layers=4`) and profile that once.",
    ),
    Rule(
        code="GP401",
        severity="note",
        title="a stage needs more memory than before",
        meaning="Compared with the plan given by `--against`, a device's predicted peak has grown.",
        why="It still may fit. But growth that nobody meant is best seen in the change that brings it.",
        remedy="Look at the table of stages: bytes before, now, and the difference. Caps and `--headroom` decide.",
    ),
    Rule(
        code="GP402",
        severity="note",
        title="a step takes longer than before",
        meaning="Compared with the plan given by `--against`, fewer samples per second are predicted.",
        why="A layer has become slower, or the cuts no longer suit the costs.",
        remedy="Look at the table for the stage that grew; solving again may find cuts that make up for it.",
    ),
)

_BY_CODE: Final = {known.code: known for known in RULES}


def rule(code: str) -> Rule:
    """The rule behind a code, in upper or lower case.

    Raises:
        UsageError: There is no such code; the hint names those that come near.
    """
    if code.upper() in _BY_CODE:
        return _BY_CODE[code.upper()]
    near = get_close_matches(code.upper(), _BY_CODE, n=1, cutoff=0.7) or _BY_CODE
    raise UsageError(f"no finding has the code `{code}`", hint=f"one of {', '.join(near)}")


def finding(code: str, message: str, *, hint: str = "", stage: int | None = None) -> Finding:
    """A finding with the severity that its rule gives it."""
    return Finding(code=code, severity=_BY_CODE[code].severity, message=message, hint=hint, stage=stage)
