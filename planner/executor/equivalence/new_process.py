"""Run the equivalence check in a new process, on machines with accelerators.

The check forks processes (`isolation`), which train on the CPU. Once a process has looked for CUDA devices, as
`torch.cuda.is_available()` does, no process that is forked from it can run a backward. Model files and libraries look
for CUDA devices when they are imported, so the check runs in a new Python process to which no CUDA device is visible.
"""

import contextlib
import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import torch

from planner.core.errors import ModelError
from planner.device.kinds import DEVICE_KINDS
from planner.executor.equivalence.check import EquivalenceResult, check_equivalence
from planner.executor.equivalence.isolation import ChildError, ChildProcess, run_and_exit
from planner.model.load import LoadedModel

_LONGEST_S = 24 * 3600.0

_NOT_SENT = "the model object cannot be sent to another process for the equivalence check: {error}"
_HINT = 'give the path of a model file instead; `proof_budget="0s"` skips the check'


def check_equivalence_on_cpu(
    loaded: LoadedModel,
    load: Callable[[], LoadedModel],
    progress: Callable[[str], None] = lambda _text: None,
    **options: Any,
) -> EquivalenceResult:
    """Compare the stages of a model with a plain training loop, on the CPU.

    If a GPU is visible, the comparison runs in a new process that does not see it.

    Args:
        loaded: The model.
        load: Function that loads the same model again, in the new process.
        progress: Function that is called with a text about the current activity.
        options: Other arguments of `check_equivalence`.

    Returns:
        The model without the cuts that failed, the record of the comparison, and warnings.

    Raises:
        ModelError: All cuts failed, or the model does not train in a plain loop, or cannot be sent to the process.
    """
    if not any(kind.has_own_memory and kind.device_count() for kind in DEVICE_KINDS.values()):
        return check_equivalence(loaded, progress=progress, **options)
    process = _NewProcess()
    try:
        process.send((load, options))
        uncut, *others = process.result(progress)
    except ChildError as error:
        raise error.as_model_error() from None
    finally:
        process.end()
    return EquivalenceResult(replace(loaded, uncut=uncut), *others)


class _NewProcess(ChildProcess):
    """Python process without accelerators, for one equivalence check."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        invisible = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        os.set_inheritable(theirs.fileno(), True)
        command = [sys.executable, "-c", f"from {__name__} import main; main()", str(theirs.fileno())]
        self._pid = os.posix_spawn(sys.executable, command, {**os.environ, **invisible, "PYTHONPATH": paths})
        theirs.close()
        self._limit_s = _LONGEST_S
        self._is_over = self.is_done = False

    def send(self, request: Any) -> None:
        """Send `request` to the process.

        Raises:
            ModelError: `request` cannot be sent, for example because it has a function within a function.
        """
        sent = io.BytesIO()
        try:
            torch.save(request, sent)  # `Connection.send` would share tensors, which needs a common parent
            with contextlib.suppress(BrokenPipeError):  # `result` tells why the process ended
                self.connection.send_bytes(sent.getvalue())
        except Exception as error:
            raise ModelError(_NOT_SENT.format(error=error), hint=_HINT) from error


def main() -> None:
    """Run the equivalence check for the parent process. The only argument is the file descriptor of the connection."""
    run_and_exit(_check, Connection(int(sys.argv[1])), _LONGEST_S)


def _check(connection: Connection) -> tuple[Any, ...]:
    try:
        load, options = torch.load(io.BytesIO(connection.recv_bytes()), weights_only=False)  # from the parent process
    except Exception as error:
        raise ModelError(_NOT_SENT.format(error=error), hint=_HINT) from error
    checked = check_equivalence(load(), progress=lambda text: connection.send(("progress", text)), **options)
    return checked.loaded.uncut, *checked[1:]  # the model itself cannot be sent
