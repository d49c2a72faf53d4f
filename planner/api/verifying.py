"""`verify`: runs a plan on this machine, and sets what it took beside its prediction."""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from planner import files
from planner.api import texts
from planner.api.reading import File, Progress, fresh_verdict, path_of, plan_of, profile_for
from planner.core.errors import UsageError
from planner.core.judge.verification import Tolerance, Verification, verification_of
from planner.core.values.plan import Plan
from planner.core.values.precision import precision_of
from planner.core.values.profile import Profile
from planner.core.values.proof import Proof

__all__ = ["verify"]

_PROOF_S = 30.0
"""How long `verify` holds the plan's stages against the model in one piece, about."""

_HEADER = """\
Measured by `gpipe-plan verify` in a run of a plan; what a person knows better may be edited."""


def verify(
    plan: File | Plan = "plan.yaml",
    *,
    profile: File | Profile | None = None,
    steps: int = 12,
    tolerance_time: str | float = "10%",
    tolerance_memory: str | Sequence[str | float] = "1%,5%",
    calibration: File | None = None,
    progress: Progress = lambda *_: None,
) -> Verification:
    """Runs a plan for a few steps on this machine and sets what it took beside what was predicted.

    Starts torchrun with a process for every device of the plan, on the bundled executor.

    Args:
        plan: A plan, or its file.
        profile: The plan's profile, if it is a value or its file was moved.
        steps: Optimizer steps; the first two warm up.
        tolerance_time: How far the step time may be off.
        tolerance_memory: How far a predicted peak may lie below the measured one, and how far above it; 64 KiB are
            allowed in any case.
        calibration: Where to write what the run says of the machine, for `solve`.
        progress: Called after every step.

    Raises:
        StaleError: The plan was made from another profile.
        UsageError: The executor cannot run such a plan, or an option is wrong.
        MeasurementError: The run failed.
        FileError: A file cannot be read or written.
    """
    from planner.api.trial import crowding, run_plan  # noqa: PLC0415 - only here

    below, above = texts.two_shares("--tolerance-memory", tolerance_memory)
    tolerance = Tolerance(step=texts.share(tolerance_time), memory_below=below, memory_above=above)
    if steps < 3:
        raise UsageError(f"`--steps {steps}`: the first 2 steps warm up, so at least 3 are needed")
    written = path_of(calibration)
    if written is not None:
        files.check_outputs({"--calibration": written}, (path_of(plan), path_of(profile)))
        files.check_writable(written)
    read, place = plan_of(plan)
    source = profile_for(read, place, profile)
    now = fresh_verdict(read, source.profile, place).plan or read
    folder = str(Path(source.path).parent)
    report = run_plan(now, source.profile, profile_folder=folder, steps=steps, progress=progress)
    proof, wrong = _proof(now, source.profile, folder)
    crowded = crowding(now, source.profile)
    verification = verification_of(now, source.profile, report, tolerance, crowded=crowded, proof=proof, wrong=wrong)
    if written is not None:
        files.write(written, verification.calibration, header=_HEADER)
    return verification


def _proof(plan: Plan, profile: Profile, folder: str) -> tuple[Proof, tuple[str, ...]]:
    """What the plan's stages compute, held against the model in one piece; and what they do not compute as it does."""
    from planner.executor import prove  # noqa: PLC0415 - torch
    from planner.model import load_again  # noqa: PLC0415 - torch

    ends = tuple(accumulate(plan.balance))[:-1]
    source = str(Path(folder, profile.model.source))
    loaded = load_again(source, profile.model, precision_of(profile.environment.dtype))
    found = prove(loaded, budget_s=_PROOF_S, ends=ends)
    recomputes = any(stage.recompute != "never" for stage in plan.stages)
    differs = found.proof.differs_recomputed
    return found.proof, (*found.warnings, *([f"recomputed, {differs}"] if recomputes and differs else []))
