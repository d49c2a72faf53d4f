"""Bundled executor: runs a plan under torchrun, over `torch.distributed`."""

from planner.core.extras import importing

with importing("train"):
    from planner.executor.checkpoints import Checkpoints
    from planner.executor.measure.step_record import StepRecord
    from planner.executor.pipeline import Pipeline
    from planner.executor.run.evaluation import EvaluationResult
    from planner.executor.script import ScriptArguments, arguments, checkpoints, pipeline_script, progress

__all__ = [
    "Checkpoints",
    "EvaluationResult",
    "Pipeline",
    "ScriptArguments",
    "StepRecord",
    "arguments",
    "checkpoints",
    "pipeline_script",
    "progress",
]
