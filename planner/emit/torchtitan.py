"""torchtitan 0.3.0: `module_fqns_per_model_part` of its `ParallelismConfig`.

A list of module paths per stage; a stage is a copy of the model in which every other module is deleted
(torchtitan/distributed/pipeline_parallel.py, `_split_module`; the option has had this name since 0.2.0). It looks at
the model's children and, where these are a ModuleList or ModuleDict, at theirs, and no deeper. A schedule that torch
has no name for is in a file, `pipeline_parallel_schedule_csv`; `pipeline_parallel_schedule` then only says which device
has which stages (`pipeline_module_split`: a V for ZBVZeroBubble and DualPipeV, else a loop).
"""

from typing import Any, Final

from planner.core.errors import UsageError
from planner.emit.layout import EngineFile, Layout, python_values, text_of
from planner.emit.schedule_csv import SCHEDULE_FILE, schedule_table

_NAME: Final = "torchtitan"

_USE: Final = """\
Use it in a config function of torchtitan:
    config.parallelism = dataclasses.replace(config.parallelism, **PARALLELISM)
    config.training.local_batch_size = LOCAL_BATCH_SIZE
Modules that are in none of the lists are deleted from every stage."""


def emit_torchtitan(layout: Layout) -> EngineFile:
    """PARALLELISM and LOCAL_BATCH_SIZE.

    Raises:
        UsageError: A layer has no path, or one that torchtitan does not look at; or it does not place stages so.
    """
    plan, paths = layout.plan, layout.module_paths(_NAME)
    for path in (path for stage in paths for path in stage):
        if path.count(".") > 1:
            raise UsageError(
                f'torchtitan keeps or deletes children of the model and members of their lists, not "{path}"',
                hint="profile the model in whole blocks, or use another `--format`",
            )
    if not layout.placing_name:
        raise UsageError(
            f"torchtitan does not place {plan.chunks} stages on each device as a {plan.placement.upper()}",
            hint="emit for the bundled executor: `--format native`",
        )
    parallelism: dict[str, Any] = {
        "pipeline_parallel_degree": plan.num_devices,
        "pipeline_parallel_schedule": layout.placing_name,
        "pipeline_parallel_microbatch_size": plan.micro_batch_size,
        "module_fqns_per_model_part": [list(stage) for stage in paths],
    }
    if plan.replicas > 1:
        parallelism["data_parallel_replicate_degree"] = plan.replicas
    beside: dict[str, str] = {}
    if not layout.schedule.torch_name:
        # The name then only places the stages.
        parallelism["pipeline_parallel_schedule_csv"] = SCHEDULE_FILE
        beside[SCHEDULE_FILE] = schedule_table(layout)
    notes = [
        *layout.halves_notes(),
        *layout.recompute_notes("torchtitan recomputes by layer, on all stages alike: set `activation_checkpoint`"),
        *layout.order_notes(),
    ]
    body = python_values(PARALLELISM=parallelism, LOCAL_BATCH_SIZE=plan.micro_batches * plan.micro_batch_size)
    return EngineFile(
        name="plan_torchtitan.py",
        text=text_of(layout, body, engine="torchtitan 0.3.0", option="torchtitan", notes=notes, docstring=_USE),
        notes=tuple(notes),
        use="`dataclasses.replace(config.parallelism, **PARALLELISM)` with what plan_torchtitan.py defines",
        beside=beside,
    )
