"""The example of README and site: a GPT of 6.9 billion parameters, planned for four GPUs.

Its profile is made by formula, of a device that need not be here, so that it comes out the same everywhere, in a
second, without torch.
"""

import os
import shlex
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from planner.cli.main import run

COLUMNS = 88

COMMANDS = (
    (
        "gpipe-plan profile -q --from-formula transformer --layers 32 --hidden 4096 \\\n"
        "    --heads 32 --sequence 2048 --vocabulary 50304 \\\n"
        "    --device estimate:a100-80gb --rate 190TFLOP/s --dtype bf16-mixed"
    ),
    "gpipe-plan solve -q --devices 4 --mem 60GB --batch 8 \\\n    --link 100GB/s,5us --schedule zb-h1",
)
"""As they are typed in an empty folder."""

PAGES = (
    "gpipe-plan show -q plan.yaml --html report.html",
    "gpipe-plan explore -q plan.yaml -o explore.html",
)


def said(line: str, folder: Path) -> str:
    """Run a command in `folder` and return its output: results and notes, in order.

    Raises:
        RuntimeError: The exit code is not 0.
    """
    with chdir(folder), patch.dict(os.environ, {"COLUMNS": str(COLUMNS)}), StringIO() as out:
        with redirect_stdout(out), redirect_stderr(out):
            code = run(shlex.split(line.replace("\\\n", ""))[1:])
        if code:
            raise RuntimeError(f"{line}: exit code {code}: {out.getvalue()}")
        return out.getvalue()
