"""Compare `--schedule auto` with each schedule that a user can name, on the same request.

    python benchmarks/open_schedule.py > docs/measurements/open_schedule.md
    python benchmarks/open_schedule.py --chains 20 --seconds 0

The chains are a language model with a head (lm), a convolutional network (cnn) and a mixture of experts (moe), each
with L of 24 to 96 layers on K of 4, 8 or 16 devices. M is K, 2K or 4K. The memory limit is none, what 1F1B needs
without a limit, or 1.1 times the smallest with which 1F1B is feasible. The requests are in random order, with a fixed
seed. A random local search then tries to improve the plan (`local_search.py`). Prints Markdown.
"""

import argparse
import itertools
import platform
import random
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np
from local_search import improved_us
from solve_cases import UNLIMITED, inputs_of

from planner.core.errors import PlannerError
from planner.core.schedule import SCHEDULES, SEARCHED
from planner.core.values.cluster import Link
from planner.core.values.plan import Inputs, Plan, ScheduleName
from planner.core.values.profile import Device, LayerProfile, Profile
from planner.device.machine import cpu_name
from planner.solve import Request, solve

_DEVICES = (4, 8, 16)
_LIMITS = ("none", "1F1B's", "tight")


def chain(kind: str, num_layers: int) -> Profile:
    """Return the profile of a chain; the same arguments always give the same one."""
    rng = np.random.default_rng(num_layers * 7 + len(kind))
    depth, odd = np.linspace(0, 1, num_layers), np.arange(num_layers) % 2 == 1
    output = np.full(num_layers, 8.4e6)
    if kind == "lm":
        forward, parameters, saved = (np.full(num_layers, number) for number in (2000.0, 200e6, 130e6))
        backward = 2 * forward
        parameters[[0, -1]] = 260e6
        forward[0], backward[0], saved[0] = 200, 100, 8e6
        forward[-1], backward[-1] = 4600, 9200
    elif kind == "cnn":
        forward = 3000 * (1 - 0.5 * depth) * rng.lognormal(0, 0.25, num_layers)
        backward = forward * rng.uniform(1.7, 2.3, num_layers)
        parameters, output = 8e6 * 2 ** (5 * depth), 60e6 * 2 ** (-4 * depth)
        saved = output * rng.uniform(2, 5, num_layers)
    else:
        forward, parameters, saved = np.where(odd, [[3200.0], [500e6], [180e6]], [[1500.0], [90e6], [110e6]])
        backward = 2.05 * forward
        forward[-1] += 1800
        backward[-1] += 3600
    layers = tuple(
        LayerProfile(
            name=f"layer_{n}",
            parameter_bytes=int(parameters[n]),
            optimizer_bytes=int(2 * parameters[n]),
            forward_us=(float(forward[n]),),
            backward_us=(float(backward[n]),),
            backward_input_us=(float(0.52 * backward[n]),),
            backward_weight_us=(float(0.5 * backward[n]),),
            output_bytes=(int(output[n]),),
            saved_bytes=(int(saved[n]),),
            weight_held_bytes=(int(0.6 * saved[n]),),
        )
        for n in range(num_layers)
    )
    return Profile(device=Device(kind="cpu", name="synthetic"), micro_batch_sizes=(1,), layers=layers)


def answer(profile: Profile, inputs: Inputs, schedule: ScheduleName) -> tuple[Plan | None, float]:
    """Return the plan under a schedule, None if there is none, and the CPU time in seconds."""
    begin_s = time.process_time()
    try:
        request = Request(inputs=replace(inputs, schedule=schedule, chunks=0), micro_batches=inputs.batch)
        plan: Plan | None = solve(profile, request)
    except PlannerError:
        plan = None
    return plan, time.process_time() - begin_s


def limit_bytes(profile: Profile, inputs: Inputs, which: str) -> int:
    """Return the memory limit of each device that `which` names."""
    plan, _ = answer(profile, inputs, "1f1b")
    if plan is None or which == "none":
        return UNLIMITED
    low, high = 1, max(plan.peak_bytes_by_device())
    while which == "tight" and high > 1.01 * low:
        middle = (low + high) // 2
        fits = answer(profile, _limited(inputs, middle), "1f1b")[0] is not None
        low, high = (low, middle) if fits else (middle, high)
    return int(1.1 * high) if which == "tight" else high


def _limited(inputs: Inputs, memory_bytes: int) -> Inputs:
    return replace(inputs, memory_bytes=(memory_bytes,) * inputs.devices)


def requests() -> Iterator[tuple[str, int, int, int, str]]:
    """Yield kind of chain, L, K, M and memory limit of each request, in random order."""
    rng = random.Random(0)  # noqa: S311 - the same requests every time
    every = [*itertools.product(("lm", "cnn", "moe"), _DEVICES, (1, 2, 4), _LIMITS)]
    rng.shuffle(every)
    for kind, devices, factor, which in every:
        yield kind, rng.randrange(max(24, 2 * devices), 97), devices, factor * devices, which


class Row(NamedTuple):
    """Figures of one request, as shares of a step time unless noted."""

    difference: float
    """How much slower `auto` is than the fastest schedule that a user can name."""
    gap: float
    named_gap: float
    """Gap over the named schedules: distance to the smallest of their lower bounds."""
    seconds: float
    """CPU time in seconds."""
    gain: float
    """What the local search gains."""


def measure(request: tuple[str, int, int, int, str], seconds: float) -> Row:
    """Print the row of a request, and return its figures."""
    kind, num_layers, devices, m, which = request
    profile = chain(kind, num_layers)
    inputs = replace(inputs_of(devices, m, UNLIMITED), link=Link(bytes_per_s=25e9, latency_us=10.0))
    inputs = _limited(inputs, limit_bytes(profile, inputs, which))
    plan, cpu_s = answer(profile, inputs, "auto")
    assert plan is not None, "GPipe with recomputation fits wherever 1F1B does"
    named = {name: answer(profile, inputs, name)[0] for name in (*SCHEDULES, SEARCHED.name)}
    step_us = {name: inf if each is None else each.predicted.step_us for name, each in named.items()}
    best, auto_us = min(step_us, key=step_us.__getitem__), plan.predicted.step_us
    bounds_us = [each.solver.lower_bound_us for name, each in named.items() if each and name != SEARCHED.name]
    gain = 1 - improved_us(profile, inputs, plan, seconds) / auto_us if seconds else 0.0
    row = Row(auto_us / step_us[best] - 1, plan.solver.gap, max(0.0, 1 - min(bounds_us) / auto_us), cpu_s, gain)
    print(
        f"| {kind} | {num_layers} | {devices} | {m} | {which} | {plan.schedule} | {auto_us / 1e3:.2f} | {row.gap:.1%} "
        f"| {row.named_gap:.1%} | {cpu_s:.1f} | {best} | {step_us[best] / 1e3:.2f} | {row.difference:+.2%} "
        f"| {f'{-gain:+.2%}' if seconds else ''} |",
        flush=True,
    )
    return row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chains", type=int, default=60, help="number of requests")
    parser.add_argument("--skip", type=int, default=0, help="number of requests to leave out at the beginning")
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds of local search from each plan")
    parser.add_argument("--minutes", type=float, default=inf, help="time after which no request is started")
    options = parser.parse_args()
    begin_s = time.monotonic()
    command = shlex.join(["python", "benchmarks/open_schedule.py", *sys.argv[1:]])
    print("# Automatic choice of the schedule, compared with each schedule\n")
    print(f"`{command}` on {cpu_name()}, Python {platform.python_version()}; CPU seconds of one process.\n")
    print('"Fastest named" is the fastest answer to a request for one schedule.')
    print('"Difference" is positive if `auto` is slower.')
    print('"Gap, named" counts only faster plans with a named schedule, which is any schedule except `search`.')
    print('"Local" is the change of the step by a random local search that starts from the plan.\n')
    print(
        "| chain | L | K | M | memory limit | schedule | `auto` (ms) | gap | gap, named | CPU s | fastest named | ms "
        "| difference | local |"
    )
    print(f"{'|---' * 14}|")
    rows = []
    for request in itertools.islice(requests(), options.skip, options.chains):
        if time.monotonic() - begin_s > 60 * options.minutes:
            break
        rows.append(measure(request, options.seconds))
    slower = sum(row.difference > 1e-9 for row in rows)
    largest = max(row.difference for row in rows)
    print(f"\n`auto` was slower in {slower} of {len(rows)} requests, by {max(0.0, largest):.2%} at most.")
    gap, named_gap, cpu_s = (
        statistics.median(values)
        for values in ([r.gap for r in rows], [r.named_gap for r in rows], [r.seconds for r in rows])
    )
    print(f"Medians: gap {gap:.1%}, gap to plans with a named schedule {named_gap:.1%}, {cpu_s:.1f} CPU s.")
    print(f"Longest answer: {max(row.seconds for row in rows):.1f} CPU s.")
    if options.seconds:
        gains = [row.gain for row in rows]
        better = sum(gain > 0.01 for gain in gains)
        print(
            f"Local search: faster by more than 1 % in {better} of {len(rows)} requests, by {max(gains):.2%} at most."
        )


if __name__ == "__main__":
    main()
