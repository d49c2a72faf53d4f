"""Time and memory of the equivalence check of one model.

    python benchmarks/equivalence.py benchmarks/gpt2.py
    python benchmarks/equivalence.py benchmarks/gpt2.py layers=48 width=1600 heads=25

Prints what the check found, its time on the clock, the CPU time of its processes, and their largest memory together:
the proportional set size, which counts a page of several processes once. Needs Linux, and a machine without other work.
"""

import os
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from planner.executor.equivalence.check import check_equivalence
from planner.model.load import load_model
from planner.profile.units import layer_digests

_EVERY_S = 0.5


def main() -> None:
    """Check one model."""
    source, *settings = sys.argv[1:]
    loaded = load_model(source, settings=dict(setting.split("=", 1) for setting in settings))
    over = threading.Event()
    peaks = [0]
    watching = threading.Thread(target=_watch, args=(over, peaks))
    watching.start()
    begin = time.monotonic()
    try:
        found = check_equivalence(loaded, budget_s=600.0, digests=layer_digests)
    finally:
        over.set()
        watching.join()
    seconds, used = time.monotonic() - begin, os.times()
    print(found.proof)
    cpu_seconds = used.children_user + used.children_system
    print(f"{seconds:.1f} s, {cpu_seconds:.1f} CPU s, {peaks[0] / 1e9:.1f} GB")


def _watch(over: threading.Event, peaks: list[int]) -> None:
    """Keep the largest memory of all descendants of this process in `peaks`."""
    while not over.wait(_EVERY_S):
        peaks[0] = max(peaks[0], sum(map(_bytes_of, _descendants(os.getpid()))))


def _descendants(root: int) -> list[int]:
    """Return the processes that `root` has started, and those that they have."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
        except OSError:  # it has ended
            continue
        children[int(parent)].append(int(folder.name))
    found = [root]
    for process in found:
        found.extend(children[process])
    return found[1:]


def _bytes_of(process: int) -> int:
    """Return the proportional set size of a process, 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
