"""Training cases for the gradient worker."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.schedule import SCHEDULES, ListedSchedule, format_orders
from planner.core.values.balance import Balance, StageBalance
from planner.core.values.cluster import Cluster
from planner.core.values.plan import Recompute, ScheduleName
from planner.core.values.precision import Precision
from planner.core.values.profile import Model, Setting
from planner.executor.build.building import build_structure
from planner.files import write
from planner.model.load import load_model
from tests.support.ranks import run_ranks
from tests.support.split_backwards import split_backwards

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pipelined run to compare with the unpipelined model."""

    model: Path
    balance: tuple[int, ...]
    recompute: Recompute = "never"
    micro_batches: int = 4
    batch: int = 8
    schedule: ScheduleName = "gpipe"
    later: int | None = None
    """Backwards are split, and weight gradients run so many actions later."""
    chunks: int = 1
    replicas: int = 1
    recomputes: tuple[Recompute, ...] = ()
    """Of each stage, where they differ."""
    """Of each stage, where the order is not the usual one."""
    settings: tuple[tuple[str, Setting], ...] = ()
    dtype: Precision = ""
    steps: int = 1
    seed: int = 5
    sizes: tuple[int, ...] = ()
    """Of the mini-batches, in turn; by default all of `batch`."""
    pieces: int = 1
    """Mini-batches that are given together, as one."""
    calls: int = 1
    """Calls of `step` before the optimizer's."""
    clip: float = 0.0
    decay: float = 1.0
    """Of the learning rate, per step."""
    evaluate: int = 0
    """Samples to evaluate after each step."""

    @property
    def num_processes(self) -> int:
        """K R."""
        return len(self.balance) // self.chunks * self.replicas


def write_balance(case: Case, path: Path) -> None:
    """Write the balance configuration of `case`."""
    loaded = load_model(str(case.model), settings={name: str(value) for name, value in case.settings})
    names = build_structure(replace(loaded, precision=case.dtype)).names
    schedule = SCHEDULES[case.schedule]
    if case.later is not None:
        num_devices = len(case.balance) // case.chunks
        whole = schedule.actions(num_devices, case.micro_batches, case.chunks)
        schedule = ListedSchedule(split_backwards(whole, case.later))
    stages = enumerate(pairwise(accumulate(case.balance, initial=0)))
    balance = Balance(
        plan_digest="sha256:test",
        model=Model(source=f"{case.model}:build_model", settings=dict(case.settings)),
        dtype=case.dtype,
        schedule=schedule.name,
        order=format_orders(schedule.rows) if isinstance(schedule, ListedSchedule) else (),
        chunks=case.chunks,
        placement=schedule.placement,
        replicas=case.replicas,
        batch=case.batch,
        micro_batches=case.micro_batches,
        balance=case.balance,
        stages=tuple(
            StageBalance(
                index=k,
                recompute=(choice := case.recomputes[k] if case.recomputes else case.recompute),
                layers=names[first:end],
                recomputed=names[first:end] if choice == "layers" else (),
            )
            for k, (first, end) in stages
        ),
    )
    write(str(path), balance)


def predicted_peaks(case: Case, costs: ChainCosts) -> list[int]:
    """Return the predicted peaks of all devices of one pipeline; `costs` are of its micro-batch size."""
    partition = Partition(
        schedule=case.schedule,
        micro_batches=case.micro_batches,
        balance=case.balance,
        recompute=case.recomputes or (case.recompute,) * len(case.balance),
        recomputed=tuple(
            tuple(range(first, end)) if case.recompute == "layers" else ()
            for first, end in pairwise(accumulate(case.balance, initial=0))
        ),
        chunks=case.chunks,
        replicas=case.replicas,
    )
    count = partition.num_devices
    stages = Evaluation(costs, partition, Cluster(memory_bytes=(0,) * count)).stages
    on_device = (SCHEDULES[case.schedule].stages_on(device, count, case.chunks) for device in range(count))
    return [sum(stages[index].memory.total for index in indices) for indices in on_device]


def run_cases(
    cases: Sequence[Case], folder: Path, compared: Sequence[str] = ("whole", "split")
) -> list[dict[str, Any]]:
    """Return the worker's results for `cases`, which all need as many processes.

    The worker compares each with the unpipelined model: on whole mini-batches, and on the same micro-batches.
    """
    described = []
    for n, case in enumerate(cases):
        path = folder / f"balance_{n}.yaml"
        write_balance(case, path)
        asked = ("seed", "steps", "sizes", "pieces", "calls", "clip", "decay", "evaluate")
        described.append({"balance": str(path), "compared": compared, **{name: getattr(case, name) for name in asked}})
    (folder / "cases.json").write_text(json.dumps(described))
    worker = str(ROOT / "tests/support/gradient_worker.py")
    run_ranks(cases[0].num_processes, [worker, "cases.json", "results.json"], folder)
    return json.loads((folder / "results.json").read_text())
