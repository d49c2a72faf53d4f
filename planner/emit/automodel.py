"""Emitter for NeMo Automodel 0.7: the sections `distributed` and `step_scheduler` of a recipe.

The option `distributed.pipeline.module_fqns_per_model_part` is a list of module paths for each stage. It replaces
`layers_per_stage`, which only cuts evenly. A stage is a copy of the model in which the modules of other stages are set
to None (nemo_automodel/components/distributed/pipelining/functional.py, `split_model_into_stages`). Each member of
a ModuleList is kept or deleted entirely. Rotary embeddings must be in all lists.

`pp_schedule` is the name of a schedule in torch. This name also decides the placement of the stages: a V for
ZBVZeroBubble, otherwise a loop. A schedule that torch lacks is written to a separate file.
"""

import json
import re
from typing import Any, Final

from planner.core.errors import UsageError
from planner.core.schedule import SCHEDULES
from planner.emit.layout import EngineFile, PlanLayout, signed_text
from planner.emit.schedule_csv import SCHEDULE_FILE, schedule_table

ON_EVERY_STAGE: Final = "rotary_emb"
"""Name of modules that every stage needs. It is the last component of a path, such as `model.rotary_emb`."""

_NAME: Final = "Automodel"
_INSIDE_A_MEMBER = re.compile(r"\.\d+\.")
_BLOCK = re.compile(r"(\w+\.)*layers\.\d+")
_WIDTH: Final = 100

_USE: Final = """\
Put this into a recipe. It replaces `distributed` and the two keys of `step_scheduler`.
Modules that are in none of the lists are deleted from every stage."""


def emit_automodel(layout: PlanLayout) -> EngineFile:
    """Return the sections of an Automodel recipe that run the plan.

    Raises:
        UsageError: A layer is not a module, or is only a part of an entry of a ModuleList, such as `layers.3.mlp`.
            Also raised if stages share parameters, if there are fewer micro-batches than devices, or if the engine
            does not support the plan's placement of stages.
    """
    plan = layout.plan
    _check(layout)
    name = _schedule_with_placement(layout)
    pipeline: dict[str, Any] = {"pp_schedule": name, "pp_microbatch_size": plan.micro_batch_size}
    extra_files: dict[str, str] = {}
    if name != layout.schedule.torch_name:
        pipeline["pp_schedule_csv"] = SCHEDULE_FILE
        extra_files[SCHEDULE_FILE] = schedule_table(layout)
    sizes = {"pp_size": plan.num_devices}
    more = {"dp_size": plan.replicas, "tp_size": plan.tensor_parallel}
    sizes |= {key: size for key, size in more.items() if size > 1}
    lines = ["distributed:", "  strategy: fsdp2", *(f"  {key}: {size}" for key, size in sizes.items()), "  pipeline:"]
    lines += [f"    {key}: {json.dumps(value)}" for key, value in pipeline.items()]
    lines += ["    module_fqns_per_model_part:", *_module_list_lines(layout)]
    # One step of the scheduler is one mini-batch; `local_batch_size` is the part of one pipeline.
    batches = {"global_batch_size": plan.inputs.batch, "local_batch_size": plan.micro_batches * plan.micro_batch_size}
    lines += ["step_scheduler:", *(f"  {key}: {size}" for key, size in batches.items())]
    notes = _notes(layout)
    return EngineFile(
        name="plan_automodel.yaml",
        text=signed_text(
            layout,
            "".join(f"{line}\n" for line in lines),
            engine="NeMo Automodel 0.7",
            option="automodel",
            notes=notes,
            docstring=_USE,
        ),
        notes=tuple(notes),
        use="`distributed` and `step_scheduler` of a recipe, as plan_automodel.yaml has them",
        extra_files=extra_files,
    )


def _check(layout: PlanLayout) -> None:
    plan = layout.plan
    layout.refuse_placement(_NAME)
    for path in (path for stage in layout.module_paths(_NAME) for path in stage):
        if _INSIDE_A_MEMBER.search(path):
            raise UsageError(
                f'{_NAME} cannot cut inside a member of a module list, but "{path}" is a layer of the plan',
                hint="profile the model in whole blocks, or use another `--format`",
            )
    for first, second in layout.tied_pairs_across_stages():
        together = layout.together_option(first, second)
        raise UsageError(
            f'"{first}" and "{second}" share parameters across stages, but {_NAME} would train two copies',
            hint="build the model without sharing them (`tie_word_embeddings: false` in its config) and profile again"
            + (f"; or solve with {together}" if together else ""),
        )
    if plan.micro_batches < plan.num_devices:
        raise UsageError(
            f"{_NAME} needs as many micro-batches as devices, {plan.num_devices}, but the plan has "
            f"{plan.micro_batches}",
            hint=f"solve with `--micro-batches {plan.num_devices}` or a multiple of it",
        )


def _schedule_with_placement(layout: PlanLayout) -> str:
    if layout.plan.placement == "loop":
        return layout.placement_schedule_name
    in_v = (rule.torch_name for rule in SCHEDULES.values() if rule.placement == "v" and rule.torch_name)
    return next(in_v)


def _module_list_lines(layout: PlanLayout) -> list[str]:
    stages = layout.module_paths(_NAME)
    shared = [path for stage in stages for path in stage if path.rpartition(".")[2] == ON_EVERY_STAGE]
    lines = []
    for stage in stages:
        words = [json.dumps(path) for path in dict.fromkeys((*stage, *shared))]
        line = f"      - [{', '.join(words)}]"
        if len(line) > _WIDTH:
            line = "\n".join(f"      {'- -' if word is words[0] else '  -'} {word}" for word in words)
        lines.append(line)
    return lines


def _notes(layout: PlanLayout) -> list[str]:
    notes = []
    if not any(_BLOCK.fullmatch(path) for stage in layout.module_paths(_NAME) for path in stage):
        notes.append(
            "Automodel only splits models whose blocks are named `layers.0`, …, but this model has no such blocks"
        )
    if layout.plan.replicas > 1:
        what = "parameters" if layout.plan.shards_optimizer else "parameters and optimizer state"
        notes.append(f"Automodel's FSDP2 shards {what} over replicas: less memory, more transfers")
    return [
        *notes,
        *layout.split_backward_notes(),
        *layout.recompute_notes("Automodel recomputes layers, equally on all stages: set `activation_checkpointing`"),
        *layout.assumption_notes(
            sequence_option="distributed.sequence_parallel",
            expert_option="distributed.ep_size",
            attention_option="activation_checkpointing",
        ),
    ]
