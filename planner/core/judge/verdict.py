"""Check of a plan: its values are computed again from the profile and compared with the values in the file.

The possible findings are listed in `planner.core.values.findings`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from planner.core.cost.costs import covers_size
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import check_partition
from planner.core.cost.width import tensor_parallel_widths
from planner.core.errors import UsageError
from planner.core.judge.certainty import Certainty, MemoryFit, certainty_of, memory_fit, tight_findings
from planner.core.values.devices import Accelerator
from planner.core.values.findings import Finding, Severity, finding
from planner.core.values.plan import Plan, SolverReport, Stage
from planner.core.values.profile import Profile
from planner.core.values.units import format_bytes, pluralize

if TYPE_CHECKING:
    from planner.core.judge.difference import Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of a check: findings, and the plan as evaluated from the current profile."""

    schema: Literal["gpipe-plan/check/v1"] = "gpipe-plan/check/v1"
    fits: bool
    """True if the check passes: no finding is an error or, with `strict`, a warning."""
    findings: tuple[Finding, ...]
    plan: Plan | None
    """Plan with values computed from the profile; None if the profile does not match the plan."""
    strict: bool = False
    """True if warnings count as errors."""
    would_fit: tuple[str, ...] = ()
    """Smallest changes with which the plan would fit, if a stage exceeds its memory limit."""
    difference: "Difference | None" = None
    """Difference from another plan, if one was given."""
    certainty: Certainty | None = None
    """Error ranges of the predictions; None without a plan."""
    memory: MemoryFit | None = None
    """Result for the memory limits; None without a plan."""

    @property
    def failing_severities(self) -> tuple[Severity, ...]:
        """Severities that make the check fail."""
        return ("error", "warning") if self.strict else ("error",)

    @property
    def exceeds_limit(self) -> bool:
        """True if a stage exceeds its memory limit."""
        return any(each.code == "GP101" for each in self.findings)


def judge(
    plan: Plan,
    profile: Profile,
    *,
    profile_digest: str,
    memory_bytes: tuple[int, ...] | None = None,
    device: Accelerator | None = None,
    headroom: float = 0.0,
    strict: bool = False,
) -> Verdict:
    """Evaluate `plan` again from `profile`, and report findings.

    Args:
        plan: Plan as stored.
        profile: Current profile.
        profile_digest: Digest of the profile.
        memory_bytes: Memory limit of each device in bytes; None for the limits of the plan. Ignored with `device`.
        device: Device type to assume for every device; its memory is the limit.
        headroom: Share of the limit that should stay free, in [0, 1).
        strict: True to treat warnings as errors.

    Returns:
        The verdict, with recomputed figures and findings.

    Raises:
        UsageError: The plan breaks an invariant, such as a missing layer or an empty stage.
    """
    stale = profile_digest != plan.inputs.profile.digest
    findings = [_stale(plan, profile_digest)] if stale else []
    misfit = _missing_layers(plan, profile, stale=stale)
    uncovered = stale and not covers_size(profile, plan.micro_batch_size, extrapolate=plan.inputs.extrapolate)
    if misfit is not None or uncovered:
        return _verdict([*findings, *([misfit] if misfit else [])], None, strict=strict)
    if device is not None:
        memory_bytes = (device.memory_bytes,) * plan.inputs.devices
        findings.extend(_elsewhere(profile, device))
    if memory_bytes is not None and len(memory_bytes) != plan.inputs.devices:
        raise UsageError(f"{len(memory_bytes)} memory limits for {plan.inputs.devices} devices")
    inputs = plan.inputs if memory_bytes is None else replace(plan.inputs, memory_bytes=memory_bytes, headroom=0.0)
    evaluation = Evaluation.of(replace(plan, inputs=inputs), profile)
    num_devices = evaluation.cluster.num_devices
    check_partition(evaluation.partition, num_layers=len(profile.layers), num_devices=num_devices)
    now = evaluation.plan(inputs, plan.solver)
    if not is_equal_rounded("step_us", plan.predicted.step_us, now.predicted.step_us):
        # The stored gap and bound belong to other cuts, or to another profile.
        now = evaluation.plan(inputs, SolverReport(method="given", status="given"))
    for chunks in now.by_device():
        findings.extend(_memory_findings(chunks, headroom))
    findings.extend(_equivalence_findings(profile, now))
    if not stale and memory_bytes is None:
        findings.extend(_edited(plan, now))
    findings.extend(_accuracy_findings(now, profile))
    verdict, certainty = _verdict(findings, now, strict=strict), certainty_of(now, profile)
    verdict = with_findings(verdict, tuple(tight_findings(now, certainty)))
    return replace(verdict, certainty=certainty, memory=memory_fit(now, certainty))


def with_findings(verdict: Verdict, findings: Sequence[Finding]) -> Verdict:
    """Return `verdict` with more findings, and with `fits` updated."""
    findings = (*verdict.findings, *findings)
    return replace(
        verdict, findings=findings, fits=all(each.severity not in verdict.failing_severities for each in findings)
    )


def with_difference(verdict: Verdict, before: Plan, *, name_before: str, both_evaluated_again: bool) -> Verdict:
    """Return a verdict with the differences between its plan and the reference plan `before`.

    The verdict also gets findings if a stage needs more memory, or if the plan trains fewer samples per second.

    Args:
        verdict: Result of a check; returned unchanged if it has no plan.
        before: Reference plan.
        name_before: Name of the reference plan.
        both_evaluated_again: True if both plans were evaluated again from their profiles.
    """
    if verdict.plan is None:
        return verdict
    from planner.core.judge.difference import difference_of, growth_findings  # noqa: PLC0415 - rarely needed

    difference = difference_of(before, verdict.plan, name_before=name_before, both_evaluated_again=both_evaluated_again)
    return replace(verdict, difference=difference, findings=(*verdict.findings, *growth_findings(difference)))


def _verdict(findings: list[Finding], plan: Plan | None, *, strict: bool) -> Verdict:
    return with_findings(Verdict(fits=True, findings=(), plan=plan, strict=strict), findings)


def _elsewhere(profile: Profile, device: Accelerator) -> list[Finding]:
    profiled = profile.device
    called = profiled.name or profiled.kind
    if device.matches_name(called):
        return []
    message = f"memory is checked for {device.name}, but times are those of {called}, where the profile was measured"
    return [finding("GP204", message)]


def _equivalence_findings(profile: Profile, plan: Plan) -> list[Finding]:
    proof = profile.proof
    if not profile.model.digest or len(plan.stages) == 1:
        return []
    if proof is None:
        return [finding("GP303", "the stages were not compared with the unpartitioned model", hint="profile again")]
    if not proof.cuts:
        return [finding("GP303", f"the stages were {proof}")]
    findings = [finding("GP304", f"not every cut was compared: {proof}")] if proof.uncovered or proof.reason else []
    recomputed = [stage.index for stage in plan.stages if stage.recompute != "never"]
    if proof.differs_recomputed and recomputed:
        which = ", ".join(map(str, recomputed))
        message = f"stage {which} is recomputed, which trains differently: {proof.differs_recomputed}"
        findings.append(finding("GP302", message, hint="solve again with `--recompute never`", stage=recomputed[0]))
    return findings


def _accuracy_findings(plan: Plan, profile: Profile) -> list[Finding]:
    findings = []
    if profile.device.how != "measured":
        called = profile.device.name or profile.device.kind
        findings.append(finding("GP207", f"the profile is {profile.device.how} for {called}, not measured"))
    if not covers_size(profile, plan.micro_batch_size, extrapolate=False):
        sizes = profile.micro_batch_sizes
        message = (
            f"micro-batches of {plan.micro_batch_size} are outside the profiled sizes {min(sizes)} to {max(sizes)}"
        )
        findings.append(finding("GP208", message))
    return findings


def _stale(plan: Plan, digest: str) -> Finding:
    was = plan.inputs.profile
    message = f"the plan was made from another profile: `{was.path}` was {was.digest[:19]}…, is now {digest[:19]}…"
    hint = f"solve again: `gpipe-plan solve {was.path} --devices {plan.inputs.devices} …`"
    return finding("GP201", message, hint=hint)


def _missing_layers(plan: Plan, profile: Profile, *, stale: bool) -> Finding | None:
    if stale and plan.tensor_parallel not in tensor_parallel_widths(profile):
        message = f"in the plan, {plan.tensor_parallel} GPUs share each layer; the profile has no costs for this number"
        return finding("GP202", message, hint="profile and solve again")
    if sum(plan.balance) == len(profile.layers) and min(plan.balance, default=0) > 0:
        return _renamed(plan, profile)
    if not stale:
        return None
    message = f"the plan cuts {pluralize(sum(plan.balance), 'layer')}, the profile has {len(profile.layers)}"
    return finding("GP202", message, hint="profile and solve again")


def _renamed(plan: Plan, profile: Profile) -> Finding | None:
    names = [layer.name for layer in profile.layers]
    known = set(names)
    for stage, count, end in zip(plan.stages, plan.balance, accumulate(plan.balance), strict=True):
        for name, layer in ((stage.first, end - count), (stage.last, end - 1)):
            # If a user edits only the balance, the names of layers at cuts stay. Only names that the profile lacks are
            # wrong.
            if name not in known:
                message = f'stage {stage.index} names the layer "{name}", the profile has no such layer'
                hint = f'layer {layer} is "{names[layer]}" now: solve again'
                return finding("GP202", message, hint=hint, stage=stage.index)
    return None


def _memory_findings(chunks: Sequence[Stage], headroom: float) -> list[Finding]:
    stage, limit = chunks[0], chunks[0].memory_bytes
    need = sum(chunk.memory.total for chunk in chunks)
    if len(chunks) == 1:
        layers = f'stage {stage.index} ("{stage.first}" to "{stage.last}")'
    else:
        layers = f"device {stage.index} (stages {', '.join(str(chunk.index) for chunk in chunks)})"
    if need > limit:
        over = format_bytes(need - limit)
        message = f"{layers} needs {format_bytes(need)}, {over} over its limit of {format_bytes(limit)}"
        return [finding("GP101", message, hint="solve again, or give more with `--mem`", stage=stage.index)]
    if need > limit * (1 - headroom):
        free = f"{1 - need / limit:.1%} of {format_bytes(limit)}"
        message = f"{layers} needs {format_bytes(need)}, which leaves {free} free"
        hint = f"{100 * headroom:.4g}% headroom was requested"
        return [finding("GP102", message, hint=hint, stage=stage.index)]
    return []


def _edited(plan: Plan, now: Plan) -> list[Finding]:
    was_us, is_us = plan.predicted.step_us, now.predicted.step_us
    changed = [k for k, (a, b) in enumerate(zip(plan.stages, now.stages, strict=True)) if a.memory != b.memory]
    figures = [f"`{place}`" for place in _differing_values(plan, now) if ".memory." not in place]
    if not figures and not changed:
        return []
    message = f"the plan has {was_us / 1e3:.1f} ms per step, the cost model computes {is_us / 1e3:.1f} ms"
    if is_equal_rounded("step_us", was_us, is_us):
        more = f" and {len(figures) - 6} more" if len(figures) > 6 else ""
        listed = ", ".join(figures[:6])
        message = f"values that differ from the cost model's: {listed}{more}" if figures else "memory differs"
    if changed:
        message += f"; memory differs in stage {', '.join(map(str, changed))}"
    return [finding("GP203", message, hint="solve again, unless you edited the plan on purpose")]


def is_equal_rounded(name: str, written: float, computed: float) -> bool:
    """Return True if two values are equal within the rounding of plan files.

    Args:
        name: Name of the field. Times end in `_us` and are rounded to 0.1 us, other values to six decimals.
        written: Value in the file.
        computed: Value from the cost model.
    """
    slack = 0.1 if name.endswith("_us") else 2e-6
    return abs(written - computed) <= slack + 1e-6 * abs(computed)


def checkable_report(written: Plan, verdict: Verdict) -> SolverReport | None:
    """Return a plan's solver report if its claims (status, lower bound, gap, frontier) can be checked; else None.

    Returns:
        The stored report, or one without bounds if the stored step time is wrong. None if the plan does not fit, was
        made from another profile, or claims nothing.
    """
    now, codes = verdict.plan, {each.code for each in verdict.findings}
    if now is None or codes & {"GP101", "GP201"} or now.inputs != written.inputs:
        return None
    claimed = written.solver if written.solver.status == now.solver.status else now.solver
    has_claims = written.frontier or claimed.gap or claimed.lower_bound_us or claimed.named_lower_bound_us
    is_bare = claimed.status == "given" and not has_claims
    return None if is_bare else claimed


def _differing_values(plan: Plan, now: Plan) -> tuple[str, ...]:
    places = [*_differing(plan.predicted, now.predicted, "predicted")]
    for k, (written, computed) in enumerate(zip(plan.stages, now.stages, strict=True)):
        places += _differing(written, computed, f"stages[{k}]")
    return tuple(places)


def certificate_problems(plan: Plan, solver: SolverReport) -> tuple[str, ...]:
    """Return texts on values of the solver's certificate (status, gap, lower bounds) that contradict the plan.

    For example, the lower bound is above the step time, or a plan in `Plan.frontier` is faster than an optimal plan.
    """
    step_us, bound_us, named_us = plan.predicted.step_us, solver.lower_bound_us, solver.named_lower_bound_us
    problems = []
    if solver.status == "given":
        if solver.gap or bound_us or named_us:
            problems.append("given cuts have neither gap nor bound")
        return tuple(problems)
    if bound_us > step_us and not is_equal_rounded("lower_bound_us", bound_us, step_us):
        problems.append(f"the bound of {bound_us / 1e3:.1f} ms is above the step of {step_us / 1e3:.1f} ms")
    if named_us and (solver.status == "optimal" or plan.inputs.schedule != "auto" or named_us <= bound_us):
        problems.append(
            "a bound for named schedules needs `schedule: auto`, a status that is not `optimal`, and a smaller bound"
        )
    if named_us > step_us and not is_equal_rounded("named_lower_bound_us", named_us, step_us):
        problems.append(f"the bound for named schedules, {named_us / 1e3:.1f} ms, is above the step")
    gap = max(0.0, 1 - bound_us / step_us) if step_us else 0.0
    # Step time and bound are rounded to 0.1 us, which changes the gap of very short steps.
    if abs(gap - solver.gap) > 2e-6 + (0.2 / step_us if step_us else 0.0):
        problems.append(f"the stored gap is {solver.gap:.4%}, but step and bound give {gap:.4%}")
    if solver.status == "optimal" and solver.gap > 0:
        problems.append(f"it is marked as optimal with a gap of {solver.gap:.4%}")
    for point in plan.frontier:
        faster = point.fits and point.step_us < step_us and not is_equal_rounded("step_us", point.step_us, step_us)
        if solver.status == "optimal" and faster:
            problems.append(f"M = {point.micro_batches} in its frontier is faster than the optimal plan")
    return tuple(problems)


def _differing(written: Any, computed: Any, at: str) -> Iterator[str]:
    for each in fields(written):
        one, other = getattr(written, each.name), getattr(computed, each.name)
        if is_dataclass(one):
            yield from _differing(one, other, f"{at}.{each.name}")
        elif isinstance(one, (int, float)) and not is_equal_rounded(each.name, one, other):
            yield f"{at}.{each.name}"
