"""Options of `emit`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from planner.api.option import Option
from planner.api.texts import File
from planner.core.values.plan import Plan
from planner.core.values.profile import Profile

_ENGINE: Final = "Engine"
_CLUSTER: Final = "Cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmitOptions:
    """Options of `emit`."""

    output: Annotated[File, Option("DIR", "Folder to write to.", forms="--output -o")] = "."
    profile: Annotated[File | Profile | None, Option("FILE", "The plan's profile, if it was moved.")] = None
    engine: Annotated[
        str,
        Option(
            "FORMAT",
            "Engine: native (bundled executor), jax (one program for TPUs), torchgpipe, torch, "
            "torchtitan, automodel (NeMo), deepspeed, megatron, device-map; csv: only the schedule, for torch "
            "(`_PipelineScheduleRuntime._load_csv`), torchtitan and NeMo Automodel; "
            "json: as native, and print the names of the written files as JSON.",
            _ENGINE,
            forms="--format",
        ),
    ] = "native"
    launch: Annotated[
        str | None,
        Option(
            "SCHEDULER",
            "Also write a launcher: slurm (batch script), kubernetes (TrainJob) or ray (script for Ray Train).",
            _CLUSTER,
        ),
    ] = None
    nodes: Annotated[
        str | None,
        Option("4x8", "Nodes x devices per node, for `--launch`; default: those of the plan.", _CLUSTER),
    ] = None
    smaller: Annotated[
        Sequence[File | Plan] | None,
        Option(
            "PLAN",
            "Plan for fewer devices, used if devices are lost (repeatable).",
            _CLUSTER,
            repeatable=True,
        ),
    ] = None
    force: Annotated[bool, Option("", "Overwrite edited files.")] = False
