"""`balance.yaml` and `train_jax.py`: a plan as one JAX program over a mesh with an axis of stages.

All devices of such a program run the same code on arrays of the same shapes, and need more than the fullest stage by
itself (`planner.core.cost.one_program`); a plan that no longer fits then is refused.
"""

from dataclasses import replace
from pathlib import Path
from typing import Final

from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Partition
from planner.core.cost.one_program import program_memory
from planner.core.errors import InfeasibleError, UsageError
from planner.core.values.devices import tpu_called
from planner.core.values.plan import Plan, StageMemory
from planner.core.values.profile import Profile
from planner.core.values.units import bytes_option, format_bytes
from planner.emit.layout import Layout
from planner.emit.native import AskAgain, Emitted, Places, emit_with, no_options, planned_of
from planner.files import relocated

JAX_SCRIPT: Final = "train_jax.py"


def emit_jax(
    plan: Plan,
    profile: Profile,
    *,
    folder: str,
    profile_folder: str,
    places: Places,
    again: AskAgain = no_options,
    compiled: str = "",
) -> Emitted:
    """The balance configuration and the training script; arguments as for `emit_native`.

    `compiled` is what the compiler says of a program that fits: then nothing is refused for what is predicted.

    Raises:
        UsageError: The plan does not cut the profile's chain, the profile names no model to train, or one program for
            all stages cannot run the plan.
        InfeasibleError: The program would need more than the cap, as predicted.
    """
    layout = Layout.of(plan, profile)
    _check_program(plan, layout)
    costs = costs_at(profile, plan.micro_batch_size, extrapolate=plan.inputs.extrapolate)
    memory = program_memory(costs, Partition.of(plan, [layer.name for layer in profile.layers]))
    cap_bytes = min(stage.memory_bytes for stage in plan.stages)
    if not compiled:
        _check_cap(plan, memory, cap_bytes)
    emitted = emit_with(
        layout,
        profile,
        relocated(profile.model.source, profile_folder, folder),
        template="jax_template.py.txt",
        script=Path(folder, JAX_SCRIPT),
        planned=planned_of(
            profile,
            plan,
            places.plan,
            again=again,
            profile_path=places.profile,
            folder=folder,
        ),
        predicted_bytes=memory.total,
        cap_bytes=cap_bytes,
    )
    chip = tpu_called(profile.device.name) or "v2"
    predicted = f"the program needs about {format_bytes(memory.total)} on every device"
    note = f"{predicted}, the cap is {format_bytes(cap_bytes)} (`--compile {chip}` asks the compiler)"
    return replace(emitted, note=compiled or note)


def _check_program(plan: Plan, layout: Layout) -> None:
    if not layout.schedule.is_forwards_first:
        raise UsageError(
            f"the JAX program runs GPipe's schedule, and the plan is for {plan.schedule}",
            hint="solve with `--schedule gpipe`",
        )
    if plan.replicas > 1:
        raise UsageError(
            f"the JAX program is one pipeline, not {plan.replicas} side by side",
            hint=f"solve for one: `--devices {plan.num_devices} --batch {plan.inputs.batch // plan.replicas}`",
        )
    tied = layout.ties_over_stages()
    if tied:
        first, second = tied[0]
        together = layout.kept_together(first, second)
        raise UsageError(
            f'"{first}" and "{second}" share parameters over stages, whose gradients the JAX program does not sum',
            hint="build the model without sharing them (transformers: `tie_word_embeddings=False` in its config) "
            "and profile again; or leave out `--format jax`: the bundled executor sums them"
            + (f"; or solve with {together}: one stage from the one to the other" if together else ""),
        )


def _check_cap(plan: Plan, memory: StageMemory, cap_bytes: int) -> None:
    if memory.total <= cap_bytes:
        return
    fullest = max(stage.memory.total - stage.memory.reserve for stage in plan.stages)
    items = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in memory.items() if size)
    raise InfeasibleError(
        f"in one JAX program every device holds as much as the stage with most of it: {items}; "
        f"that is {format_bytes(memory.total)}, the cap is {format_bytes(cap_bytes)}",
        hint=f"leave room for what the program needs beside its fullest stage, `solve --reserve "
        f"{bytes_option(memory.total - fullest)}`, or emit for the bundled executor",
    )
