"""The profiler: a chain of layers to what each costs in time and memory."""

from planner.profile.profiler import InterruptedProfileError, ProfileOptions, profile_model

__all__ = ["InterruptedProfileError", "ProfileOptions", "profile_model"]
