"""Schedules beside published ones, and beside what was the best before backwards were split.

    python benchmarks/schedules.py > docs/measurements/schedules.md
    python benchmarks/schedules.py --devices 4 8

First the bubbles of Qi et al. 2023 (arXiv:2401.10241), tables 5 and 6: (cost - M (F + I + W)) / cost; the cost is the
longest span over stages from first F to last W. Then an even chain of 8 K layers with F = I = W on K devices that have
as much memory as 1F1B needs, which keeps all it saves until W: step time over the least there is. Prints Markdown;
times are process time.
"""

import argparse
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from solve_cases import UNLIMITED, inputs_of

from planner.core.cost.simulate import StageTimes, period_us
from planner.core.errors import PlannerError
from planner.core.schedule import SCHEDULES
from planner.core.values.plan import Inputs, Plan
from planner.core.values.profile import Device, LayerProfile, Profile
from planner.device.machine import cpu_name
from planner.solve import Request, solve
from planner.solve.orders.order_problem import ApproximateStageMemory, OrderProblem
from planner.solve.orders.order_search import OrderSearch, estimated_least_period_us

# K, M; F, I, W, T in ms; M_W / M_B; 1F1B, ZB-H1, ZB-H2, ZB-1p, ZB-2p.
_PUBLISHED: Sequence[tuple[tuple[int, int], tuple[float, ...], float, tuple[float, ...]]] = (
    ((8, 24), (18.522, 18.086, 9.337, 0.601), 0.366, (0.2431, 0.1585, 0.1083, 0.1585, 0.0433)),
    ((8, 32), (18.513, 18.086, 9.331, 0.626), 0.366, (0.1985, 0.1242, 0.0837, 0.1242, 0.0039)),
    ((8, 64), (18.546, 18.097, 9.321, 0.762), 0.366, (0.1240, 0.0674, 0.0444, 0.0674, 0.0026)),
    ((8, 24), (29.718, 29.444, 19.927, 0.527), 0.432, (0.2347, 0.1323, 0.0698, 0.1323, 0.0029)),
    ((8, 32), (29.802, 29.428, 19.530, 0.577), 0.432, (0.1898, 0.1045, 0.0559, 0.1045, 0.0022)),
    ((8, 64), (29.935, 29.621, 19.388, 0.535), 0.432, (0.1091, 0.0554, 0.0294, 0.0554, 0.0010)),
    ((16, 48), (11.347, 11.248, 8.132, 0.377), 0.432, (0.2552, 0.1397, 0.0672, 0.1397, 0.0066)),
    ((16, 64), (11.307, 11.254, 8.101, 0.379), 0.432, (0.2082, 0.1088, 0.0516, 0.1088, 0.0054)),
    ((16, 128), (11.325, 11.308, 8.109, 0.378), 0.432, (0.1251, 0.0576, 0.0266, 0.0576, 0.0028)),
    ((32, 96), (10.419, 10.207, 7.715, 0.408), 0.432, (0.2646, 0.1421, 0.0641, 0.1421, 0.0038)),
    ((32, 128), (10.408, 10.204, 7.703, 0.408), 0.432, (0.2168, 0.1106, 0.0490, 0.1106, 0.0029)),
)
_NAMED = ("1f1b", "zb-h1", "zb-h2")

_ACTIONS = 3_000_000
"""What one search for lists may spend."""

_BEFORE = ("gpipe", "1f1b", "interleaved")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, nargs="*", default=[4, 8, 16], help="K of the second table")
    parser.add_argument("--rows", type=int, default=len(_PUBLISHED), help="rows of the first table")
    options = parser.parse_args()
    print("# Schedules\n")
    print(
        f"`{shlex.join(['python', *sys.argv])}` on {cpu_name()}, Python {platform.python_version()}; process time. ",
        end="",
    )
    print("What it prints is described in `benchmarks/schedules.py`.\n")
    print("| K, M | 1F1B, ZB-H1, ZB-H2 | published | search, K M_B | published | search, 2 K M_B | published | s |")
    print("|---|---|---|---|---|---|---|---|")
    for size, durations, between, published in _PUBLISHED[: options.rows]:
        print(_published_row(size, durations, between, published), flush=True)
    names = [name for name in SCHEDULES if name not in _BEFORE]
    print("\n| K, M | best before | " + " | ".join(names) + " | search | bound | s |")
    print("|---|---|" + "---|" * (len(names) + 3))
    for devices in options.devices:
        for times in (1, 2, 4):
            print(_even_row(devices, times * devices, names), flush=True)


def _published_row(
    size: tuple[int, int], durations: Sequence[float], between: float, published: Sequence[float]
) -> str:
    (devices, micro_batches), (forward, inputs, weights, send) = size, durations
    work = micro_batches * (forward + inputs + weights)
    both = inputs + weights
    times = tuple(
        StageTimes(
            forward_us=forward,
            backward_us=both,
            last_backward_us=both,
            send_us=send if k + 1 < devices else 0.0,
            input_backward_us=inputs,
            last_input_backward_us=inputs,
            weight_backward_us=weights,
        )
        for k in range(devices)
    )
    between_steps_us = (0.0,) * devices
    named = [
        1 - work / period_us(SCHEDULES[n].actions(devices, micro_batches), times, between_steps_us) for n in _NAMED
    ]
    cells, started = [], time.process_time()
    for limit in (1, 2):
        problem = OrderProblem(
            stages_by_device=tuple((k,) for k in range(devices)),
            micro_batches=micro_batches,
            times=times,
            footprints=(ApproximateStageMemory(always=0.0, held=1.0, between=between, above=0.0),) * devices,
            is_whole=(False,) * devices,
            limits_bytes=(limit * devices + 1e-9,) * devices,
            between_steps_us=between_steps_us,
        )
        models = [SCHEDULES[n].actions(devices, micro_batches) for n in _NAMED[1:]]
        found = OrderSearch(problem, lambda _: True, models).search(_ACTIONS)
        bound = 1 - work / estimated_least_period_us(problem)
        cells += [f"{1 - work / found.period_us:.4f} (≥ {bound:.4f})" if found else "-", f"{published[2 + limit]:.4f}"]
    seconds = time.process_time() - started
    three, theirs = (", ".join(f"{x:.4f}" for x in row) for row in (named, published[:3]))
    return f"| {devices}, {micro_batches} | {three} | {theirs} | {' | '.join(cells)} | {seconds:.0f} |"


def _even_row(devices: int, micro_batches: int, names: Sequence[str]) -> str:
    profile = _even_chain(8 * devices)
    free = replace(
        inputs_of(devices, micro_batches), memory_bytes=(UNLIMITED,) * devices, schedule="1f1b", chunks=0, replicas=1
    )
    needed = max(solve(profile, Request(inputs=free, micro_batches=micro_batches)).peak_bytes_by_device())
    asked = replace(free, memory_bytes=(needed,) * devices)
    least_us = 3 * 1000.0 * 8 * micro_batches
    before = min(filter(None, (_solved(profile, asked, micro_batches, name) for name in _BEFORE)), key=_step_us)
    cells = [f"{before.schedule} {_step_us(before) / least_us:.3f}"]
    cells += list(_cells(profile, asked, micro_batches, names, least_us))
    started = time.process_time()
    best = _solved(profile, asked, micro_batches, "search")
    seconds = time.process_time() - started
    found = "-" if best is None else f"{_step_us(best) / least_us:.3f}"
    bound = "-" if best is None else f"{best.solver.lower_bound_us / least_us:.3f}"
    return f"| {devices}, {micro_batches} | {' | '.join(cells)} | {found} | {bound} | {seconds:.0f} |"


def _cells(profile: Profile, asked: Inputs, micro_batches: int, names: Sequence[str], least_us: float) -> Iterator[str]:
    for name in names:
        plan = _solved(profile, asked, micro_batches, name)
        yield "-" if plan is None else f"{_step_us(plan) / least_us:.3f}"


def _solved(profile: Profile, asked: Inputs, micro_batches: int, name: str) -> Plan | None:
    try:
        return solve(profile, Request(inputs=replace(asked, schedule=name), micro_batches=micro_batches))
    except PlannerError:
        return None


def _step_us(plan: Plan) -> float:
    return plan.predicted.step_us


def _even_chain(num_layers: int) -> Profile:
    layers = tuple(
        LayerProfile(
            name=f"l{n}",
            parameter_bytes=1_000_000,
            forward_us=(1000.0,),
            backward_us=(2000.0,),
            backward_input_us=(1000.0,),
            backward_weight_us=(1000.0,),
            output_bytes=(1_000_000,),
            saved_bytes=(20_000_000,),
            weight_held_bytes=(20_000_000,),
        )
        for n in range(num_layers)
    )
    return Profile(device=Device(kind="cpu"), micro_batch_sizes=(1,), layers=layers)


if __name__ == "__main__":
    main()
