"""One run of the solver in a process on one core, with a limit on its time and memory.

`benchmarks/solve.py` starts this file with a case as JSON; it prints the outcome as JSON. The time does not include
imports and building the profile.
"""

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from chains import CHAINS, tight_cap

from planner.core.errors import InfeasibleError
from planner.core.values.plan import Inputs, Plan, ProfileReference
from planner.core.values.profile import Profile
from planner.solve import Request, solve

__all__ = ["ONE_CORE", "UNLIMITED", "Case", "Outcome", "inputs_of", "request_of", "run_case", "seconds"]

UNLIMITED = 10**18
ONE_CORE = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment of a process whose numpy must not start threads."""

_REPEATS, _ENOUGH_S = 5, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request to the solver."""

    chain: str
    """A key of `CHAINS`."""
    layers: int
    devices: int
    batch: int
    micro_batches: int | None = None
    """M; None: every divisor of the batch."""
    tight: bool = True
    """Whether the cap makes stages recompute."""
    exact: bool = True
    """Whether the profile has exact memory records, as a measured one has."""
    time_limit_s: float | None = None
    """What the solver is told; `limit_s` ends the process."""
    limit_s: int = 60
    memory_gib: float = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a case."""

    problem: str = ""
    """Why there is no time: over a limit, no plan, an error."""
    seconds: float = 0.0
    """Median."""
    runs: int = 0
    rss_bytes: int = 0
    """Highest resident size of the process."""
    before_bytes: int = 0
    """The same before the solver began: interpreter, numpy and the profile."""
    plan: str = ""
    gap: float | None = None
    """Of a plan that was not proven optimal."""

    def cell(self) -> str:
        """Return time and memory for a table."""
        unproven = "" if self.gap is None else f", gap {self.gap:.2%}"
        return self.problem or f"{seconds(self.seconds)}, {self.rss_bytes / 2**20:.0f} MiB{unproven}"


def seconds(value: float) -> str:
    """Return a time with three digits: `23.4 ms`, `1.23 s`."""
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def run_case(case: Case) -> Outcome:
    """Run `case` in a new process."""
    command = [sys.executable, str(Path(__file__)), json.dumps(asdict(case))]
    done = subprocess.run(command, env={**os.environ, **ONE_CORE}, capture_output=True, text=True, check=False)
    if done.returncode == -signal.SIGALRM:
        return Outcome(problem=f"> {case.limit_s} s")
    if done.returncode:
        sys.stderr.write(f"{case}\n{done.stderr}\n")
        return Outcome(problem="failed")
    return Outcome(**json.loads(done.stdout))


def inputs_of(num_devices: int, batch: int, memory_bytes: int = UNLIMITED) -> Inputs:
    """Return the inputs of `gpipe-plan solve --devices --batch --mem`, with links that cost nothing."""
    return Inputs(
        profile=ProfileReference(path="profile.yaml", digest="sha256:0"),
        devices=num_devices,
        memory_bytes=(memory_bytes,) * num_devices,
        batch=batch,
    )


def request_of(case: Case) -> tuple[Profile, Request]:
    """Return the profile and the request."""
    chain = CHAINS[case.chain](case.layers)
    sizes = [2**n for n in range(case.batch.bit_length())]
    cap = tight_cap(chain, case.devices, case.batch) if case.tight else UNLIMITED
    inputs = inputs_of(case.devices, case.batch, cap)
    request = Request(inputs=inputs, micro_batches=case.micro_batches, time_limit_s=case.time_limit_s)
    return chain.profile(sizes, exact=case.exact), request


def _main() -> None:
    case = Case(**json.loads(sys.argv[1]))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    profile, request = request_of(case)
    before = _peak_rss_bytes()
    limit = int(case.memory_gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        times, plan = _timed(lambda: solve(profile, request), case.limit_s)
    except MemoryError:
        outcome = Outcome(problem=f"> {case.memory_gib:g} GiB")
    except InfeasibleError:
        outcome = Outcome(problem="no plan")
    else:
        outcome = Outcome(
            seconds=statistics.median(times),
            runs=len(times),
            rss_bytes=_peak_rss_bytes(),
            before_bytes=before,
            plan=_summary(plan),
            gap=None if plan.solver.status == "optimal" else plan.solver.gap,
        )
    print(json.dumps(asdict(outcome)))


def _timed(call: Callable[[], Plan], limit_s: int) -> tuple[list[float], Plan]:
    """Return the times of a few calls, or of a single one if it takes long.

    A call beyond the limit ends the process (SIGALRM).
    """
    times: list[float] = []
    while True:
        signal.alarm(limit_s)
        start = time.process_time()
        plan = call()
        times.append(time.process_time() - start)
        signal.alarm(0)
        if len(times) == _REPEATS or sum(times) > _ENOUGH_S:
            return times, plan


def _summary(plan: Plan) -> str:
    again = sum(stage.recompute != "never" for stage in plan.stages)
    proven = plan.solver.status if plan.solver.status == "optimal" else f"gap {plan.solver.gap:.2%}"
    return f"{len(plan.stages)} stages, M = {plan.micro_batches}, {again} recompute, {proven}"


def _peak_rss_bytes() -> int:
    # Not `ru_maxrss`: that begins with the size of the process that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    _main()
