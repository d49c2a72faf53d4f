"""Environment variables of child processes that run or compile a plan."""

import os
from pathlib import Path


def child_environment(**more: str) -> dict[str, str]:
    """Return this process's environment, plus the variables `more`, with this copy of `planner` in PYTHONPATH."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}
