"""Emitter for DeepSpeed 0.19.8: a `PipelineModule` with the plan's cuts.

The argument `partition_method` of `PipelineModule` (deepspeed/runtime/pipe/module.py) is `uniform`, `parameters` or
`type:REGEX`, none of which accepts given cuts. So the emitted file defines a subclass that assigns the cuts to `parts`.
The engine runs 1F1B (`TrainSchedule`), and its `gradient_accumulation_steps` is the number of micro-batches.
"""

from itertools import accumulate
from typing import Final

from planner.core.errors import UsageError
from planner.core.schedule import ONE_FORWARD_ONE_BACKWARD
from planner.emit.layout import EngineFile, PlanLayout, python_assignments, signed_text

_NAME: Final = "DeepSpeed"

_USE: Final = """\
Use it (model: the module that has the LAYERS):
    module = PlannedPipelineModule([model.get_submodule(name) for name in LAYERS], loss_fn=loss_fn)
    engine, *_ = deepspeed.initialize(model=module, config=CONFIG | your_own, model_parameters=module.parameters())"""

_CLASS: Final = '''

class PlannedPipelineModule(PipelineModule):
    """Pipeline with the plan's cuts, which no `partition_method` accepts."""

    def __init__(self, layers, **options):
        super().__init__(layers, num_stages=len(PARTS) - 1, **options)
        self.activation_checkpoint_interval = CHECKPOINT_INTERVALS[self.stage_id]

    def _partition_layers(self, method=None):
        if self._num_layers != PARTS[-1]:
            raise ValueError(f"the plan cuts {PARTS[-1]} layers, the model has {self._num_layers}")
        self.parts = list(PARTS)
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])
'''


def emit_deepspeed(layout: PlanLayout) -> EngineFile:
    """Return a Python file with the plan's values and a subclass of `PipelineModule` that uses them.

    Raises:
        UsageError: DeepSpeed cannot run the plan: it is interleaved, stages share parameters, or the model is not a
            sequence of modules.
    """
    layout.refuse_chunks(_NAME)
    plan, paths = layout.plan, layout.sequential_paths(_NAME)
    for first, second in layout.tied_pairs_across_stages():
        raise UsageError(
            f'"{first}" and "{second}" share parameters across stages, but DeepSpeed would train two copies',
            hint=f"solve with `--together {first},{second}`; or write both as a `TiedLayerSpec` and cut by hand",
        )
    choices = {stage.recompute for stage in plan.stages}
    notes = layout.schedule_notes(_NAME, ONE_FORWARD_ONE_BACKWARD)
    if choices & {"except-last", "layers"}:
        notes += layout.recompute_notes(
            "DeepSpeed recomputes a stage completely or not at all: stages that recompute anything recompute "
            "everything; solve with `--recompute always` or `never`"
        )
    # If the interval is the whole stage, DeepSpeed recomputes it completely, which is the choice `always`.
    intervals = [0 if s.recompute == "never" else s.layers for s in plan.stages]
    config = {
        "train_batch_size": plan.inputs.batch,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.micro_batches,
    }
    body = "from deepspeed.pipe import PipelineModule\n\n" + python_assignments(
        PARTS=list(accumulate(plan.balance, initial=0)),
        CHECKPOINT_INTERVALS=intervals,
        CONFIG=config,
        LAYERS=[path for stage in paths for path in stage],
    )
    return EngineFile(
        name="plan_deepspeed.py",
        text=signed_text(
            layout, body + _CLASS, engine="DeepSpeed 0.19.8", option="deepspeed", notes=notes, docstring=_USE
        ),
        notes=tuple(notes),
        use="`PlannedPipelineModule([model.get_submodule(name) for name in LAYERS])` of plan_deepspeed.py",
    )
