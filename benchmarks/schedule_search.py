"""How good plans of several chunks are: gap to the proven bound, and beside what random search finds.

    python benchmarks/schedule_search.py > docs/measurements/schedule_search.md
    python benchmarks/schedule_search.py --chains 20 --random 2

Random chains of 10 to 48 layers on 2 to 6 devices, under interleaved 1F1B and ZBV. Caps are loose, or tight: what even
stages hold with recomputation everywhere, and 30 % of what they would hold above that without. Random search knows
nothing but the cost model: again and again it begins with cuts and recomputation at random, and keeps random changes
that help, for so many seconds of process time a case. Prints Markdown.
"""

import argparse
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from solve_cases import UNLIMITED, inputs_of

from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.errors import InfeasibleError, SolverError
from planner.core.values.plan import Inputs, ScheduleName
from planner.core.values.profile import Device, LayerProfile, Profile
from planner.device.machine import cpu_name
from planner.solve import Request, solve
from planner.solve.cases import cases_of
from planner.solve.space.partitions import Evaluator

_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One case."""

    seed: int
    schedule: ScheduleName
    tight: bool

    @property
    def devices(self) -> int:
        """K."""
        return 2 + self.seed % 5

    @property
    def chunks(self) -> int:
        """V."""
        return 2 if self.schedule != "interleaved" else 2 + self.seed % 2

    @property
    def micro_batches(self) -> int:
        """M."""
        return self.devices * (1, 2, 4)[self.seed % 3]

    def profile(self) -> Profile:
        """Return a chain with equal or log-normal layers."""
        rng = np.random.default_rng(self.seed)
        stages = self.devices * self.chunks
        num = int(rng.integers(max(10, stages + 2), max(12, min(48, 4 * stages)) + 1))
        spread = (0.0, 0.3, 0.7)[self.seed // 2 % 3]

        def values(mean: float) -> list[float]:
            return [float(x) for x in mean * rng.lognormal(0.0, spread, num)]

        forward, ratio = values(4000.0), rng.uniform(1.6, 2.4, num) if spread else np.full(num, 2.0)
        saved, output, parameters = values(200e6), values(4e6), values(40e6)
        layers = tuple(
            LayerProfile(
                name=f"l{n}",
                parameter_bytes=int(parameters[n]),
                optimizer_bytes=2 * int(parameters[n]),
                forward_us=(forward[n],),
                backward_us=(forward[n] * float(ratio[n]),),
                output_bytes=(int(output[n]),),
                saved_bytes=(int(saved[n]),),
            )
            for n in range(num)
        )
        return Profile(device=Device(kind="cpu", name="synthetic"), micro_batch_sizes=(1,), layers=layers)

    def request(self, profile: Profile) -> Request:
        """Return the request to the solver."""
        inputs = replace(
            inputs_of(self.devices, self.micro_batches, UNLIMITED), schedule=self.schedule, chunks=self.chunks
        )
        if self.tight:
            cap = self._tight_cap(profile, inputs)
            inputs = replace(inputs, memory_bytes=(cap,) * self.devices)
        return Request(inputs=inputs, micro_batches=self.micro_batches)

    def _tight_cap(self, profile: Profile, inputs: Inputs) -> int:
        stages = self.devices * self.chunks
        edges = np.linspace(0, len(profile.layers), stages + 1).round().astype(int)
        costs = cases_of(profile, Request(inputs=inputs, micro_batches=self.micro_batches))[0].costs
        peaks = []
        for recompute in ("never", "always"):
            partition = Partition(
                schedule=self.schedule,
                micro_batches=self.micro_batches,
                balance=tuple(np.diff(edges).tolist()),
                recompute=(recompute,) * stages,
                chunks=self.chunks,
            )
            totals = [0] * self.devices
            for stage, value in enumerate(Evaluation(costs, partition, inputs.cluster).stages):
                totals[partition.device_of(stage)] += value.memory.total
            peaks.append(max(totals))
        return int(peaks[1] + 0.3 * (peaks[0] - peaks[1]))


class Found(NamedTuple):
    """The solver's plan."""

    step_us: float
    bound_us: float
    seconds: float


def main() -> None:
    """Print a table for each schedule and kind of limit, and their summary."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chains", type=int, default=60, help="random chains for each table")
    parser.add_argument("--random", type=float, default=10.0, help="process seconds of random search for a case")
    parser.add_argument("--schedules", type=lambda text: text.split(","), default=["interleaved", "zbv"])
    parser.add_argument("--caps", type=lambda text: text.split(","), default=["loose", "tight"])
    options = parser.parse_args()
    print("# Plans with several chunks: gaps, and random search\n")
    print(f"`{shlex.join(['python', *sys.argv])}` on {cpu_name()}, Python {platform.python_version()}.")
    for schedule in options.schedules:
        for caps in options.caps:
            tight = caps == "tight"
            _table([Question(seed=n, schedule=schedule, tight=tight) for n in range(options.chains)], options.random)


def _table(questions: list[Question], seconds: float) -> None:
    print(f"\n## {questions[0].schedule}, {'tight' if questions[0].tight else 'loose'} caps\n")
    print("| chain | L | K | V | M | step (ms) | gap | time | random search |\n|---|---|---|---|---|---|---|---|---|")
    gaps, gains, times = [], [], []
    for question in questions:
        profile = question.profile()
        request = question.request(profile)
        found = _solved(profile, request)
        random_us = random_search(profile, request, seconds) if seconds else np.inf
        cells = [str(n) for n in (question.seed, len(profile.layers), question.devices, question.chunks)]
        cells.append(str(question.micro_batches))
        gain = 1 - random_us / found.step_us if found.step_us < np.inf else float(random_us < np.inf)
        if found.step_us < np.inf:
            gaps.append(1 - found.bound_us / found.step_us)
            cells += [f"{found.step_us / 1e3:.2f}", f"{gaps[-1]:.1%}", f"{found.seconds:.2f} s"]
        else:
            cells += ["none", "", f"{found.seconds:.2f} s"]
        times.append(found.seconds)
        gains.append(max(0.0, gain))
        print(f"| {' | '.join(cells)} | {f'{-gain:+.1%}' if seconds else ''} |", flush=True)
    print(
        f"\n{len(gaps)} of {len(questions)} planned. Gap: median {statistics.median(gaps):.1%}, largest "
        f"{max(gaps):.1%}, "
        f"{sum(gap < 1e-9 for gap in gaps)} proven. Random search is faster by {max(gains):.1%} at most, by more "
        f"than 1 % in {sum(gain > 0.01 for gain in gains)}. Time: median {statistics.median(times):.2f} s, at most "
        f"{max(times):.2f} s."
    )


def _solved(profile: Profile, request: Request) -> Found:
    begin = time.perf_counter()
    try:
        plan = solve(profile, request)
    except (InfeasibleError, SolverError):
        return Found(np.inf, np.inf, time.perf_counter() - begin)
    return Found(plan.predicted.step_us, plan.solver.lower_bound_us, time.perf_counter() - begin)


def random_search(profile: Profile, request: Request, seconds: float) -> float:
    """Return the fastest step, in microseconds, that random changes find in some seconds; infinite if nothing fits."""
    case = cases_of(profile, request)[0]
    rng = np.random.default_rng(0)
    evaluator = Evaluator(case, case.num_devices)
    ends, best = time.process_time() + seconds, np.inf
    for steps in _climbs(evaluator, rng):
        best = min(best, steps)
        if time.process_time() > ends:
            return best
    return best


def _climbs(evaluator: Evaluator, rng: np.random.Generator) -> Iterator[float]:
    """Yield the fastest step so far of random climbs."""
    num, stages = evaluator.case.costs.num_layers, evaluator.num_stages
    while True:
        share = np.cumsum(rng.uniform(0.5, 1.5, stages))
        cuts = np.array([0, *np.round(share / share[-1] * num)[:-1], num], dtype=np.int64)
        cuts = _legal(cuts, num)
        choices = np.array(
            rng.choice(evaluator.allowed, stages) if rng.random() < 0.5 else [evaluator.allowed[0]] * stages
        )
        best, idle = (np.inf, np.inf), 0
        while idle < 5:
            every = np.repeat(cuts[None], _ROWS, axis=0)
            places, lengths = rng.integers(1, stages, _ROWS), rng.integers(1, stages, _ROWS)
            index = np.arange(stages + 1)[None]
            block = (index >= places[:, None]) & (index < np.minimum(places + lengths, stages)[:, None])
            every = every + block * rng.integers(-2, 3, _ROWS)[:, None]
            keeps = (np.diff(every, axis=1) > 0).all(axis=1)
            some = np.repeat(choices[None], _ROWS, axis=0)
            changes = rng.random(some.shape) < 1.0 / stages
            some = np.where(changes, rng.choice(evaluator.allowed, some.shape), some)
            every, some = every[keeps], some[keeps]
            if not len(every):
                idle += 1
                continue
            over = evaluator.excess_bytes(every, some).sum(axis=1)
            step_us = evaluator.step_us(every, some)
            at = np.lexsort((step_us, over))[0]
            now = float(over[at]), float(step_us[at])
            idle = 0 if now < best else idle + 1
            if now < best:
                best, cuts, choices = now, every[at], some[at]
            yield best[1] if best[0] == 0 else np.inf


def _legal(cuts: np.ndarray, num: int) -> np.ndarray:
    places = np.arange(len(cuts))
    cuts = np.maximum.accumulate(cuts - places) + places
    return np.minimum(cuts, num - (len(cuts) - 1) + places)


if __name__ == "__main__":
    main()
