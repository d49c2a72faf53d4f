"""Support for TPUs: the compiled profile backend, the emitter of one JAX program, its memory model and its trainer.

No other package imports this package. `planner.core.extensions` finds its features in the tables below, and an emitted
`train_jax.py` imports `planner.tpu.training`. Modules that use jax or torchax are imported late: their users call
`planner.core.extras.check_installed` first.
"""

from typing import Final

BACKENDS: Final = {"tpu": "backend:backend_of"}
FORMATS: Final = {"jax": "emitter:emit"}
MEMORY_MODELS: Final = {"program": "stage_memory:compiled_costs"}
