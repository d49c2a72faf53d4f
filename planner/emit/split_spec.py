"""torch 2.13: the `split_spec` of `torch.distributed.pipelining.pipeline`.

A dictionary of module path to `SplitPoint.BEGINNING`; the model is traced by `torch.export` and cut before each of them
(docs.pytorch.org, "Pipeline Parallelism", "Option 2: splitting a model automatically"). How many micro-batches there
are and in which order they run is said to the schedule, later.
"""

from typing import Final

from planner.emit.layout import EngineFile, Layout, python_values, text_of

_NAME: Final = "`pipeline()`"

_USE: Final = """\
Use it (micro_batch: example inputs of MICRO_BATCH_SIZE samples):
    pipe = pipeline(model, mb_args=micro_batch, split_spec=SPLIT_SPEC)
    stage = pipe.build_stage(rank, device)
    schedule = get_schedule_class(SCHEDULE)(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_fn)"""

_USE_CHUNKS: Final = """\
Use it (micro_batch: example inputs of MICRO_BATCH_SIZE samples; K ranks):
    pipe = pipeline(model, mb_args=micro_batch, split_spec=SPLIT_SPEC)
    stages = [pipe.build_stage(index, device) for index in range(rank, pipe.num_stages, K)]
    schedule = get_schedule_class(SCHEDULE)(stages, n_microbatches=MICRO_BATCHES, loss_fn=loss_fn)"""


def emit_split_spec(layout: Layout) -> EngineFile:
    """SPLIT_SPEC, and what to give the schedule.

    Raises:
        UsageError: A layer has no path.
    """
    plan = layout.plan
    begins = [stage[0] for stage in layout.module_paths(_NAME)[1:]]
    notes = [
        *layout.recompute_notes(f"{_NAME} does not recompute: wrap stages in `torch.utils.checkpoint` yourself"),
        *layout.replica_notes(_NAME),
        *layout.order_notes(),
    ]
    entries = "".join(f'    "{path}": SplitPoint.BEGINNING,\n' for path in begins)
    body = "from torch.distributed.pipelining import SplitPoint\n\n"
    body += f"SPLIT_SPEC = {{\n{entries}}}\n" if entries else "SPLIT_SPEC = {}\n"
    body += python_values(
        SCHEDULE=layout.schedule.torch_name,
        MICRO_BATCHES=plan.micro_batches,
        MICRO_BATCH_SIZE=plan.micro_batch_size,
    )
    use = _USE_CHUNKS if plan.chunks > 1 else _USE
    return EngineFile(
        name="plan_torch.py",
        text=text_of(
            layout, body, engine="torch.distributed.pipelining (torch 2.13)", option="torch", notes=notes, docstring=use
        ),
        notes=tuple(notes),
        use="`pipeline(model, mb_args=…, split_spec=SPLIT_SPEC)` with what plan_torch.py defines",
    )
