"""Profile a chain of layers: measure, estimate or compile the time and memory of each layer.

The names of this package are imported on first use, because all except the formulas (`planner.profile.formula`) need
torch.
"""

from typing import TYPE_CHECKING, Any

from planner import lazy_attributes
from planner.core.extras import importing

if TYPE_CHECKING:
    from planner.profile.profiler import InterruptedProfileError, check_optimizer_of, profile_model
    from planner.profile.structure import ModelChange, model_changes
    from planner.profile.task import ProfilerOptions
    from planner.profile.units import layer_digests

__all__ = [
    "InterruptedProfileError",
    "ModelChange",
    "ProfilerOptions",
    "check_optimizer_of",
    "layer_digests",
    "model_changes",
    "profile_model",
]

_imported = lazy_attributes(
    __name__,
    {
        **dict.fromkeys(("InterruptedProfileError", "check_optimizer_of", "profile_model"), "profiler"),
        **dict.fromkeys(("ModelChange", "model_changes"), "structure"),
        "ProfilerOptions": "task",
        "layer_digests": "units",
    },
)


def __getattr__(name: str) -> Any:
    with importing("train"):
        return _imported(name)
