"""Asks a TPU's compiler what a plan's program needs: emitted into a temporary folder, compiled there by itself."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from planner.api.processes import environment
from planner.core.errors import ExitCode
from planner.core.extras import absent_from
from planner.core.values.devices import tpu_called
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile
from planner.emit import Places, emit_jax


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerAnswer:
    """What came of it."""

    fits: bool
    text: str
    """The compiler's report, beside the prediction and the cap; or why there is none."""


def can_ask(profile: Profile) -> bool:
    """Whether the profile is for a TPU that programs can be compiled for here; nothing is imported for it."""
    is_compiled = profile.device.how == "compiled" and bool(tpu_called(profile.device.name))
    return is_compiled and not absent_from("train") and not absent_from("tpu")


def ask_compiler(plan: Plan, profile: Profile, *, profile_folder: str) -> CompilerAnswer:
    """Whether the program of `plan` fits its cap and the chip, by `train_jax.py --compile` in a process of its own.

    `profile_folder` is where the profile stands, which the model's path in it is relative to.

    Raises:
        UsageError: One program cannot run the plan.
    """
    with tempfile.TemporaryDirectory(prefix="gpipe-plan-") as folder:
        emitted = emit_jax(
            plan, profile, folder=folder, profile_folder=profile_folder, places=Places(), compiled="asked"
        )
        emitted.write(folder)
        command = [sys.executable, str(Path(folder, emitted.name)), "--compile", tpu_called(profile.device.name)]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)  # noqa: S603 - ours
    if done.returncode in {ExitCode.OK, ExitCode.NO} and "every device: " in done.stdout:
        report = "; ".join(done.stdout.strip().splitlines())
        return CompilerAnswer(fits=done.returncode == ExitCode.OK, text=f"the TPU's compiler says: {report}")
    errors = [line for line in done.stderr.splitlines() if "rror: " in line]
    why = errors[-1].removeprefix("error: ") if errors else f"it ended with exit code {done.returncode}"
    return CompilerAnswer(fits=False, text=f"the TPU's compiler gave no answer: {why}")
