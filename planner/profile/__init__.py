"""The profiler: a chain of layers to what each costs in time and memory."""

import sys

from planner import Verb
from planner.core.extras import importing

with importing("train"):
    from planner.profile.profiler import InterruptedProfileError, check_optimizer_of, profile_model
    from planner.profile.structure import ModelChange, model_changes
    from planner.profile.task import ProfileOptions
    from planner.profile.units import layer_digests

__all__ = [
    "InterruptedProfileError",
    "ModelChange",
    "ProfileOptions",
    "check_optimizer_of",
    "layer_digests",
    "model_changes",
    "profile_model",
]

sys.modules[__name__].__class__ = Verb
