"""Input and output of `gpipe-plan show`."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from planner import files
from planner.cli.console import Console, style_for_stdout
from planner.cli.options import check_format
from planner.core.cost.evaluate import Evaluation
from planner.core.errors import StaleError, UsageError
from planner.core.judge.certainty import certainty_of
from planner.core.judge.verdict import checkable_report, judge
from planner.core.schedule import schedule_of
from planner.core.values.balance import Balance
from planner.core.values.calibration import Calibration
from planner.core.values.links import Links
from planner.core.values.partial import PartialProfile
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.core.values.run_report import RunReport
from planner.emit.native import decisions_digest
from planner.show.step import simulated_step
from planner.show.terminal.links import links_text
from planner.show.terminal.plan import plan_text
from planner.show.terminal.profile import profile_text
from planner.show.terminal.run import plan_and_run_text, run_text

_Shown = Profile | Plan | RunReport | Links


def show_file(
    file: str,
    plan: str | None,
    profile: str | None,
    run: str | None,
    *,
    outputs: Mapping[str, str | None],
    format_: str,
    quiet: bool,
) -> None:
    """Print a file, and write the requested pictures.

    Args:
        file: A profile, a plan, links or a run report.
        plan: Plan to compare with, if `file` is a run report.
        profile: Profile of the plan.
        run: Run report to compare with, if `file` is a plan.
        outputs: Files to write, by option such as `--html`; None for options that were not given.
        format_: Output format.
        quiet: True to leave out notes.

    Raises:
        UsageError: The file is of another kind, or cannot be drawn.
        FileError: A file cannot be read or written.
    """
    console = Console(quiet=quiet)
    as_json = check_format(format_)
    value = files.read(file)
    wanted = {option: path for option, path in outputs.items() if path is not None}
    to_stdout = [option for option, path in wanted.items() if path == "-"]
    if len(to_stdout) > 1 or (to_stdout and as_json):
        taken = " and ".join([*to_stdout, *(["--format json"] if as_json else [])])
        raise UsageError(f"{taken} all go to standard output", hint="name a file")
    if isinstance(value, (Balance, Calibration, PartialProfile)):
        raise _refusal(value, file)
    if run is not None and not isinstance(value, Plan):
        raise UsageError(f"`--run` needs a plan, {file} is none", hint=f"`gpipe-plan show plan.yaml --run {run}`")
    also_read = (files.profile_path(value, file, profile) if isinstance(value, Plan) else profile, plan, run, file)
    files.check_outputs(wanted, also_read)
    for path in wanted.values():
        files.check_writable(path)
    shown, report = _plan_and_report(value, file, plan, run, console=console)
    needs_profile = bool(wanted) or (isinstance(value, Plan) and not as_json)
    source = None
    if shown is not None and needs_profile:
        place = plan or file
        shown, source = _with_profile(value, shown, place, profile=profile, wanted=wanted, console=console)
    text = files.json_text(value) if as_json else _text(value, shown, report, source)
    drawn = _drawn(value, shown, report, source, wanted=wanted) if wanted else {}
    for option, path in wanted.items():
        files.write_text(path, drawn[option])
    if not to_stdout:
        console.result(text)
    for path in wanted.values():
        if path != "-":
            console.note(f"wrote {path}")


def _refusal(value: Balance | Calibration | PartialProfile, file: str) -> UsageError:
    if isinstance(value, Balance):
        hint = "show its plan: `gpipe-plan show plan.yaml`"
        return UsageError(f"{file} is a balance configuration and cannot be shown", hint=hint)
    if isinstance(value, Calibration):
        return UsageError(f"{file} is a calibration", hint=f"plan with it: `gpipe-plan solve --calibration {file}`")
    return UsageError(f"{file} is an unfinished profile", hint="run the same `gpipe-plan profile` again")


def _plan_and_report(
    value: _Shown, file: str, plan: str | None, run: str | None, *, console: Console
) -> tuple[Plan | None, RunReport | None]:
    if isinstance(value, RunReport):
        return _plan_of(value, file, plan, console), value
    if not isinstance(value, Plan):
        return None, None
    report = files.read_run(run) if run is not None else None
    if report is not None and decisions_digest(value) != report.plan_digest:
        console.warning(f"{run} belongs to another plan than {file} and is ignored")
        report = None
    return value, report


def _with_profile(
    value: _Shown, plan: Plan, place: str, *, profile: str | None, wanted: Collection[str], console: Console
) -> tuple[Plan, Profile | None]:
    path = files.profile_path(plan, place, profile)
    if isinstance(value, RunReport) and profile is None and set(wanted) == {"--html"} and not Path(path).exists():
        console.warning(f"{path} does not exist: the report has no timeline and no layers")
        return plan, None
    source = files.read_profile(path)
    return _as_profiled(plan, place, source, console), source


def _text(value: _Shown, plan: Plan | None, report: RunReport | None, source: Profile | None) -> str:
    style = style_for_stdout()
    if isinstance(value, Profile):
        return profile_text(value, style)
    if isinstance(value, Links):
        return links_text(value, style)
    if isinstance(value, RunReport):
        return run_text(value, plan, style)
    assert plan is not None
    assert source is not None
    evaluation = Evaluation.of(plan, source)
    certainty = certainty_of(plan, source)
    text = plan_text(plan, evaluation.events, style, certainty=certainty)
    return text if report is None else f"{text}\n\n{plan_and_run_text(plan, report, style)}"


def _as_profiled(plan: Plan, path: str, profile: Profile, console: Console) -> Plan:
    verdict = judge(plan, profile, profile_digest=files.digest_of(profile))
    if checkable_report(plan, verdict) is not None and not files.has_valid_seal(plan):
        from planner.solve.questions.certificate import check_certificate  # given cuts have no certificate

        verdict = check_certificate(plan, verdict, profile)
    contradictions = [
        finding for finding in verdict.findings if finding.severity != "note" and finding.code[:3] == "GP2"
    ]
    if verdict.plan is None:
        finding = contradictions[-1]
        raise StaleError(finding.message, path=path, hint=finding.hint)
    for finding in contradictions:
        console.warning(f"{finding.code}: {finding.message}; the values shown are computed from the profile")
    return replace(plan, stages=verdict.plan.stages, predicted=verdict.plan.predicted, solver=verdict.plan.solver)


def _drawn(
    value: _Shown, plan: Plan | None, report: RunReport | None, source: Profile | None, *, wanted: Collection[str]
) -> dict[str, str]:
    from planner.show.html import plan_html, profile_html
    from planner.show.svg import timeline_svg
    from planner.show.trace import predicted_trace_json

    if isinstance(value, Links):
        raise UsageError(f"`{next(iter(wanted))}` cannot draw links")
    pictures = [option for option in wanted if option != "--html"]
    if isinstance(value, Profile) and not pictures:
        return {"--html": profile_html(value)}
    if plan is None:
        kind, hint = ("profile", "`gpipe-plan show plan.yaml`") if report is None else ("run report", "`--plan FILE`")
        raise UsageError(f"`{[*pictures, *wanted][0]}` of a {kind} needs a plan", hint=hint)
    step = None if source is None else simulated_step(Evaluation.of(plan, source))
    title = f"{schedule_of(plan.schedule).title}, K = {plan.num_devices}, M = {plan.micro_batches}: one predicted step"
    makers = {"--svg": timeline_svg, "--trace": predicted_trace_json}
    drawn = {} if step is None else {option: makers[option](step, title) for option in pictures}
    if "--html" in wanted:
        drawn["--html"] = plan_html(plan, source, step, report, digest=decisions_digest(plan))
    return drawn


def _plan_of(report: RunReport, report_path: str, plan_path: str | None, console: Console) -> Plan | None:
    beside = Path(report_path).with_name("plan.yaml")
    if plan_path is None and (report_path == "-" or not beside.exists()):
        return None
    plan = files.read_plan(plan_path or str(beside))
    if decisions_digest(plan) != report.plan_digest:
        console.warning(f"{plan_path or beside} is not the plan of this run and is ignored")
        return None
    return plan
