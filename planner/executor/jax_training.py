"""Where a `train_jax.py` of an earlier version imports from; what is written today names `planner.executor.jax`."""

from planner.executor.jax.training import jax_arguments, jax_training

__all__ = ["jax_arguments", "jax_training"]
