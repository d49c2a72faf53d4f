"""Bundled executor: runs a plan under torchrun, over `torch.distributed`."""

from planner.core.extras import importing

with importing("train"):
    from planner.executor.build.building import check_buildable
    from planner.executor.build.loss_check import check_loss
    from planner.executor.checkpoints import Checkpoints
    from planner.executor.equivalence.check import EquivalenceResult, check_equivalence, reference_losses
    from planner.executor.equivalence.new_process import check_without_gpu
    from planner.executor.keep.saved import latest_checkpoint, no_checkpoint_error
    from planner.executor.keep.weights import export_weights
    from planner.executor.measure.calibrate import executor_cost
    from planner.executor.measure.links import measure_links
    from planner.executor.measure.step_record import StepRecord
    from planner.executor.pipeline import Pipeline
    from planner.executor.run.evaluation import EvaluationResult
    from planner.executor.script import ScriptArguments, arguments, checkpoints, pipeline_script, progress

__all__ = [
    "Checkpoints",
    "EquivalenceResult",
    "EvaluationResult",
    "Pipeline",
    "ScriptArguments",
    "StepRecord",
    "arguments",
    "check_buildable",
    "check_equivalence",
    "check_loss",
    "check_without_gpu",
    "checkpoints",
    "executor_cost",
    "export_weights",
    "latest_checkpoint",
    "measure_links",
    "no_checkpoint_error",
    "pipeline_script",
    "progress",
    "reference_losses",
]
