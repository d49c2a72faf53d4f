"""The profiler: a chain of layers to what each costs in time and memory."""

import sys

from planner import Verb
from planner.profile.profiler import InterruptedProfileError, ProfileOptions, profile_model
from planner.profile.structure import ModelChange, model_changes

__all__ = ["InterruptedProfileError", "ModelChange", "ProfileOptions", "model_changes", "profile_model"]

sys.modules[__name__].__class__ = Verb
