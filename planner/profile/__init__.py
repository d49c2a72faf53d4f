"""The profiler: a chain of layers to what each costs in time and memory."""

from planner.profile.profiler import InterruptedProfileError, ProfileOptions, profile_model
from planner.profile.structure import ModelChange, model_changes

__all__ = ["InterruptedProfileError", "ModelChange", "ProfileOptions", "model_changes", "profile_model"]
