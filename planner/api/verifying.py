"""`verify`: run a plan on this machine, or read the report of a run, and compare it with the prediction."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from planner import files
from planner.api import texts
from planner.api.keywords import plan_command
from planner.api.notebooks import enable_notebook_display
from planner.api.options.verifying import VerifyOptions
from planner.api.question import calibrated_solve_options
from planner.api.reading import NOWHERE, ProfileSource, judge_again_from_profile, path_of, plan_of, profile_for
from planner.api.texts import File
from planner.core.errors import MeasurementError, ModelError, UsageError
from planner.core.extras import check_installed
from planner.core.judge.verification import (
    Tolerance,
    Verification,
    core_shortage_reason,
    samples_per_step_if_unplanned,
    verification_of,
)
from planner.core.values.balance import replan_command
from planner.core.values.devices import training_device_kind
from planner.core.values.plan import Plan
from planner.core.values.precision import precision_option_of
from planner.core.values.profile import Profile
from planner.core.values.proof import Proof
from planner.core.values.run_report import RunReport
from planner.device.machine import usable_cores
from planner.emit.native import child_environment, decisions_digest, emit_native

enable_notebook_display(Verification)

if TYPE_CHECKING:
    from planner.model import LoadedModel

_STEPS = 12
"""Default number of steps that `verify` runs."""

_PROOF_S = 30.0
"""Time limit of the equivalence check of the plan's stages, in seconds, approximately."""

_LOSSES_S = 120.0
"""Time limit of the plain training loop with two steps, in seconds."""

_LOSS_ERROR, _LOW_PRECISION_LOSS_ERROR = 1e-3, 3e-2
"""Largest accepted relative differences between losses of train.py and of a plain loop, in the first two steps.

The second value is for precisions other than fp32. Optimizers enlarge rounding errors.
"""

_STOP_S = 30
"""Seconds that torchrun may take to end its processes."""

_HEADER = """\
Measured by `gpipe-plan verify` in a run of a plan. You may edit these values."""


@plan_command(VerifyOptions)
def verify(plan: File | Plan, options: VerifyOptions) -> Verification:
    """Run a plan for a few steps on this machine, and compare measured with predicted values.

    torchrun starts one process per device, and the bundled executor runs the plan. `verify` also compares the results
    of the stages with the unpartitioned model. Predicted and measured peak memory of a device may differ by
    `tolerance_memory`, a share of the measured peak, plus 64 KiB.

    With `run`, `verify` reads the report of a finished run instead, without torch and without a comparison with the
    unpartitioned model.

    Args:
        plan: A plan, or its file.
        options: Options of `verify`.

    Returns:
        Predicted and measured values, and measured costs of this machine for `solve --calibration`.

    Raises:
        MissingPackageError: torch or a package for training is not installed.
        StaleError: The profile differs from the one that the plan was made from.
        UsageError: The executor cannot run the plan, an option is wrong, or the run belongs to another plan.
        MeasurementError: The run failed, or cannot be compared with the plan.
        FileError: A file cannot be read or written.
    """
    written = path_of(options.calibration)
    inputs = (path_of(plan), path_of(options.profile), path_of(options.run))
    files.check_outputs({"--calibration": written}, inputs)
    options.progress("", 0, 0)
    below, above = texts.parse_two_fractions("--tolerance-memory", options.tolerance_memory)
    step = texts.parse_fraction("--tolerance-time", options.tolerance_time)
    tolerance = Tolerance(step=step, memory_below=below, memory_above=above)
    _check_steps(options)
    if written is not None:
        files.check_writable(written)
    loaded_plan, place = plan_of(plan)
    source = profile_for(loaded_plan, place, options.profile)
    now = judge_again_from_profile(loaded_plan, source.profile, place).plan or loaded_plan
    if options.run is None:
        verification = _of_trial(now, source, tolerance, options)
    else:
        report = _report_of(options.run, now, source.profile, place)
        verification = verification_of(now, source.profile, report, tolerance)
    if written is None:
        return verification
    files.write(written, verification.calibration, header=_HEADER)
    again = replan_command(
        source.path,
        calibrated_solve_options(now.inputs, source.profile.device),
        calibration=written,
        plan="plan.yaml" if place == NOWHERE else place,
    )
    return replace(verification, again=again)


def _check_steps(options: VerifyOptions) -> None:
    if options.steps is None:
        return
    if options.run is not None:
        raise UsageError(
            f"`--steps {options.steps}` cannot be used with `--run`, which reads a finished run", hint="remove one"
        )
    if options.steps < 3:
        raise UsageError(f"`--steps {options.steps}`: the first 2 steps warm up, so at least 3 are needed")


def _of_trial(plan: Plan, source: ProfileSource, tolerance: Tolerance, options: VerifyOptions) -> Verification:
    profile, folder = source.profile, str(Path(source.path).parent)
    check_installed("train")
    steps = _STEPS if options.steps is None else options.steps
    report = run_plan(plan, profile, profile_folder=folder, steps=steps, progress=options.progress)
    loaded = _loaded(profile, folder)
    options.progress("equivalence check of the plan's stages", steps, steps)
    proof, wrong = _proof(plan, loaded, partial(_loaded, profile, folder))
    wrong = (*wrong, *_other_losses(plan, loaded, report))
    reason = reason_times_are_invalid(plan, profile)
    return verification_of(plan, profile, report, tolerance, reason_times_are_invalid=reason, proof=proof, wrong=wrong)


def _report_of(run: File | RunReport, plan: Plan, profile: Profile, place: str) -> RunReport:
    report = run if isinstance(run, RunReport) else files.read_run(os.fspath(run))
    name = path_of(run) or "the run"
    if report.plan_digest != decisions_digest(plan):
        raise UsageError(
            f"{name} belongs to another plan than {'this' if place == NOWHERE else place}",
            hint="name the plan that was passed to `emit`; an edited plan is another plan",
        )
    kind = training_device_kind(profile.device.kind)
    if report.device.kind != kind:
        raise UsageError(f"{name} was made on {report.device.kind}, the plan is for {kind}")
    samples = samples_per_step_if_unplanned(report)
    if samples is not None:
        raise MeasurementError(
            f"a step of {name} had {samples:.0f} samples, the plan has {report.batch}: they cannot be compared",
            hint=f"plan for this batch: `gpipe-plan solve --batch {samples:.0f}`",
        )
    return report


def _loaded(profile: Profile, folder: str) -> "LoadedModel":
    from planner.model import reload_model  # noqa: PLC0415 - torch

    source = str(Path(folder, profile.model.source))
    return reload_model(source, profile.model, precision_option_of(profile.environment.dtype))


def _other_losses(plan: Plan, loaded: "LoadedModel", report: RunReport) -> tuple[str, ...]:
    """Return messages about differences between the losses of train.py and of a plain training loop."""
    from planner.executor.equivalence.check import reference_losses  # noqa: PLC0415 - torch

    if report.device.kind != "cpu" or loaded.train_batches is not None:
        return ()
    micro_batches = plan.micro_batches * plan.replicas
    try:
        losses = reference_losses(
            loaded, micro_batches=micro_batches, micro_batch_size=plan.micro_batch_size, limit_s=_LOSSES_S
        )
    except ModelError:  # the equivalence check reports the error, unless the loop was only too slow
        return ()
    most = _LOSS_ERROR if loaded.precision in ("", "fp32") else _LOW_PRECISION_LOSS_ERROR
    return tuple(
        f"the loss of step {step} is {ours:.6g} in the emitted script, and {right:.6g} in a plain loop"
        for step, (ours, right) in enumerate(zip(report.losses, losses, strict=False))
        if not abs(ours - right) <= most * max(abs(right), 1e-30)
    )


def _proof(plan: Plan, loaded: "LoadedModel", load: Callable[[], "LoadedModel"]) -> tuple[Proof, tuple[str, ...]]:
    from planner.executor.equivalence.new_process import check_equivalence_on_cpu  # noqa: PLC0415 - torch

    cuts = tuple(accumulate(plan.balance))[:-1]
    if not cuts:
        return Proof(layers=0, cuts=0, reason="the plan has a single stage"), ()
    checked = check_equivalence_on_cpu(loaded, load, budget_s=_PROOF_S, cuts=cuts)
    checked.raise_if_failed()
    recomputes = any(stage.recompute != "never" for stage in plan.stages)
    differs = checked.proof.differs_recomputed
    return checked.proof, (*checked.warnings, *([f"recomputed, {differs}"] if recomputes and differs else []))


def run_plan(
    plan: Plan, profile: Profile, *, profile_folder: str, steps: int, progress: Callable[[str, int, int], None]
) -> RunReport:
    """Return the report of a run of `train.py`, started with torchrun in a temporary folder.

    Args:
        plan: The plan.
        profile: Profile of the plan.
        profile_folder: Folder of the profile; the path of the model file is relative to this folder.
        steps: Number of optimizer steps.
        progress: Called after every step.

    Raises:
        UsageError: The executor cannot run the plan.
        MeasurementError: The run failed; the message has its error.
    """
    with tempfile.TemporaryDirectory(prefix="gpipe-plan-") as folder:
        emitted = emit_native(plan, profile, folder=folder, profile_folder=profile_folder)
        for name, text in (("balance.yaml", emitted.balance), ("train.py", emitted.script)):
            Path(folder, name).write_text(text, encoding="utf-8")
        report = Path(folder, "run.json")
        count = plan.num_devices * plan.replicas
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        command += [str(Path(folder, "train.py")), "--steps", str(steps), "--report", str(report)]
        output = Path(folder, "stderr.txt")
        with output.open("w", encoding="utf-8") as errors, _started(command, profile, errors.fileno()) as process:
            assert process.stdout is not None
            of_steps = (line.strip() for line in process.stdout if line.startswith("step "))
            for done, line in enumerate(of_steps, start=1):
                progress(line, done, steps)
        if process.returncode != 0 or not report.exists():
            raise _failure(output.read_text(encoding="utf-8", errors="replace"), process.returncode)
        return files.read_run(str(report))


def reason_times_are_invalid(plan: Plan, profile: Profile) -> str:
    """Return why a plan's step times cannot be measured on this machine; empty if they can."""
    if training_device_kind(profile.device.kind) != "cpu":
        return ""
    return core_shortage_reason(plan.num_devices * plan.replicas, profile.environment.threads, usable_cores())


@contextmanager
def _started(command: list[str], profile: Profile, stderr: int) -> Iterator["subprocess.Popen[str]"]:
    own = child_environment(OMP_NUM_THREADS=str(profile.environment.threads))
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=own, stdout=pipe, stderr=stderr, text=True) as process:  # noqa: S603 - ours
        try:
            yield process
            process.wait()
        except BaseException:
            # torchrun passes the signal on to its processes and waits for them.
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise


def _failure(output: str, code: int) -> MeasurementError | UsageError:
    lines = output.splitlines()
    starts = [n for n, line in enumerate(lines) if line.startswith("error: ")]
    if starts:
        hints = [line.removeprefix("hint: ") for line in lines[starts[0] :] if line.startswith("hint: ")]
        return MeasurementError(
            f"the plan does not run here: {lines[starts[0]].removeprefix('error: ')}", hint=hints[0] if hints else ""
        )
    # The error is in the first line without indentation after the first traceback.
    raised = [line for line in lines if line and not line[0].isspace() and "Error: " in line]
    return MeasurementError(
        f"the plan does not run here: {raised[0] if raised else f'torchrun ended with exit code {code}'}",
        hint="use `gpipe-plan emit` and run train.py as its first lines say, to see its output",
    )
