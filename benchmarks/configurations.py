"""From a config.json to a plan: CPU seconds, and the plan of each sample configuration.

    python -m benchmarks.configurations

Every command runs in a process of its own, in an empty folder. CPU seconds are user and system time, with the start of
Python. The first plan is the first one that the search reports; `solve` prints its step time, and writes the best plan
so far after Ctrl-C or `--time-limit`.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from planner.device.machine import cpu_name

ROOT = Path(__file__).parents[1]
CONFIGURATIONS = ROOT / "sample_models" / "configurations"
REQUESTS = (
    *(("deepseek-v3", {"nodes": "30x8"}), ("gemma-2-9b", {"nodes": "8x8"}), ("llama-3-70b", {"nodes": "8x8"})),
    ("llama-3-70b", {"nodes": "8x8", "batch": 512, "replicas": "auto"}),
    *((name, {"nodes": "8x8"}) for name in ("mixtral-8x7b", "qwen3-30b-a3b", "t5-11b")),
)
"""Configurations and options of `solve`. DeepSeek-V3 does not fit 8 nodes of 8 H100."""

PROFILE = "profile {} --device estimate:h100"

_FIRST = """
import json, sys, time
import planner
from planner.solve.deadline import SearchObserver
plans = []
def record(step_us, schedule, least_us):
    plans.append((time.process_time(), step_us))
planner.profile(sys.argv[1], device="estimate:h100", output="profile.yaml")
planner.solve("profile.yaml", watch=SearchObserver(on_plan=record), **json.loads(sys.argv[2]))
print(*plans[0], min(step_us for seconds, step_us in plans if seconds <= 5))
"""
"""Program that prints the CPU seconds and the step time of the first plan, and the best step after 5 CPU seconds."""


def run(*command: str, folder: str) -> tuple[float, str]:
    """Return the CPU seconds and the output of a command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, stdout=output)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, command
        output.seek(0)
        return used.ru_utime + used.ru_stime, output.read().decode()


def row(name: str, request: Mapping[str, str | int], folder: str) -> str:
    """Return the row of a configuration and a request."""
    path = str(CONFIGURATIONS / name)
    words = [word for key, value in request.items() for word in (f"--{key}", str(value))]
    _, first = run("-c", _FIRST, path, json.dumps(request), folder=folder)
    first_s, first_us, soon_us = map(float, first.split())
    profile_s, _ = run("-m", "planner", *PROFILE.format(path).split(), "--quiet", folder=folder)
    solve_s, text = run("-m", "planner", "solve", *words, "--format", "json", "--quiet", folder=folder)
    plan = json.loads(text)
    step_us, width = plan["predicted"]["step_us"], plan.get("tensor_parallel", 1)
    return (
        f"| {name} | `{' '.join(words)}` | {first_s:.1f} | {profile_s + solve_s:.1f} | {width} | {plan['schedule']} "
        f"| {first_us / 1e3:,.0f} | {soon_us / 1e3:,.0f} | {step_us / 1e3:,.0f} |"
    )


def main() -> None:
    """Print the table of the page."""
    print(
        f"`python -m benchmarks.configurations` on {cpu_name()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}\n"
    )
    print("| model | request | first plan, CPU s | both, CPU s | T | schedule | first, ms | 5 CPU s, ms | last, ms |")
    print("|---|---|---:|---:|---:|---|---:|---:|---:|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, request in REQUESTS:
            print(row(name, request, folder), flush=True)


if __name__ == "__main__":
    main()
