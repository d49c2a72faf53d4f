"""What a process needs that is started to run a plan or to compile it."""

import os
from pathlib import Path


def environment(**more: str) -> dict[str, str]:
    """This process's, in which this very `planner` is imported before any other; `more` goes beside."""
    package = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}
