"""What `emit` takes beside the plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from planner.api.option import Option
from planner.api.texts import File
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile

_ENGINE: Final = "Engine"
_CLUSTER: Final = "On a cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitOptions:
    """What `emit` takes beside the plan."""

    output: Annotated[File, Option("DIR", "Folder to write to.", forms="--output -o")] = "."
    profile: Annotated[File | Profile | None, Option("FILE", "The plan's profile, if it was moved.")] = None
    engine: Annotated[
        str,
        Option(
            "FORMAT",
            "For which engine: native (the bundled executor), jax (one program for TPUs), torchgpipe, torch, "
            "torchtitan, automodel (NeMo), deepspeed, megatron, device-map; or csv, the schedule alone, which torch "
            "(`_PipelineScheduleRuntime._load_csv`), torchtitan and NeMo Automodel read. "
            "`json`: native, and the files are listed as JSON.",
            _ENGINE,
            forms="--format",
        ),
    ] = "native"
    launch: Annotated[
        str | None,
        Option(
            "SCHEDULER",
            "Write what starts train.py there, too: slurm (a batch script), kubernetes (a TrainJob) or ray (a script "
            "for Ray Train).",
            _CLUSTER,
        ),
    ] = None
    nodes: Annotated[
        str | None,
        Option("4x8", "For `--launch`: 4 nodes of 8 devices; default: as the plan was solved for.", _CLUSTER),
    ] = None
    smaller: Annotated[
        Sequence[File | Plan] | None,
        Option(
            "PLAN",
            "A plan for fewer devices, which train.py takes where no more are left; may be repeated.",
            _CLUSTER,
            repeatable=True,
        ),
    ] = None
    force: Annotated[bool, Option("", "Overwrite a file that was edited.")] = False
