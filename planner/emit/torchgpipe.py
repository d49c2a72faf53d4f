"""Emitter for torchgpipe 0.0.7: `GPipe(module, balance, devices=…, chunks=…, checkpoint=…)`.

`GPipe` takes an `nn.Sequential`, whose children are assigned to partitions in order (torchgpipe.readthedocs.io,
"Automatic Balancing", API of `torchgpipe.GPipe`, and its source). It runs GPipe's schedule, with one recompute choice
for all partitions, and does not support shared parameters.
"""

from typing import Final

from planner.core.errors import UsageError
from planner.core.schedule import GPIPE
from planner.core.values.plan import Recompute
from planner.emit.layout import EngineFile, PlanLayout, python_assignments, signed_text

_NAME: Final = "torchgpipe"

_CHECKPOINT: dict[Recompute, str] = {
    "never": "never",
    "except-last": "except_last",
    "always": "always",
    "layers": "always",
}

_USE: Final = """\
Use it (with the layers in one flat nn.Sequential, in this order):
    model = nn.Sequential(*(model.get_submodule(name) for name in LAYERS))
    model = GPipe(model, balance=BALANCE, devices=DEVICES, chunks=CHUNKS, checkpoint=CHECKPOINT)"""


def emit_torchgpipe(layout: PlanLayout) -> EngineFile:
    """Return a Python file with the arguments of `GPipe` and the order of the layers.

    Raises:
        UsageError: torchgpipe cannot run the plan: it is interleaved, layers share parameters, or the model is not a
            sequence of modules.
    """
    layout.refuse_chunks(_NAME)
    paths = layout.sequential_paths(_NAME)
    for first, second in layout.tied_pairs():
        raise UsageError(
            f'torchgpipe does not support shared parameters, but "{first}" and "{second}" share some',
            hint="build the model without sharing them, or use another `--format`",
        )
    choices = [stage.recompute for stage in layout.plan.stages]
    checkpoint = max(choices, key=list(_CHECKPOINT).index)
    notes = layout.schedule_notes(_NAME, GPIPE) + layout.replica_notes(_NAME)
    if len(set(choices)) > 1 or "layers" in choices:
        policy = "always" if checkpoint == "layers" else checkpoint
        notes += layout.recompute_notes(
            f"torchgpipe has one CHECKPOINT for all stages, set to `{_CHECKPOINT[checkpoint]}`; "
            f"solve with `--recompute {policy}` for the best such plan"
        )
    body = python_assignments(
        BALANCE=list(layout.plan.balance),
        CHUNKS=layout.plan.micro_batches,
        CHECKPOINT=_CHECKPOINT[checkpoint],
        DEVICES=list(layout.devices_of_stages),
        LAYERS=[path for stage in paths for path in stage],
    )
    return EngineFile(
        name="plan_torchgpipe.py",
        text=signed_text(layout, body, engine="torchgpipe 0.0.7", option="torchgpipe", notes=notes, docstring=_USE),
        notes=tuple(notes),
        use="`GPipe(model, balance=BALANCE, …)` with what plan_torchgpipe.py defines",
    )
