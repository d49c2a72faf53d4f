"""Processes that run the model while it is timed."""

import os
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import pytest

from planner import api
from planner.core.errors import MeasurementError, UsageError
from planner.device.machine import usable_cores
from planner.files import read_profile
from planner.profile.company import Company, neighbours

SAMPLES = Path(__file__).parents[3] / "sample_models"

pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
"""Where another test has loaded JAX, it warns of every fork; none of these runs anything of it."""


def without_end(company: Company) -> None:
    """As a profile is, as long as its company wants it to be."""
    while company.goes_on():
        pass


def test_by_itself_nothing_is_waited_for() -> None:
    """No process is started, and timing ends when it may."""
    before = active_children()
    with neighbours(0, without_end) as company:
        company.begin()
        assert not company.goes_on()
        assert active_children() == before


def test_a_neighbour_runs_from_the_begin_to_the_end() -> None:
    """It takes a core's time meanwhile, and is gone behind that."""
    with neighbours(1, without_end) as company:
        (process,) = active_children()
        company.begin()
        assert not company.goes_on()
        used_before = cpu_ticks(process.pid)
        while cpu_ticks(process.pid) == used_before:  # it would be forever, if nothing ran
            os.sched_yield()
    assert not active_children()


def cpu_ticks(pid: int | None) -> int:
    """Of a process, by itself."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def test_a_neighbour_that_ended_is_told() -> None:
    """What was measured would not be what was asked for."""

    def fails(_: Company) -> None:
        raise ValueError

    with (
        neighbours(1, fails) as company,
        pytest.raises(MeasurementError, match=r"beside this one ended \(exit code 1\)") as told,
    ):
        company.begin()
    assert "in a process of its own" in told.value.hint


def test_a_neighbour_that_ends_meanwhile_is_told() -> None:
    """Of memory that does not suffice, say: the rest would have been timed alone."""
    with neighbours(1, without_end) as company:
        company.begin()
        (process,) = active_children()
        process.kill()
        process.join()
        with pytest.raises(MeasurementError, match=r"beside this one ended \(exit code -9\)"):
            company.goes_on()


def test_a_neighbour_does_not_outlive_whom_it_waits_for() -> None:
    """However that one ended."""
    lines = [
        "import os, signal",
        "from multiprocessing import active_children",
        "from planner.profile.company import neighbours",
        "with neighbours(1, print):",
        "    print(active_children()[0].pid, flush=True)",
        "    os.kill(os.getpid(), signal.SIGKILL)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False, capture_output=True, text=True)
    waiting = Path("/proc", done.stdout.strip())
    deadline = time.monotonic() + 30
    while waiting.exists() and "State:\tZ" not in (waiting / "status").read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert done.returncode == -9
    assert not waiting.exists() or "State:\tZ" in (waiting / "status").read_text()


@pytest.mark.skipif(usable_cores() < 2, reason="one core runs nothing beside anything")
def test_a_model_is_timed_beside_itself(tmp_path: Path) -> None:
    """In a process of its own, as autograd has run in this one; the profile says so."""
    command = [sys.executable, "-m", "planner", "profile", str(SAMPLES / "mlp.py"), "--set", "depth=2"]
    few = ["--batch-sizes", "2", "--repeat", "2", "--time-budget", "0s", "--proof-budget", "0s", "--beside", "1"]
    subprocess.run([*command, *few, "-o", "profile.yaml"], cwd=tmp_path, check=True, capture_output=True)
    profile = read_profile(str(tmp_path / "profile.yaml"))
    assert profile.environment.beside == 1
    assert all(us > 0 for layer in profile.layers for us in layer.forward_us)


@pytest.mark.parametrize(
    ("beside", "device", "message"),
    [
        (1, "estimate:h100", "it is for layers that are timed on the CPU"),
        (-1, "cpu", "beside 1 process or more"),
        (4096, "cpu", "4097 processes of 1 thread need 4097 cores"),
    ],
)
def test_what_cannot_be_is_refused(beside: int, device: str, message: str) -> None:
    """Before anything is measured."""
    with pytest.raises(UsageError, match=message):
        api.profile(str(SAMPLES / "mlp.py"), beside=beside, device=device)
