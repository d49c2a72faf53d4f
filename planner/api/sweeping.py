"""`sweep`: the best plan for every number of devices and every cap."""

from dataclasses import fields
from pathlib import Path

from planner import files
from planner.api import texts
from planner.api.keywords import on_profile
from planner.api.options import SolverOptions, SweepOptions
from planner.api.reading import NOWHERE, AnyProfile, path_of, profile_of, reference
from planner.api.solving import PLAN_HEADER
from planner.core.values.sweep import Sweep


@on_profile(SweepOptions)
def sweep(profile: AnyProfile, options: SweepOptions) -> Sweep:
    """The best plan for every number of devices and every cap: the smallest cluster that trains, and what others bring.

    Args:
        profile: A profile, or its file.
        options: What is asked.

    Raises:
        UsageError: The options contradict each other or the profile.
        FileError: The profile cannot be read, or a plan not written.
    """
    from planner.api.asked import request_of  # noqa: PLC0415 - as in `solve`
    from planner.solve import sweep_of  # noqa: PLC0415

    counts = texts.integers("--devices", options.devices)
    source, output = profile_of(profile), path_of(options.output)
    place = reference(source, NOWHERE if output is None else str(Path(output, "plan.yaml")))
    request = request_of(source.profile, place, _of_largest(options, max(counts)))
    caps = request.inputs.memory_bytes[:1] if options.mem is None else texts.sizes(options.mem)
    share = texts.share(options.headroom)
    answers = sweep_of(
        source.profile, request, devices=counts, memory_bytes=caps, headroom=share, progress=options.progress
    )
    if output is not None:
        plans = {str(Path(output, cell.file_name)): cell.plan for cell in answers.cells if cell.plan is not None}
        files.check_outputs({name: name for name in plans}, (source.path,))
        for name, plan in plans.items():
            files.write(name, plan, header=PLAN_HEADER)
    return answers


def _of_largest(options: SweepOptions, devices: int) -> SolverOptions:
    """What is asked of the largest cluster; the headroom is taken off every cap in turn."""
    shared = {of.name for of in fields(SweepOptions)} & {of.name for of in fields(SolverOptions)}
    same = {name: getattr(options, name) for name in shared - {"devices", "mem", "headroom"}}
    return SolverOptions(devices=devices, mem=None if options.mem is None else max(texts.sizes(options.mem)), **same)
