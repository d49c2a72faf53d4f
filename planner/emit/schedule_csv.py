"""Emitter of the plan's schedule as a table: torch's compute-only CSV.

    0F0,0F1,0I0,0W0,0I1,0W1
    1F0,1I0,1F1,1I1,1W0,1W1

Each row has the actions of one device. `0F1` is the forward of stage 0 for micro-batch 1. I and W are the
input-gradient and weight-gradient passes.

Three engines read the file: torch (`_PipelineScheduleRuntime._load_csv(path, format="compute_only")`), torchtitan
(`pipeline_parallel_schedule_csv` of `ParallelismConfig`) and NeMo Automodel (`pp_schedule_csv` of `PipelineConfig`).

torchtitan and Automodel place the stages on devices before they read the file. Their option for the schedule must
therefore name a schedule with the placement of the plan.
"""

from typing import Final

from planner.core.schedule import orders_as_csv
from planner.emit.layout import EngineFile, PlanLayout

SCHEDULE_FILE: Final = "schedule.csv"

_NAME: Final = "a schedule file"


def emit_schedule_csv(layout: PlanLayout) -> EngineFile:
    """Return the plan's schedule as a CSV file with one row for each device, without idle slots."""
    notes = ["the layers of stages are not included: see `--format torch` and `torchtitan`"]
    if name := layout.placement_schedule_name:
        notes.append(f"torchtitan and Automodel place stages by their schedule option: set it to `{name}`")
    notes += [
        *layout.split_backward_notes(),
        *layout.recompute_notes("recomputation is not included"),
        *layout.replica_notes(_NAME),
    ]
    return EngineFile(
        name=SCHEDULE_FILE,
        text=schedule_table(layout),
        notes=tuple(notes),
        use=f"`_load_csv(\"{SCHEDULE_FILE}\")` of torch's `_PipelineScheduleRuntime`, torchtitan's "
        "`pipeline_parallel_schedule_csv`, or Automodel's `pp_schedule_csv`",
    )


def schedule_table(layout: PlanLayout) -> str:
    """Return the plan's schedule as CSV text."""
    plan = layout.plan
    return orders_as_csv(layout.schedule.actions(plan.num_devices, plan.micro_batches, plan.chunks))
