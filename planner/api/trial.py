"""Run a plan for a few steps on this machine, with torchrun and files in a temporary folder."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from planner.core.errors import MeasurementError, UsageError
from planner.core.judge.verification import core_shortage_reason
from planner.core.values.devices import training_kind
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.core.values.run_report import RunReport
from planner.device.machine import usable_cores
from planner.emit.native import child_environment, emit_native
from planner.files import read_run

_STOP_S = 30
"""Seconds that torchrun may take to end its processes."""


def run_plan(
    plan: Plan, profile: Profile, *, profile_folder: str, steps: int, progress: Callable[[str, int, int], None]
) -> RunReport:
    """Run `train.py`, as `emit` writes it, on this machine and return its report.

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
        return read_run(str(report))


def reason_times_are_invalid(plan: Plan, profile: Profile) -> str:
    """Return why a plan's step times cannot be measured on this machine; empty if they can."""
    if training_kind(profile.device.kind) != "cpu":
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
