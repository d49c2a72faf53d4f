"""Emitter for torch 2.13: the `split_spec` of `torch.distributed.pipelining.pipeline`.

A `split_spec` is a dictionary from module path to `SplitPoint.BEGINNING`. torch traces the model with `torch.export`
and cuts it before each of these modules (docs.pytorch.org, "Pipeline Parallelism", "Option 2: splitting a model
automatically"). The number of micro-batches is an argument of the schedule. A schedule that torch lacks is written to a
separate file.
"""

from typing import Any, Final

from planner.emit.layout import EngineFile, PlanLayout, python_assignments, signed_text
from planner.emit.schedule_csv import SCHEDULE_FILE, schedule_table

_NAME: Final = "`pipeline()`"

_USE: Final = """\
Use it (micro_batch: example inputs of MICRO_BATCH_SIZE samples):
    pipe = pipeline(model, mb_args=micro_batch, split_spec=SPLIT_SPEC)
    stage = pipe.build_stage(rank, device)
    schedule = get_schedule_class(SCHEDULE)(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_fn)"""

_USE_PLACED: Final = """\
Use it (micro_batch: example inputs of MICRO_BATCH_SIZE samples; STAGES: the stages of each rank):
    pipe = pipeline(model, mb_args=micro_batch, split_spec=SPLIT_SPEC)
    stages = [pipe.build_stage(index, device) for index in STAGES[rank]]
"""

_USE_NAME: Final = """\
    schedule = get_schedule_class(SCHEDULE)(stages, n_microbatches=MICRO_BATCHES, loss_fn=loss_fn)"""

_RECEIVES: Final = (
    "some releases of torch allocate receive buffers for all micro-batches at the start; the planned peaks do not "
    "include them"
)
"""Note about receive buffers. It does not apply to torch 2.13, which allocates each buffer when it receives."""

_USE_TABLE: Final = f"""\
    schedule = _PipelineScheduleRuntime(stages, n_microbatches=MICRO_BATCHES, loss_fn=loss_fn)
    schedule._load_csv("{SCHEDULE_FILE}", format="compute_only")
The runtime is in torch.distributed.pipelining.schedules. Its name is private, but torchtitan uses it, too."""


def emit_split_spec(layout: PlanLayout) -> EngineFile:
    """Return a Python file with `SPLIT_SPEC` and the arguments of the schedule.

    Raises:
        UsageError: A layer has no module path.
    """
    plan = layout.plan
    begins = [stage[0] for stage in layout.module_paths(_NAME)[1:]]
    notes = [
        *layout.split_backward_notes(),
        *([_RECEIVES] if len(plan.stages) > 1 and plan.micro_batches > 1 else []),
        *layout.recompute_notes(f"{_NAME} does not recompute: wrap stages in `torch.utils.checkpoint` yourself"),
        *layout.replica_notes(_NAME),
    ]
    entries = "".join(f'    "{path}": SplitPoint.BEGINNING,\n' for path in begins)
    body = "from torch.distributed.pipelining import SplitPoint\n\n"
    body += f"SPLIT_SPEC = {{\n{entries}}}\n" if entries else "SPLIT_SPEC = {}\n"
    name, rule = layout.schedule.torch_name, layout.schedule
    values: dict[str, Any] = {"SCHEDULE": name} if name else {}
    values |= {"MICRO_BATCHES": plan.micro_batches, "MICRO_BATCH_SIZE": plan.micro_batch_size}
    use = _USE
    if not name or plan.chunks > 1:
        values["STAGES"] = [list(rule.stages_on(d, plan.num_devices, plan.chunks)) for d in range(plan.num_devices)]
        use = _USE_PLACED + (_USE_NAME if name else _USE_TABLE)
    body += python_assignments(**values)
    return EngineFile(
        name="plan_torch.py",
        text=signed_text(
            layout, body, engine="torch.distributed.pipelining (torch 2.13)", option="torch", notes=notes, docstring=use
        ),
        notes=tuple(notes),
        use="`pipeline(model, mb_args=…, split_spec=SPLIT_SPEC)` with what plan_torch.py defines",
        extra_files={} if name else {SCHEDULE_FILE: schedule_table(layout)},
    )
