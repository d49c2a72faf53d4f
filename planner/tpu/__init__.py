"""Support for TPUs: profiles from the TPU's compiler, and training of a plan as one JAX program.

The program runs all stages of the plan, one on each device. Its emitter, memory model and trainer are in this package.

No other package imports this package. `planner.core.extensions` loads the functions that `BACKENDS`, `FORMATS` and
`MEMORY_MODELS` name, and an emitted `train_jax.py` imports `planner.tpu.training`. Some modules import jax and torchax.
Call `planner.core.extras.check_installed` before you import such a module.
"""

from typing import Final

BACKENDS: Final = {"tpu": "backend:backend_of"}
FORMATS: Final = {"jax": "emitter:emit"}
MEMORY_MODELS: Final = {"program": "stage_memory:compiled_costs"}
