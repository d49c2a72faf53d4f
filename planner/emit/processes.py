"""Environment of processes that run or compile a plan."""

import os
from pathlib import Path


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment with `more`, such that this copy of `planner` is imported."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}
