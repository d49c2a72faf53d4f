"""How long short commands take from nothing to their exit, beside the import of the packages that they stand on.

    python benchmarks/startup.py [--rounds 30]

Processor time, user and system, with compiled modules: on a busy machine that says more than the clock. Each round
starts every command once. The ratio is of the least of all rounds; the medians stand beside it.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]

BASE = ("-c", "import typer, yaml, pydantic")

SOLVE = "solve --devices 3 --mem 4MB --batch 8 --schedule gpipe --quiet"

COMMANDS = {
    "python -c 'import typer, yaml, pydantic'": BASE,
    "gpipe-plan --version": ("-m", "planner", "--version"),
    "gpipe-plan --help": ("-m", "planner", "--help"),
    "gpipe-plan solve --help": ("-m", "planner", "solve", "--help"),
    "gpipe-plan check": ("-m", "planner", "check"),
    "gpipe-plan check --format json": ("-m", "planner", "check", "--format", "json"),
    "gpipe-plan show": ("-m", "planner", "show"),
}


def seconds(arguments: Sequence[str], folder: str) -> float:
    """Return the CPU time of one process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONPYCACHEPREFIX": str(Path(folder, "compiled"))}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen([sys.executable, *arguments], cwd=folder, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, arguments
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure all commands, and print a table."""
    parser = argparse.ArgumentParser(description="Start-up of short commands.")
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "tests" / "fuzz" / "seeds" / "profile.yaml", folder)
        seconds(("-m", "planner", *SOLVE.split()), folder)
        for arguments in COMMANDS.values():
            seconds(arguments, folder)  # compiles what is not compiled yet
        taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
        for _ in range(rounds):
            for name, arguments in COMMANDS.items():
                taken[name].append(seconds(arguments, folder))
    base, *_ = taken.values()
    print(f"python {sys.version.split()[0]}, {os.cpu_count()} CPUs, {rounds} rounds\n")
    print(f"{'command':44} {'least ms':>10} {'median ms':>10} {'times the first':>16}")
    for name, times in taken.items():
        least, median = min(times), statistics.median(times)
        print(f"{name:44} {least * 1e3:10.0f} {median * 1e3:10.0f} {least / min(base):16.2f}")


if __name__ == "__main__":
    main()
