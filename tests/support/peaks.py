"""Predicted peak memory and the allocator's in real steps of the executor, in new processes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Final

from planner.core.cost.costs import costs_at
from planner.core.judge.verification import Tolerance
from planner.core.values.plan import Recompute
from planner.core.values.precision import Precision
from planner.core.values.profile import Setting
from planner.model.load import load_model
from tests.support.measure import profile_of_model
from tests.support.ranks import run_ranks
from tests.support.training import Case, predicted_peaks, write_balance

PROMISED = Tolerance(step=1.0, memory_below=0.01, memory_above=0.05)
"""Of peaks."""

_WORKER: Final = """
import gc, json, sys
import torch.distributed as dist
from planner.executor import Pipeline

dist.init_process_group("gloo")
peaks = []
for balance in sys.argv[1:]:
    gc.collect()
    pipeline = Pipeline(balance)
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    for inputs, targets in pipeline.batches(3):
        with pipeline.step(inputs, targets):
            optimizer.step()
            optimizer.zero_grad()
        del inputs, targets
    report = pipeline.report()
    peaks.append([stage.peak_bytes for stage in report.stages] if report else [])
    pipeline.close()
    del pipeline, optimizer
if dist.get_rank() == 0:
    json.dump(peaks, open("peaks.json", "w"))
dist.destroy_process_group()
"""


def measured_peaks(cases: Sequence[Case], folder: Path) -> list[list[int]]:
    """Return the peaks of all stages of all replicas by case; all cases need as many processes."""
    (folder / "worker.py").write_text(_WORKER)
    paths = [f"balance_{n}.yaml" for n in range(len(cases))]
    for case, path in zip(cases, paths, strict=True):
        write_balance(case, folder / path)
    run_ranks(cases[0].num_processes, ["worker.py", *paths], folder)
    return json.loads((folder / "peaks.json").read_text())


def even(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return nearly equal numbers of layers per stage."""
    cuts = [k * num_layers // num_stages for k in range(num_stages + 1)]
    return tuple(end - first for first, end in pairwise(cuts))


def predictions(
    model: Path,
    settings: Mapping[str, Setting],
    folder: Path,
    *,
    size: int = 8,
    stages: int = 3,
    micro_batches: Sequence[int] = (1, 4),
    recompute: Sequence[Recompute] = ("never", "always"),
    dtype: Precision = "",
    **further: object,
) -> dict[tuple[int, Recompute, int], tuple[int, int]]:
    """Return predicted and measured peaks of every stage of some plans, by M, recomputation and stage."""
    loaded = load_model(str(model), settings={name: str(value) for name, value in settings.items()})
    profile = profile_of_model(replace(loaded, precision=dtype), sizes=(size,))
    costs = costs_at(profile, size)
    cases = [
        Case(
            model=model,
            balance=even(len(costs.names), stages),
            recompute=choice,
            micro_batches=m,
            batch=m * size,
            settings=tuple(settings.items()),
            dtype=dtype,
            **further,
        )
        for m in micro_batches
        for choice in recompute
    ]
    found = {}
    for case, peaks in zip(cases, measured_peaks(cases, folder), strict=True):
        for k, predicted in enumerate(predicted_peaks(case, costs)):
            found[case.micro_batches, case.recompute, k] = predicted, peaks[k]
    return found
