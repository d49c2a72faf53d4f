"""`check`: recompute a plan from its profile, and compare its peaks with the memory limits."""

import os
from dataclasses import replace

from planner import files
from planner.api import texts
from planner.api.defaults import headroom_of
from planner.api.keywords import plan_command
from planner.api.notebooks import enable_notebook_display
from planner.api.options.checking import CheckOptions
from planner.api.reading import plan_of, profile_for, resolve_balance
from planner.api.texts import File
from planner.core.errors import UsageError
from planner.core.judge.recut import with_cuts
from planner.core.judge.verdict import Verdict, checkable_report, judge, with_difference, with_findings
from planner.core.values.devices import accelerator
from planner.core.values.findings import Finding, finding
from planner.core.values.plan import Inputs, Plan
from planner.core.values.precision import precision_option_of
from planner.core.values.profile import Profile

enable_notebook_display(Verdict)


@plan_command(CheckOptions)
def check(plan: File | Plan, options: CheckOptions) -> Verdict:
    """Recompute a plan from its profile, and check whether each device's peak is within its memory limit.

    Args:
        plan: A plan, or its file.
        options: Options of `check`.

    Returns:
        The verdict, with `fits`, `findings` and the recomputed plan.

    Raises:
        FileError: A file cannot be read or is invalid.
        UsageError: An option is wrong, a layer of the profile is in no stage, or a stage has no layers.
    """
    if options.mem is not None and options.device is not None:
        raise UsageError("`--mem` and `--device` both set the memory limit", hint="give one of them")
    device = accelerator(options.device) if options.device is not None else None
    loaded_plan, place = plan_of(plan)
    profile = profile_for(loaded_plan, place, options.profile).profile
    memory_bytes = (
        texts.parse_memory_limits(options.mem, loaded_plan.inputs.devices) if options.mem is not None else None
    )
    limits = memory_bytes or ((device.memory_bytes,) if device is not None else loaded_plan.inputs.memory_bytes)
    headroom = headroom_of(options.headroom, profile, limits)
    if options.balance is not None:
        loaded_plan = with_cuts(
            loaded_plan, profile, resolve_balance(options.balance, profile), memory_bytes=memory_bytes
        )
    verdict = judge(
        loaded_plan,
        profile,
        profile_digest=files.digest_of(profile),
        memory_bytes=memory_bytes,
        device=device,
        headroom=headroom,
        strict=options.strict,
    )
    if checkable_report(loaded_plan, verdict) is not None and not files.has_valid_seal(loaded_plan):
        from planner.solve.questions.certificate import check_certificate  # noqa: PLC0415 - few plans need it

        verdict = check_certificate(loaded_plan, verdict, profile)
    if options.model is not None:
        verdict = with_findings(verdict, _changes(os.fspath(options.model), profile))
    if verdict.exceeds_limit and verdict.plan is not None:
        # A plan that fits needs no solver.
        from planner.api.question import solve_command_options  # noqa: PLC0415
        from planner.core.values.balance import replan_command  # noqa: PLC0415
        from planner.solve.questions.remedy import changes_that_fit  # noqa: PLC0415

        def command(inputs: Inputs) -> str:
            return replan_command(inputs.profile.path, solve_command_options(inputs, profile.device))

        verdict = replace(verdict, would_fit=changes_that_fit(verdict.plan, profile, command))
    if options.against is not None:
        from planner.api.comparing import read_plan_for_comparison  # noqa: PLC0415 - rarely needed

        before, recomputed, name = read_plan_for_comparison(options.against, place)
        verdict = with_difference(verdict, before, name_before=name, both_evaluated_again=recomputed)
    return verdict


def _changes(model: str, profile: Profile) -> tuple[Finding, ...]:
    from planner.model import reload_model  # noqa: PLC0415 - torch
    from planner.profile.structure import model_changes  # noqa: PLC0415 - torch

    loaded = reload_model(model, profile.model, precision_option_of(profile.environment.dtype))
    return tuple(
        finding("GP301", f'layer "{change.layer}" {change.message}' if change.layer else change.message)
        for change in model_changes(loaded, profile)
    )
