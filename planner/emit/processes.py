"""Environment variables of child processes that run or compile a plan."""

import os
from pathlib import Path


def child_environment(**more: str) -> dict[str, str]:
    """Return this process's environment and `more`, with a PYTHONPATH that has this copy of `planner`."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}
