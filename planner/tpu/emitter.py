"""Emitter of `balance.yaml` and `train_jax.py`: a plan as one JAX program over a mesh with one device per stage.

All devices run the same code on arrays of the same shapes. Each device therefore needs more memory than the fullest
stage alone (`planner.tpu.program_memory`). This module does not import torch.
"""

from pathlib import Path

from planner.core.cost.costs import costs_at
from planner.core.cost.partition import Partition
from planner.core.errors import InfeasibleError, UsageError
from planner.core.values.plan import Plan, StageMemory
from planner.core.values.profile import Profile
from planner.core.values.units import bytes_option, format_bytes
from planner.emit.layout import PlanLayout
from planner.emit.native import NativeFiles, emit_from_template
from planner.files import relocate_source
from planner.tpu.extra import chip_of_device
from planner.tpu.program_memory import program_memory

_SCRIPT = "train_jax.py"


def emit(plan: Plan, profile: Profile, *, folder: str, profile_folder: str) -> NativeFiles:
    """Return the balance configuration and the JAX training script of a plan.

    Args:
        plan: Plan to emit.
        profile: Profile of the plan.
        folder: Folder for the emitted files.
        profile_folder: Folder of the profile. The model's path in the profile is relative to this folder.

    Returns:
        The files to write, with a note on the program's memory.

    Raises:
        UsageError: The plan does not match the layers of the profile, the profile names no model to train, or one
            program for all stages cannot run the plan.
        InfeasibleError: The program is predicted to need more memory than the limit.
    """
    layout = PlanLayout.of(plan, profile)
    _check_program(plan, layout)
    costs = costs_at(profile, plan.micro_batch_size, extrapolate=plan.inputs.extrapolate)
    memory = program_memory(costs, Partition.of(plan, [layer.name for layer in profile.layers]))
    limit_bytes = min(stage.memory_bytes for stage in plan.stages)
    chip = chip_of_device(profile.device.name) or "v2"

    if memory.total > limit_bytes:
        raise _too_large(plan, memory, limit_bytes, chip)
    script = Path(folder, _SCRIPT)
    predicted = f"the program needs about {format_bytes(memory.total)} on every device"
    return emit_from_template(
        layout,
        profile,
        relocate_source(profile.model.source, profile_folder, folder),
        template=("planner.tpu", "train_template.py.txt"),
        script=script,
        notes=(f"{predicted}, the limit is {format_bytes(limit_bytes)} (`--compile {chip}` asks the compiler)",),
        start_command=f"python {script}",
        predicted_bytes=memory.total,
        limit_bytes=limit_bytes,
    )


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


def _too_large(plan: Plan, memory: StageMemory, limit_bytes: int, chip: str) -> InfeasibleError:
    fullest = max(stage.memory.total - stage.memory.reserve for stage in plan.stages)
    items = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in memory.items() if size)
    return InfeasibleError(
        f"in one JAX program, every device needs the largest amount of each component over all stages: {items}; "
        f"the sum is {format_bytes(memory.total)}, the limit is {format_bytes(limit_bytes)}",
        hint=f"solve with `--reserve {bytes_option(memory.total - fullest)}`, which is what the program needs beyond "
        "its largest stage, or emit for the bundled executor; small programs may need less than predicted: solve with "
        f"more `--mem`, and ask the compiler (`train_jax.py --compile {chip}`)",
    )
