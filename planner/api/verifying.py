"""`verify`: runs a plan on this machine, and sets what it took beside its prediction."""

from itertools import accumulate
from pathlib import Path

from planner import files
from planner.api import texts
from planner.api.keywords import on_plan
from planner.api.options import VerifyOptions
from planner.api.reading import File, fresh_verdict, path_of, plan_of, profile_for
from planner.core.errors import UsageError
from planner.core.judge.verification import Tolerance, Verification, verification_of
from planner.core.values.plan import Plan
from planner.core.values.precision import precision_of
from planner.core.values.profile import Profile
from planner.core.values.proof import Proof

_PROOF_S = 30.0
"""How long `verify` holds the plan's stages against the model in one piece, about."""

_HEADER = """\
Measured by `gpipe-plan verify` in a run of a plan; what a person knows better may be edited."""


@on_plan(VerifyOptions)
def verify(plan: File | Plan, options: VerifyOptions) -> Verification:
    """Runs a plan for a few steps on this machine and sets what it took beside what was predicted.

    Starts torchrun with a process for every device of the plan, on the bundled executor. A
    peak may be off by 64 KiB in any case.

    Args:
        plan: A plan, or its file.
        options: What is asked.

    Raises:
        StaleError: The plan was made from another profile.
        UsageError: The executor cannot run such a plan, or an option is wrong.
        MeasurementError: The run failed.
        FileError: A file cannot be read or written.
    """
    from planner.api.trial import crowding, run_plan  # noqa: PLC0415 - only here

    written = path_of(options.calibration)
    files.check_outputs({"--calibration": written}, (path_of(plan), path_of(options.profile)))
    options.progress("", 0, 0)
    below, above = texts.two_shares("--tolerance-memory", options.tolerance_memory)
    tolerance = Tolerance(step=texts.share(options.tolerance_time), memory_below=below, memory_above=above)
    if options.steps < 3:
        raise UsageError(f"`--steps {options.steps}`: the first 2 steps warm up, so at least 3 are needed")
    if written is not None:
        files.check_writable(written)
    read, place = plan_of(plan)
    source = profile_for(read, place, options.profile)
    now = fresh_verdict(read, source.profile, place).plan or read
    folder = str(Path(source.path).parent)
    report = run_plan(now, source.profile, profile_folder=folder, steps=options.steps, progress=options.progress)
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
    proven = prove(loaded, budget_s=_PROOF_S, ends=ends)
    recomputes = any(stage.recompute != "never" for stage in plan.stages)
    differs = proven.proof.differs_recomputed
    return proven.proof, (*proven.warnings, *([f"recomputed, {differs}"] if recomputes and differs else []))
