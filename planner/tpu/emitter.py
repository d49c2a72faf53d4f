"""Emitter of `balance.yaml` and `train_jax.py`: a plan as one JAX program over a mesh with one device per stage.

All devices run the same code on arrays of the same shapes. Each device therefore needs more memory than the fullest
stage alone (`planner.tpu.program_memory`). A plan whose predicted memory exceeds the limit is refused, unless the TPU's
compiler is installed and reports that the program fits. This module does not import torch.
"""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from planner.core.cost.costs import costs_at
from planner.core.cost.partition import Partition
from planner.core.errors import ExitCode, InfeasibleError, UsageError
from planner.core.extras import install_command, missing_packages
from planner.core.values.plan import Plan, StageMemory
from planner.core.values.profile import Profile
from planner.core.values.units import bytes_option, format_bytes
from planner.emit.layout import PlanLayout
from planner.emit.native import NativeFiles, child_environment, emit_from_template
from planner.files import relocate_source
from planner.tpu.extra import chip_of_device
from planner.tpu.program_memory import program_memory

_SCRIPT = "train_jax.py"


def emit(
    plan: Plan,
    profile: Profile,
    *,
    folder: str,
    profile_folder: str,
    note: Callable[[str], None],
) -> NativeFiles:
    """Return the balance configuration and the JAX training script of a plan.

    Args:
        plan: Plan to emit.
        profile: Profile of the plan.
        folder: Folder for the emitted files.
        profile_folder: Folder of the profile. The model's path in the profile is relative to this folder.
        note: Function that is called with a message before the compiler runs, which takes long.

    Returns:
        The files to write, with a note on the program's memory.

    Raises:
        UsageError: The plan does not match the layers of the profile, the profile names no model to train, or one
            program for all stages cannot run the plan.
        InfeasibleError: The program needs more memory than the limit, according to the compiler, or according to the
            prediction if the compiler is not installed.
    """
    layout = PlanLayout.of(plan, profile)
    _check_program(plan, layout)
    costs = costs_at(profile, plan.micro_batch_size, extrapolate=plan.inputs.extrapolate)
    memory = program_memory(costs, Partition.of(plan, [layer.name for layer in profile.layers]))
    limit_bytes = min(stage.memory_bytes for stage in plan.stages)
    chip = chip_of_device(profile.device.name) or "v2"

    def emitted_to(folder: str, remark: str) -> NativeFiles:
        script = Path(folder, _SCRIPT)
        return emit_from_template(
            layout,
            profile,
            relocate_source(profile.model.source, profile_folder, folder),
            template=("planner.tpu", "train_template.py.txt"),
            script=script,
            notes=(remark,),
            use=f"python {script}",
            predicted_bytes=memory.total,
            limit_bytes=limit_bytes,
        )

    if memory.total <= limit_bytes:
        predicted = f"the program needs about {format_bytes(memory.total)} on every device"
        remark = f"{predicted}, the limit is {format_bytes(limit_bytes)} (`--compile {chip}` asks the compiler)"
        return emitted_to(folder, remark)
    refused = _too_large(plan, memory, limit_bytes)
    _raise_unless_compiler_can_decide(profile, refused)
    note("note: according to the prediction, the program does not fit; asking the TPU's compiler, which takes a while")
    with tempfile.TemporaryDirectory(prefix="gpipe-plan-") as trial_folder:
        emitted = emitted_to(trial_folder, "")
        emitted.write(trial_folder)
        fits, answer = compile_and_report_fit(Path(trial_folder, emitted.name), chip)
    if not fits:
        raise InfeasibleError(f"{refused.message}; {answer}", hint=refused.hint)
    return emitted_to(folder, answer)


def compile_and_report_fit(script: Path, chip: str) -> tuple[bool, str]:
    """Run `train_jax.py --compile` in a child process. Return True if the program fits, and the printed report."""
    command = [sys.executable, str(script), "--compile", chip]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)  # noqa: S603 - ours
    if done.returncode in {ExitCode.OK, ExitCode.NO} and "every device: " in done.stdout:
        report = "; ".join(done.stdout.strip().splitlines())
        return done.returncode == ExitCode.OK, f"the TPU's compiler reports: {report}"
    errors = [line for line in done.stderr.splitlines() if "rror: " in line]
    why = errors[-1].removeprefix("error: ") if errors else f"it ended with exit code {done.returncode}"
    return False, f"the TPU's compiler gave no answer: {why}"


def _raise_unless_compiler_can_decide(profile: Profile, refused: InfeasibleError) -> None:
    if profile.device.how != "compiled" or not chip_of_device(profile.device.name):
        raise refused
    if missing_packages("train") or missing_packages("tpu"):
        more = f"the TPU's compiler could decide if the extra were installed: {install_command('tpu')}"
        raise InfeasibleError(refused.message, hint=f"{refused.hint}; {more}")


def _check_program(plan: Plan, layout: PlanLayout) -> None:
    if not layout.schedule.is_forwards_first:
        raise UsageError(
            f"the JAX program runs GPipe's schedule, but the plan is for {plan.schedule}",
            hint="solve with `--schedule gpipe`",
        )
    if plan.replicas > 1:
        raise UsageError(
            f"the JAX program is one pipeline, not {plan.replicas} replicas",
            hint=f"solve for one pipeline: `--devices {plan.num_devices} --batch {plan.inputs.batch // plan.replicas}`",
        )
    tied = layout.tied_pairs_across_stages()
    if tied:
        first, second = tied[0]
        together = layout.together_option(first, second)
        raise UsageError(
            f'"{first}" and "{second}" share parameters across stages, whose gradients the JAX program does not sum',
            hint="build the model without sharing them (transformers: `tie_word_embeddings=False` in its config) "
            "and profile again; or leave out `--format jax`: the bundled executor sums them"
            + (f"; or solve with {together}: all layers between them in one stage" if together else ""),
        )


def _too_large(plan: Plan, memory: StageMemory, limit_bytes: int) -> InfeasibleError:
    fullest = max(stage.memory.total - stage.memory.reserve for stage in plan.stages)
    items = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in memory.items() if size)
    return InfeasibleError(
        f"in one JAX program, every device needs as much of each component as the stage with most of it: {items}; "
        f"the sum is {format_bytes(memory.total)}, the limit is {format_bytes(limit_bytes)}",
        hint=f"reserve the memory that the program needs in addition to its fullest stage, `solve --reserve "
        f"{bytes_option(memory.total - fullest)}`, or emit for the bundled executor",
    )
