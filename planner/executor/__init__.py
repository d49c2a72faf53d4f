"""The bundled executor: a thin layer over `torch.distributed.pipelining` that runs a plan under torchrun."""

from planner.executor.calibrate import executor_cost
from planner.executor.checkpoint import Checkpoints
from planner.executor.evaluation import Evaluation
from planner.executor.links import measure_links
from planner.executor.pipeline import Pipeline
from planner.executor.proof import Proven, prove
from planner.executor.saved import check_whole, latest_checkpoint
from planner.executor.script import Arguments, arguments, checkpoints, pipeline_script, progress
from planner.executor.weights import export_weights

__all__ = [
    "Arguments",
    "Checkpoints",
    "Evaluation",
    "Pipeline",
    "Proven",
    "arguments",
    "check_whole",
    "checkpoints",
    "executor_cost",
    "export_weights",
    "latest_checkpoint",
    "measure_links",
    "pipeline_script",
    "progress",
    "prove",
]
