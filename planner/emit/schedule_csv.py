"""The plan's schedule as a table: torch's compute-only CSV.

    0F0,0F1,0I0,0W0,0I1,0W1
    1F0,1I0,1F1,1I1,1W0,1W1

Three engines read it: torch's `_PipelineScheduleRuntime._load_csv(path, format="compute_only")`, torchtitan
(`pipeline_parallel_schedule_csv` of its `ParallelismConfig`) and NeMo Automodel (`pp_schedule_csv` of its
`PipelineConfig`). Each takes stage by stage which device runs it from the rows, and adds the transfers by itself. The
latter two build the stages before they read it, on the devices where the schedule that their other option names has
them: it must be one with the same placement.
"""

from typing import Final

from planner.core.schedule import table_of
from planner.emit.layout import EngineFile, Layout

SCHEDULE_FILE: Final = "schedule.csv"

_NAME: Final = "a schedule file"


def emit_schedule_csv(layout: Layout) -> EngineFile:
    """A row for each device, without idle slots."""
    notes = ["which layers a stage has is not in it: `--format torch` and `torchtitan` say so"]
    if layout.placing_name:
        notes.append(
            f"torchtitan and Automodel place stages by their option for schedules: name `{layout.placing_name}`"
        )
    notes += [
        *layout.halves_notes(),
        *layout.recompute_notes("recomputation is not in it"),
        *layout.replica_notes(_NAME),
        *layout.order_notes(),
    ]
    return EngineFile(
        name=SCHEDULE_FILE,
        text=schedule_table(layout),
        notes=tuple(notes),
        use=f"`_load_csv(\"{SCHEDULE_FILE}\")` of torch's `_PipelineScheduleRuntime`, torchtitan's "
        "`pipeline_parallel_schedule_csv`, or Automodel's `pp_schedule_csv`",
    )


def schedule_table(layout: Layout) -> str:
    """The table's text."""
    plan = layout.plan
    return table_of(layout.schedule.actions(plan.num_devices, plan.micro_batches, plan.chunks))
