"""The bundled executor: a thin layer over `torch.distributed.pipelining` that runs a plan under torchrun."""

from planner.executor.calibrate import executor_cost
from planner.executor.links import measure_links
from planner.executor.pipeline import Pipeline
from planner.executor.script import Arguments, arguments, pipeline_script, progress

__all__ = ["Arguments", "Pipeline", "arguments", "executor_cost", "measure_links", "pipeline_script", "progress"]
