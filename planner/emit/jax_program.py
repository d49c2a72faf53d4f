"""`balance.yaml` and `train_jax.py`: a plan as one JAX program over a mesh with an axis of stages.

All devices of such a program run the same code on arrays of the same shapes. So each of them needs as much of
everything as the stage that needs most of it; a plan whose stages would no longer fit then is refused.
"""

from typing import Final

from planner.core.errors import UsageError
from planner.core.plan import Plan
from planner.core.profile import Profile
from planner.core.units import format_bytes
from planner.emit.layout import Layout
from planner.emit.native import Emitted, emit_with

__all__ = ["JAX_SCRIPT", "emit_jax"]

JAX_SCRIPT: Final = "train_jax.py"


def emit_jax(plan: Plan, profile: Profile, *, folder: str, profile_folder: str) -> Emitted:
    """The balance configuration and the training script; arguments as for `emit_native`.

    Raises:
        UsageError: The plan does not cut the profile's chain, the profile names no model to train, or one program for
            all stages cannot run the plan.
    """
    layout = Layout.of(plan, profile)
    _check_program(plan, layout)
    values = {"predicted_bytes": [stage.memory.total for stage in plan.stages]}
    return emit_with(
        "jax_template.py.txt", JAX_SCRIPT, plan, profile, folder=folder, profile_folder=profile_folder, more=values
    )


def _check_program(plan: Plan, layout: Layout) -> None:
    if plan.schedule != "gpipe":
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
        one, other = tied[0]
        together = layout.kept_together(one, other)
        raise UsageError(
            f'"{one}" and "{other}" share parameters over stages, whose gradients the JAX program does not sum',
            hint="build the model without sharing them (transformers: `tie_word_embeddings=False` in its config) "
            "and profile again; or leave out `--format jax`: the bundled executor sums them"
            + (f"; or solve with {together}: one stage from the one to the other" if together else ""),
        )
    largest = dict(_most_of_each(plan))
    total, cap = sum(largest.values()), min(stage.memory_bytes for stage in plan.stages)
    if total > cap:
        told = ", ".join(f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in largest.items() if size)
        raise UsageError(
            f"in one JAX program every device holds as much as the stage with most of it: {told}; "
            f"that is {format_bytes(total)}, the cap is {format_bytes(cap)}",
            hint="solve for a smaller cap, which makes stages more alike, or emit for the bundled executor",
        )


def _most_of_each(plan: Plan) -> list[tuple[str, int]]:
    """The largest of every item of memory over the stages, in bytes."""
    items = [stage.memory.items() for stage in plan.stages]
    return [(same[0][0], max(size for _, size in same)) for same in zip(*items, strict=True)]
