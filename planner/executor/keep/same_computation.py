"""Whether a run that goes on still computes what it computed, which its tensors do not show."""

import platform
from collections.abc import Mapping
from typing import Any, Final

from planner.core.errors import UsageError

__all__ = ["check_same_computation", "computation_of_run"]

_PYTHON: Final = ".".join(platform.python_version_tuple()[:2])
"""The digests are of code as Python reads it, which may be another in its next version."""
_COMPUTES: Final = {
    "loss": "the loss function has",
    "layers": "what the layers compute (activations, dropout, their own `forward`) has",
}


def computation_of_run(computation: Mapping[str, str]) -> dict[str, Any]:
    """What a checkpoint keeps of it."""
    return {"python": _PYTHON, "computation": dict(computation)}


def check_same_computation(description: Mapping[str, Any], computation: Mapping[str, str], source: str) -> None:
    """Refuses to go on with another loss, or other layers, that have the same tensors.

    Args:
        description: Of the checkpoint.
        computation: Digests of the model as it is now.
        source: The checkpoint, for the message.

    Raises:
        UsageError: It is another one.
    """
    saved = description.get("computation", computation)  # checkpoints of earlier versions say nothing
    what = [words for name, words in _COMPUTES.items() if saved[name] != computation[name]]
    if what and description.get("python") == _PYTHON:
        raise UsageError(
            f"{' and '.join(what)} changed since {source} was written: the run would go on with another model",
            hint=f"undo the change in the model file; or begin a new run with the weights alone: `--weights {source}`",
        )
