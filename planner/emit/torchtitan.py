"""Emitter for torchtitan 0.3.0 and later: `module_fqns_per_model_part` of its `ParallelismConfig`.

This option has a list of module paths for each stage. A stage is a copy of the model in which the modules of other
stages are deleted (torchtitan/distributed/pipeline_parallel.py, `_split_module`). Paths may name children of the model,
and members of ModuleLists and ModuleDicts among the children.

A schedule that torch lacks is written to a file for `pipeline_parallel_schedule_csv`. Then `pipeline_parallel_schedule`
only decides the placement of the stages: a V for ZBVZeroBubble and DualPipeV, otherwise a loop.

Options changed after 0.3.0: the lists are `pipeline_parallel_module_fqns_per_model_part`, `num_pp_microbatches` sets
the number of micro-batches instead of their size, and batches are counted in tokens. The emitted file chooses the
option names that the config has.
"""

from typing import Any, Final

from planner.core.errors import UsageError
from planner.emit.layout import EngineFile, PlanLayout, python_assignments, signed_text
from planner.emit.schedule_csv import SCHEDULE_FILE, schedule_table

_NAME: Final = "torchtitan"

_USE: Final = """\
Use it in a config function of torchtitan:
    return planned(config)
Modules that are in none of the lists are deleted from every stage."""

_ORDER: Final = """

`pipeline_parallel_schedule` only decides which device has which stage.
torchtitan reads the actions of each device from schedule.csv."""

_FUNCTION: Final = '''

def planned(config):
    """Return the config with the plan, under this torchtitan's names of the options."""
    names = {field.name for field in dataclasses.fields(config.parallelism)}
    options = dict(PARALLELISM)
    if "module_fqns_per_model_part" not in names:
        options["pipeline_parallel_module_fqns_per_model_part"] = options.pop("module_fqns_per_model_part")
    if "num_pp_microbatches" in names:
        options["num_pp_microbatches"] = MICRO_BATCHES
    else:
        options["pipeline_parallel_microbatch_size"] = MICRO_BATCH_SIZE
    config.parallelism = dataclasses.replace(config.parallelism, **options)
    if hasattr(config.training, "local_batch_size"):
        config.training.local_batch_size = MICRO_BATCHES * MICRO_BATCH_SIZE
    else:
        tokens = MICRO_BATCH_SIZE * config.training.max_context_length
        config.training.num_tokens_per_microbatch_per_dp_rank = tokens
    return config
'''


def emit_torchtitan(layout: PlanLayout) -> EngineFile:
    """Return a Python file with the plan's values, and a function that puts them into a config.

    Raises:
        UsageError: A layer has no module path, its path is too deep for torchtitan, or torchtitan does not support the
            plan's placement of stages.
    """
    plan, paths = layout.plan, layout.module_paths(_NAME)
    for path in (path for stage in paths for path in stage):
        if path.count(".") > 1:
            raise UsageError(
                f'torchtitan cuts only between children of the model and members of their lists, but "{path}" is a '
                "layer of the plan",
                hint="profile the model in whole blocks, or use another `--format`",
            )
    layout.refuse_placement(_NAME)
    parallelism: dict[str, Any] = {
        "pipeline_parallel_degree": plan.num_devices,
        "pipeline_parallel_schedule": layout.placement_schedule_name,
        "module_fqns_per_model_part": [list(stage) for stage in paths],
    }
    if plan.replicas > 1:
        how = "shard" if plan.shards_optimizer else "replicate"
        parallelism[f"data_parallel_{how}_degree"] = plan.replicas
    if plan.tensor_parallel > 1:
        parallelism["tensor_parallel_degree"] = plan.tensor_parallel
    extra_files: dict[str, str] = {}
    if not layout.schedule.torch_name:
        parallelism["pipeline_parallel_schedule_csv"] = SCHEDULE_FILE
        extra_files[SCHEDULE_FILE] = schedule_table(layout)
    sharded = ["FSDP also divides parameters among replicas: less memory, more transfers"]
    notes = [
        *(sharded if plan.shards_optimizer else []),
        *layout.split_backward_notes(),
        *layout.recompute_notes("torchtitan recomputes layers, equally on all stages: set `activation_checkpoint`"),
        # No option for sequence parallelism, because torchtitan uses it by default.
        *layout.assumption_notes(expert_option="expert_parallel_degree", attention_option="activation_checkpoint"),
    ]
    values = python_assignments(
        PARALLELISM=parallelism, MICRO_BATCHES=plan.micro_batches, MICRO_BATCH_SIZE=plan.micro_batch_size
    )
    use = _USE + _ORDER * bool(extra_files)
    body = f"import dataclasses\n\n{values}{_FUNCTION}"
    return EngineFile(
        name="plan_torchtitan.py",
        text=signed_text(layout, body, engine="torchtitan 0.3.0 or later", option=_NAME, notes=notes, docstring=use),
        notes=tuple(notes),
        use="`return planned(config)` in a config function of torchtitan, with what plan_torchtitan.py defines",
        extra_files=extra_files,
    )
