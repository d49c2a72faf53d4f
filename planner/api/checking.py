"""`check`: whether a plan still fits, recomputed from its profile."""

import os
from dataclasses import replace

from planner import files
from planner.api import texts
from planner.api.comparing import earlier_plan
from planner.api.reading import File, cuts_of, plan_of, profile_for
from planner.api.texts import Numbers, Sizes
from planner.core.errors import UsageError
from planner.core.judge.figures import claimed_of
from planner.core.judge.recut import with_cuts
from planner.core.judge.verdict import Verdict, compared, judge, with_findings
from planner.core.values.devices import accelerator
from planner.core.values.findings import Finding, finding
from planner.core.values.plan import Plan
from planner.core.values.precision import precision_of
from planner.core.values.profile import Profile

__all__ = ["check"]


def check(
    plan: File | Plan = "plan.yaml",
    *,
    mem: Sizes | None = None,
    device: str | None = None,
    headroom: str | float = "0%",
    balance: Numbers | File | None = None,
    model: File | None = None,
    strict: bool = False,
    against: File | Plan | None = None,
    profile: File | Profile | None = None,
) -> Verdict:
    """Whether a plan still fits, recomputed from its profile; `fits`, `findings`, and the plan as it is now.

    Args:
        plan: A plan, or its file.
        mem: Judge against this cap instead of the plan's.
        device: Judge against the memory of a known accelerator, such as `h100`.
        headroom: Warn if less than this share of a cap stays free.
        balance: Judge these cuts instead of the plan's: layers per stage, or a file that gives them.
        model: `model.py[:ENTRY]`, to tell whether it still is the model that was profiled.
        strict: Whether warnings make the answer no.
        against: Another plan (or its file, or `git:REVISION` for this one as committed) to set this one beside.
        profile: The plan's profile, if it is a value or its file was moved.

    Raises:
        FileError: A file cannot be read or is invalid.
        UsageError: An option is wrong, or the plan is none: layers lost, an empty stage.
    """
    if mem is not None and device is not None:
        raise UsageError("`--mem` and `--device` both say what the cap is", hint="give one of them")
    share = texts.share(headroom)
    known = accelerator(device) if device is not None else None
    read, place = plan_of(plan)
    measured = profile_for(read, place, profile).profile
    memory_bytes = texts.caps(mem, read.inputs.devices) if mem is not None else None
    if balance is not None:
        read = with_cuts(read, measured, cuts_of(balance, measured), memory_bytes=memory_bytes)
    verdict = judge(
        read,
        measured,
        profile_digest=files.digest_of(measured),
        memory_bytes=memory_bytes,
        device=known,
        headroom=share,
        strict=strict,
    )
    if claimed_of(read, verdict) is not None:
        from planner.solve import certified  # noqa: PLC0415 - of cuts that were given there is no certificate

        verdict = certified(read, verdict, measured)
    if model is not None:
        verdict = with_findings(verdict, _changes(os.fspath(model), measured))
    if verdict.is_over and verdict.plan is not None:
        from planner.solve import what_would_fit  # noqa: PLC0415 - a plan that fits is told so without the solver

        verdict = replace(verdict, would_fit=what_would_fit(verdict.plan, measured))
    if against is not None:
        before, recomputed, called = earlier_plan(against, place)
        verdict = compared(verdict, before, against=called, recomputed=recomputed)
    return verdict


def _changes(model: str, profile: Profile) -> tuple[Finding, ...]:
    """A finding for every difference between a model's file of today and the model that was profiled."""
    from planner.model import load_again  # noqa: PLC0415 - torch
    from planner.profile import model_changes  # noqa: PLC0415 - torch

    loaded = load_again(model, profile.model, precision_of(profile.environment.dtype))
    return tuple(
        finding("GP301", f'layer "{change.layer}" {change.message}' if change.layer else change.message)
        for change in model_changes(loaded, profile)
    )
