"""Starts the ranks of a job as torchrun does, in a tenth of a second.

Importing torch, its pipelining and transformers takes every process of every job seconds. Here one process imports
them once, computes nothing, and forks a server for each test process, which forks ranks. What concerns the launcher
itself is tested with torchrun.
"""

import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, TextIO

from tests.support.ports import free_port

__all__ = ["EndedRanks", "ForkedProcess", "end_ranks", "run_ranks", "start_forked"]

ROOT = Path(__file__).parents[2]
_LONGEST_S = 300
"""A rank that hangs is ended, and fails."""
_USED = (
    "torch._dynamo",  # by the first optimizer
    "torch.distributed.pipelining",
    "planner.executor",
    "planner.files",
    "tests.zoo.real_models",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)


@dataclass(frozen=True, kw_only=True)
class EndedRanks:
    """Exit codes of all ranks of a job."""

    codes: tuple[int, ...]
    """Exit codes by rank."""
    output: str
    """Output of all ranks, one rank after the other."""
    seconds: float
    """From the first rank's end to that of the last."""


def run_ranks(count: int, arguments: Sequence[str], folder: Path, **environment: str) -> str:
    """Run a script in `count` processes; return their output, or raise `AssertionError` if one failed."""
    ended, failed = _ended(count, arguments, folder, environment, kills=True)
    assert not failed, f"ranks {failed}\n{ended.output}"
    return ended.output


def end_ranks(count: int, arguments: Sequence[str], folder: Path, **environment: str) -> EndedRanks:
    """Run a script in `count` processes, each of which ends by itself; return their exit codes."""
    return _ended(count, arguments, folder, environment, kills=False)[0]


@contextmanager
def start_forked(command: list[str], _profile: object, stderr: int) -> Iterator[SimpleNamespace]:
    """Run the ranks of torchrun's command without torchrun; this can replace the launcher of `verify`."""
    count, *arguments = command[command.index("--nproc-per-node") + 1 :]
    done = end_ranks(int(count), arguments, Path(arguments[0]).parent)
    os.write(stderr, done.output.encode())
    yield SimpleNamespace(stdout=done.output.splitlines(), returncode=max(done.codes))


class ForkedProcess:
    """Process that runs a script as `python script …` does, and ends as an interpreter does.

    Args:
        arguments: Script and its arguments.
        folder: Working folder.
        out: File of the standard output.
        err: File of the standard error.
        environment: Added to the environment of the tests.
    """

    def __init__(self, arguments: Sequence[str], folder: Path, *, out: Path, err: Path, **environment: str) -> None:
        words = {"arguments": list(arguments), "folder": str(folder), "environment": environment}
        for path in (out, err):
            path.touch()  # it may be read before the process opens it
        self.pid = int(_answer({**words, "out": str(out), "err": str(err)}))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        if self.returncode is None:
            self.returncode = _answer({"pid": self.pid})
        return self.returncode

    def wait(self, timeout: float = _LONGEST_S) -> int:
        """Return the exit code; raise `TimeoutError` if the process does not end in time."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.02)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process if it still runs."""
        self.send_signal(signal.SIGKILL)


def _ended(
    count: int, arguments: Sequence[str], folder: Path, environment: dict[str, str], *, kills: bool
) -> tuple[EndedRanks, list[int]]:
    words = {"count": count, "arguments": list(arguments), "folder": str(folder), "environment": environment}
    found = _answer({**words, "kills": kills})
    output = "".join((folder / _log_of(rank)).read_text() for rank in range(count))
    return EndedRanks(codes=tuple(found["codes"]), output=output, seconds=found["seconds"]), found["failed"]


def _answer(words: dict[str, object]) -> Any:
    """Return the answer of this test process's server."""
    server = _server()
    server.write(json.dumps(words) + "\n")
    server.flush()
    return json.loads(server.readline())


def _log_of(rank: int) -> str:
    """Return the output file of a rank; processes that append to one file may lose lines."""
    return f"rank-{rank}.log"


_started: list["subprocess.Popen[bytes]"] = []
"""Process that imports torch and forks the servers, if this process started it. It ends when its input closes."""


@cache
def _server() -> TextIO:
    """Return a connection to this test process's server. The first test process starts the one that forks servers."""
    folder = Path(os.environ.get("RANKS_FOLDER") or tempfile.mkdtemp())
    address, connection = str(folder / "ranks"), socket.socket(socket.AF_UNIX)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(address)
        except OSError:
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-m", "tests.support.ranks", address]
            _started.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE))
            while not Path(address).exists():
                assert _started[-1].poll() is None
                time.sleep(0.02)
            connection.connect(address)
    return connection.makefile("rw")


# The process that is forked


def _serve(address: str) -> str:
    """Fork a server for each test process, until the standard input is closed; return what `_answer_all` returns."""
    for name in _USED:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:  # transformers may be missing
            continue
    # Ranks collect garbage often: not among what is there for good, of which each collection took them 0.3 s.
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{address}.new")
    listener.listen()
    Path(f"{address}.new").rename(address)
    while sys.stdin not in (ready := select.select([sys.stdin, listener], [], [])[0]):
        connection, _ = ready[0].accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return _answer_all(connection.makefile("rw"))
        connection.close()
    Path(address).unlink(missing_ok=True)
    return ""


def _answer_all(requests: TextIO) -> str:
    """Answer requests until there are no more; return the script to run in a process that was forked."""
    for line in requests:
        words = json.loads(line)
        if "out" in words:
            answer: object = os.fork()
            if answer == 0:
                return _become(**words)
        elif "pid" in words:
            pid, status = os.waitpid(words["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = _run(**words)
        requests.write(json.dumps(answer) + "\n")
        requests.flush()
    return ""


def _become(arguments: list[str], folder: str, environment: dict[str, str], out: str, err: str) -> str:
    """Take on what a process has that runs a script, and return the script."""
    os.chdir(folder)
    _redirect(out, err)
    os.environ |= environment
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
    return arguments[0]


def _redirect(out: str, err: str) -> None:
    """Write to these files, and read nothing."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def _run(
    count: int, arguments: list[str], folder: str, environment: dict[str, str], *, kills: bool
) -> dict[str, object]:
    """Return exit codes, and the ranks that failed by themselves; if this `kills`, the others are ended with them."""
    os.chdir(folder)
    port = free_port()
    common = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = {}
    for rank in range(count):
        process = os.fork()
        if process == 0:
            _be({**common, "RANK": rank, "LOCAL_RANK": rank, **environment}, arguments, _log_of(rank))
        ranks[process] = rank
    failed: list[int] = []
    codes, ends = [0] * count, []
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        codes[rank] = os.waitstatus_to_exitcode(status)
        ends.append(time.monotonic())
        if status and not failed:
            failed.append(rank)
            for other in ranks if kills else ():
                os.kill(other, signal.SIGKILL)
    return {"failed": failed, "codes": codes, "seconds": ends[-1] - ends[0]}


def _be(environment: dict[str, str | int], arguments: list[str], output: str) -> NoReturn:
    code = 1
    signal.alarm(_LONGEST_S)
    try:
        _redirect(output, output)
        os.environ |= {name: str(value) for name, value in environment.items()}
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # whatever it is, no rank may return to the loop that forks
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__" and (script := _serve(sys.argv[1])):
    runpy.run_path(script, run_name="__main__")
