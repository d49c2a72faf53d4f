"""How long the solver takes, and what its plans gain over those of other planners under the same cost model.

    python benchmarks/solve.py > docs/measurements/solve.md
    python benchmarks/solve.py --parts solver --layers 24,200 --devices 8 --limit 10

Prints Markdown with its environment. Parts: `solver` (time and memory by size, each case in a process of its own on one
core), `command` (the whole `gpipe-plan solve`), `peers` (side by side with torchgpipe's and DeepSpeed's partitioners,
where they are installed), `shapes` (two models for which the usual rules of thumb cost a lot).

The peers, in an environment of their own, tried with Python 3.11, torchgpipe 0.0.7 and DeepSpeed 0.19.8:

    python3.11 -m venv peers && . peers/bin/activate
    pip install torch==2.13.0
    pip install torchgpipe
    pip install psutil py-cpuinfo einops hjson msgpack ninja tqdm packaging
    DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation deepspeed
    pip install -e .
"""

import argparse
import importlib
import importlib.metadata
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import chains
from chains import Chain
from solve_cases import ONE_CORE, UNLIMITED, Case, inputs_of, request_of, run_case, seconds
from solve_peers import MIN_MAX, Peer, installed_peers, judge, smallest_cap

from planner import files
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at
from planner.solve import Request, solve

LAYERS, DEVICES = (24, 50, 200, 1000, 4000, 10_000), (8, 32, 128, 1024)
BATCH = 4096
RANDOM_CHAINS = 50
SPECIAL = (
    ("every M of a batch of 256", Case(chain="even", layers=200, devices=8, batch=256)),
    ("every M of a batch of 256", Case(chain="uneven", layers=200, devices=8, batch=256)),
    ("the paper's 83.9 B-parameter Transformer, every M of 4096",
     Case(chain="even", layers=1663, devices=128, batch=BATCH)),
    ("one M", Case(chain="uneven", layers=2000, devices=512, batch=BATCH, micro_batches=2048)),
    ("the largest, every M of 4096", Case(chain="even", layers=10_000, devices=1024, batch=BATCH)),
    ("the largest, every M of 4096", Case(chain="uneven", layers=10_000, devices=1024, batch=BATCH)),
    ("the largest, `--time-limit 10`", Case(chain="even", layers=10_000, devices=1024, batch=BATCH, time_limit_s=10)),
    ("the largest, `--time-limit 10`", Case(chain="uneven", layers=10_000, devices=1024, batch=BATCH, time_limit_s=10)),
)  # fmt: skip


def main() -> None:
    """Print the requested parts."""
    parts: dict[str, Callable[[argparse.Namespace], None]] = {
        "solver": _solver, "command": _command, "peers": _peers, "shapes": _shapes,
    }  # fmt: skip
    options = _options(list(parts))
    if any(os.environ.get(name) != one for name, one in ONE_CORE.items()):
        # numpy counts its threads when it is imported.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE_CORE})  # noqa: S606 - itself
    print("# The solver: time, memory, and plans of other planners\n")
    print(_environment())
    for part in options.parts:
        parts[part](options)


def _options(parts: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parts", type=lambda text: text.split(","), default=parts, help=",".join(parts))
    parser.add_argument("--layers", type=_integers, default=LAYERS, help="L of the table of times")
    parser.add_argument("--devices", type=_integers, default=DEVICES, help="K of the table of times")
    parser.add_argument("--limit", type=int, default=60, help="seconds for one answer of the solver")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB of address space for one answer")
    options = parser.parse_args()
    unknown = set(options.parts) - set(parts)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    return options


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def _environment() -> str:
    cpu = importlib.import_module("planner.device.machine").cpu_name()  # imports torch, which cases must not
    packages = {"numpy": "numpy", "torchgpipe": "torchgpipe", "deepspeed": "DeepSpeed", "gpipe-plan": "gpipe-plan"}
    versions = ", ".join(f"{shown} {_version(name)}" for name, shown in packages.items())
    command = shlex.join(["python", *sys.argv])
    return (
        f"`{command}` on {cpu}, {os.cpu_count()} cores of which one is used; Python {platform.python_version()}, "
        f"{versions}. One thread (`OMP_NUM_THREADS=1`)."
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# Time and memory


def _solver(options: argparse.Namespace) -> None:
    print("\n## Time of an answer\n")
    print(
        f"Time of `solve(profile, request)` for a batch of {BATCH} under GPipe, with recomputation chosen per stage, "
        "memory limits that make some stages recompute, and exact memory records at "
        f"{BATCH.bit_length()} micro-batch sizes. *One M*: M = 4K. *Every M*: the {BATCH.bit_length()} divisors of the "
        "batch. *Even*: the GPipe paper's Transformer. *Uneven*: log-normal times and sizes, with backwards of "
        "1.2 to 2.8 times the forward. Times are process times, medians of up to 5 answers. Memory is the largest "
        "resident size of the process, including profile and interpreter.\n"
    )
    print("| L | K | even, one M | even, every M | uneven, one M | uneven, every M |")
    print("|---|---|---|---|---|---|")
    for layers in options.layers:
        for devices in (k for k in options.devices if k < layers):
            cells = [run_case(_limited(case, options)).cell() for case in _cases(layers, devices)]
            print(f"| {layers} | {devices} | {' | '.join(cells)} |", flush=True)
    print("\n| | L | K | chain | caps | time | peak | before | plan |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, case in (entry for entry in SPECIAL if entry[1].layers <= max(options.layers)):
        for tight in (True, False):
            _print_special(name, _limited(replace(case, tight=tight), options))


def _cases(layers: int, devices: int) -> Iterator[Case]:
    for chain in ("even", "uneven"):
        for micro_batches in (min(4 * devices, BATCH), None):
            yield Case(chain=chain, layers=layers, devices=devices, batch=BATCH, micro_batches=micro_batches)


def _limited(case: Case, options: argparse.Namespace) -> Case:
    return replace(case, limit_s=options.limit, memory_gib=options.memory)


def _print_special(name: str, case: Case) -> None:
    outcome = run_case(case)
    cells = [outcome.problem, "", "", ""]
    if not outcome.problem:
        sizes = (f"{size / 2**20:.0f} MiB" for size in (outcome.rss_bytes, outcome.before_bytes))
        cells = [seconds(outcome.seconds), *sizes, outcome.plan]
    caps = "tight" if case.tight else "none"
    print(f"| {name} | {case.layers} | {case.devices} | {case.chain} | {caps} | {' | '.join(cells)} |", flush=True)


# The command


def _command(_options: argparse.Namespace) -> None:
    print("\n## The whole command\n")
    profile, request = request_of(Case(chain="even", layers=200, devices=8, batch=256))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profile.yaml")
        files.write(str(path), profile)
        arguments = ["solve", str(path), "--devices", "8", "--mem", f"{request.inputs.memory_bytes[0]}B"]
        command = [sys.executable, "-m", "planner", *arguments, "--batch", "256", "-o", str(Path(folder, "plan.yaml"))]
        times = {name: [_wall_s([*command, "--schedule", name]) for _ in range(5)] for name in ("auto", "gpipe")}
        size = path.stat().st_size
    each = "; ".join(
        f"`--schedule {name}` median {seconds(statistics.median(of))}, fastest {seconds(min(of))} of 5"
        for name, of in times.items()
    )
    print(
        f"`gpipe-plan solve profile.yaml --devices 8 --batch 256`, L = 200, a profile.yaml of {size / 1e6:.1f} MB with "
        f"exact memory records at 9 sizes, start of Python included: {each}."
    )


def _wall_s(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


# Other planners


@dataclass(frozen=True, slots=True, kw_only=True)
class _Verdict:
    """A peer's plan compared with ours."""

    ratio: float | None
    """Its step time over ours; None: it runs out of memory."""
    seconds: float
    """What its planning took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """One request to all planners."""

    chain: Chain
    devices: int
    tight: bool

    @property
    def micro_batches(self) -> int:
        return 4 * self.devices

    def verdicts(self, peers: Sequence[Peer]) -> list[_Verdict]:
        """Return our plan first, whose ratio is 1 by definition."""
        profile = self.chain.profile((1,), exact=False)
        costs = costs_at(profile, 1)
        cap = UNLIMITED
        if self.tight:
            cap = int(1.1 * smallest_cap(costs, self.devices, micro_batches=self.micro_batches))
        inputs = inputs_of(self.devices, self.micro_batches, cap)
        start = time.perf_counter()
        plan = solve(profile, Request(inputs=inputs, micro_batches=self.micro_batches))
        verdicts = [_Verdict(ratio=1.0, seconds=time.perf_counter() - start)]
        ours_us = judge(costs, plan.balance, micro_batches=self.micro_batches, cap_bytes=cap)
        # The simulator knows nothing of the solver's closed form.
        if ours_us is None or abs(ours_us / plan.predicted.step_us - 1) > 1e-9:
            sys.exit(f"{self}: the plan says {plan.predicted.step_us} µs, the simulator {ours_us}")
        for peer in peers:
            verdict = self._verdict(peer, costs, cap, ours_us)
            if verdict.ratio is not None and verdict.ratio < 1 - 1e-9:
                sys.exit(f"{self}: {peer.name} found a faster plan than the optimum, {verdict.ratio}")
            verdicts.append(verdict)
        return verdicts

    def _verdict(self, peer: Peer, costs: ChainCosts, cap: int, ours_us: float) -> _Verdict:
        start = time.perf_counter()
        balances = peer.balances(self.chain, self.devices)
        taken = time.perf_counter() - start
        steps = (judge(costs, b, micro_batches=self.micro_batches, cap_bytes=cap) for b in balances)
        fitting = [step for step in steps if step is not None]
        return _Verdict(ratio=min(fitting) / ours_us if fitting else None, seconds=taken)


def _peers(_options: argparse.Namespace) -> None:
    print("\n## Compared with other planners\n")
    peers, missing = installed_peers()
    peers = [*peers, MIN_MAX]
    print(
        "The table has step times divided by those of our plans, all from the event simulator, with M = 4K. Each "
        "stage of another planner's cuts gets the cheapest recomputation that fits. OOM: a stage does not fit with any "
        "recomputation. Memory limits (caps): none, or tight, 1.1 times the smallest limit under which a plan exists. "
        "torchgpipe balances times (`balance_by_time`) or bytes (`balance_by_size`). DeepSpeed has no method for "
        "times, so *fed times* passes F+B to its partition function. The last column is not a package: it is the best "
        "possible result of a planner that minimizes the largest F+B.\n"
    )
    for package in missing:
        print(f"{package}: not installed\n")
    print(f"| chain | K | caps | {' | '.join(peer.name for peer in peers)} |")
    print(f"|---|---|---|{'---|' * len(peers)}")
    for chain in (chains.vgg_16(), chains.amoebanet_d()):
        for devices in (2, 4, 8):
            for tight in (False, True):
                setting = _Setting(chain=chain, devices=devices, tight=tight)
                cells = ["OOM" if v.ratio is None else f"{v.ratio:.3f}" for v in setting.verdicts(peers)[1:]]
                print(f"| {chain.name} | {devices} | {_caps(tight)} | {' | '.join(cells)} |", flush=True)
    _random_chains(peers)


def _random_chains(peers: Sequence[Peer]) -> None:
    print(
        f"\n{RANDOM_CHAINS} random chains of 24 to 48 layers with log-normal times and sizes, and backwards of 1.2 to "
        "2.8 times the forward. Mean and max are over a planner's plans that fit; under tight limits these are the "
        "easier chains. The ratio of our plans is 1 by definition: the script stops if another "
        "planner's plan is faster.\n"
    )
    print("| K | caps | planner | mean | max | optimal | OOM | its own time, median |")
    print("|---|---|---|---|---|---|---|---|")
    for devices in (2, 4, 8):
        for tight in (False, True):
            settings = [
                _Setting(chain=chains.random_chain(seed), devices=devices, tight=tight) for seed in range(RANDOM_CHAINS)
            ]
            columns = zip(*(setting.verdicts(peers) for setting in settings), strict=True)
            for name, verdicts in zip(("**gpipe-plan**", *(peer.name for peer in peers)), columns, strict=True):
                print(f"| {devices} | {_caps(tight)} | {name} | {_statistics(verdicts)} |", flush=True)


def _caps(tight: bool) -> str:  # noqa: FBT001 - two words for a table
    return "tight" if tight else "none"


def _statistics(verdicts: Sequence[_Verdict]) -> str:
    ratios = [verdict.ratio for verdict in verdicts if verdict.ratio is not None]
    optimal = sum(ratio < 1 + 1e-6 for ratio in ratios)
    mean, largest = (f"{statistics.mean(ratios):.3f}", f"{max(ratios):.3f}") if ratios else ("-", "-")
    counts = f"{optimal} of {len(verdicts)} | {len(verdicts) - len(ratios)}"
    return f"{mean} | {largest} | {counts} | {seconds(statistics.median(v.seconds for v in verdicts))}"


# Two shapes


def _shapes(_options: argparse.Namespace) -> None:
    print("\n## Two models for which rules of thumb cost much time\n")
    print(
        "**Rule: use the largest M, because the bubble is (K-1)/(M+K-1).** 24 equal layers with F = 0.2 ms and B = 0.4"
    )
    print(
        "ms per sample, and a fixed cost of every layer's forward and backward per micro-batch. K = 8, a batch of 64.\n"
    )
    print("| fixed cost | M chosen | step with M = 64 over ours |")
    print("|---|---|---|")
    for fixed_us in (0.0, 100.0, 500.0, 2000.0):
        profile = chains.launch_bound(fixed_us).profile((1, 2, 4, 8, 16, 32, 64), exact=False)
        chosen, largest = (solve(profile, Request(inputs=inputs_of(8, 64), micro_batches=m)) for m in (None, 64))
        ratio = largest.predicted.step_us / chosen.predicted.step_us
        print(f"| {fixed_us / 1e3:g} ms | {chosen.micro_batches} | {ratio:.3f} |")
    print("\n**Rule: balance F+B, with a frozen backbone.** 64 equal layers: the first 40 have no backward, the others")
    print("B = 2F. Step times divided by those of our plans, without memory limits, M = 4K.\n")
    peers = [*installed_peers()[0], MIN_MAX]
    print(f"| K | {' | '.join(peer.name for peer in peers)} |")
    print(f"|---|{'---|' * len(peers)}")
    for devices in (2, 4, 8):
        verdicts = _Setting(chain=chains.frozen_backbone(), devices=devices, tight=False).verdicts(peers)[1:]
        print(f"| {devices} | {' | '.join(f'{v.ratio:.3f}' for v in verdicts)} |")


if __name__ == "__main__":
    main()
