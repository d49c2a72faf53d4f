"""Run under torchrun: a run with report and trace, and clocks that are known to differ.

    torchrun --nproc-per-node K timeline_worker.py balance.yaml

Writes run.json, trace.json and, on every rank, what `clock_offset_ns` found for a clock that is RANK seconds ahead:
offset_RANK.txt, with how long that took in the middle; and, where `on_step` is called, steps_RANK.txt.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from planner.executor import ScriptArguments, StepRecord, pipeline_script, progress
from planner.executor.measure.reporting import clock_offset_ns

given = ScriptArguments(steps=5, seed=0, report="run.json", device=None, trace="trace.json")


def on_step(record: StepRecord) -> None:
    with Path(f"steps_{dist.get_rank()}.txt").open("a") as file:
        file.write(f"{record.step} {record.loss} {record.samples}\n")


with pipeline_script(sys.argv[1], given, on_step=on_step) as pipeline:
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    for step, (inputs, targets) in enumerate(pipeline.batches(given.steps)):
        with pipeline.step(inputs, targets) as loss:
            optimizer.step()
            optimizer.zero_grad()
        progress(pipeline, step, loss)
    rank = dist.get_rank()
    for peer in range(1, dist.get_world_size()):
        if rank in (0, peer):
            ahead_ns = rank * 1_000_000_000
            found = clock_offset_ns(rank, peer, torch.device("cpu"), lambda: time.perf_counter_ns() + ahead_ns)  # noqa: B023
            Path(f"offset_{rank}.txt").write_text(str(found))
