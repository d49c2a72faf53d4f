"""`explore`: write an interactive report with adjustable cuts, micro-batches, schedule and memory limits."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from planner import files
from planner.api.keywords import plan_command
from planner.api.options.exploring import ExploreOptions
from planner.api.question import solve_command_options
from planner.api.reading import NOWHERE, judge_again_from_profile, path_of, plan_of, profile_for
from planner.api.texts import File
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile

_LEFT_OUT: Final = frozenset({"--mem", "--schedule", "--chunks", "--recompute", "--links", "--together", "--apart"})
"""Options of `solve` that `solve_command_parts` leaves out.

The interactive report adds them with the user's values, replaces them by `--balance`, or mentions them in a note.
"""


@plan_command(ExploreOptions)
def explore(plan: File | Plan, options: ExploreOptions) -> str:
    """Return an interactive HTML report, in which cuts, micro-batches, schedule and memory limits can be changed.

    Args:
        plan: A plan, or its file.
        options: Options of `explore`.

    Raises:
        StaleError: The profile differs from the one that the plan was made from.
        UsageError: A layer of the profile is in no stage, or a stage has no layers.
        FileError: A file cannot be read, or the page cannot be written.
    """
    from planner.show.explore import ExplorerRequest, explore_html  # noqa: PLC0415 - numpy only where a page is made
    from planner.solve.cases import micro_batch_counts  # noqa: PLC0415
    from planner.solve.request import Request  # noqa: PLC0415

    loaded_plan, place = plan_of(plan)
    source, output = profile_for(loaded_plan, place, options.profile), path_of(options.output)
    if output is not None:
        files.check_outputs({"--output": output}, (source.path, place))
        files.check_writable(output)
    profile = source.profile
    now = judge_again_from_profile(loaded_plan, profile, place).plan or loaded_plan
    counts = micro_batch_counts(profile, Request(inputs=now.inputs), replicas=now.replicas, required=False)
    page = explore_html(
        ExplorerRequest(
            plan=now,
            profile=profile,
            micro_batches=tuple(sorted({*counts, now.micro_batches})),
            command=tuple(solve_command_parts(now, profile)),
            place="plan.yaml" if place == NOWHERE else place,
            caveats=tuple(notes_on_missing_options(now)),
            may_recompute=profile.proof is None or not profile.proof.differs_recomputed,
        )
    )
    if output is not None:
        files.write_text(output, page)
    return page


def solve_command_parts(plan: Plan, profile: Profile) -> Iterator[str]:
    """Yield the parts of the `solve` command that computes a plan again: `gpipe-plan solve PROFILE`, then each option.

    Three kinds of options are left out: options that the interactive report adds with the user's values (`--mem`),
    options that it replaces by fixed cuts (`--together`), and options that it mentions in a note (`--links`).
    """
    width = plan.tensor_parallel if profile.widths else plan.inputs.tensor_parallel
    inputs = replace(plan.inputs, replicas=plan.replicas, tensor_parallel=width)
    yield f"gpipe-plan solve {inputs.profile.path}"
    yield from solve_command_options(inputs, profile.device, without=_LEFT_OUT)


def notes_on_missing_options(plan: Plan) -> Iterator[str]:
    """Yield a sentence about each option of a plan that the interactive report cannot put in its `solve` command."""
    inputs = plan.inputs
    if inputs.links:
        yield "The plan uses links that were measured one by one: add their file with `--links`."
    if inputs.recompute == "layers":
        yield "The plan was made with `--recompute layers`, which can recompute some layers and may be faster."
    if inputs.compute != 1.0:
        yield "The plan was made with a calibration: add its file with `--calibration`."
