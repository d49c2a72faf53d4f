"""Tests that torch's pipeline runtime computes equal gradients with the same action order."""

import json
from pathlib import Path
from typing import Any

import pytest

from planner.core.schedule import SPLITTING, schedule_of
from planner.core.values.balance import Balance, StageBalance
from planner.core.values.plan import ScheduleName
from planner.core.values.profile import Model
from planner.files import write
from tests.support.ranks import ROOT, run_ranks

pytest.importorskip("torch.distributed.pipelining.schedules", reason="this torch has no pipelining")
pytestmark = pytest.mark.slow

DEVICES = 2
MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value):
        return torch.tanh(self.linear(value))

def build_model():
    return nn.Sequential(*(Block() for _ in range(6)))

def example_batch(batch_size):
    generator = torch.Generator().manual_seed(batch_size)
    return torch.randn(batch_size, 8, generator=generator), torch.randn(batch_size, 8, generator=generator)

def loss_fn(output, target):
    return ((output - target) ** 2).mean()
"""


PUT_OFF = ("0F0 0F1 0F2 0I0 0I1 0W1 0B2 0W0", "1F0 1I0 1F1 1F2 1B1 1I2 1W2 1W0")
"""Gradients of weights in another order than that of their inputs, and whole backwards in between."""


def balance_of(
    schedule: ScheduleName, cuts: tuple[int, ...], micro_batches: int, order: tuple[str, ...] = ()
) -> Balance:
    layers = iter(range(6))
    return Balance(
        plan_digest="sha256:test",
        model=Model(source="model.py:build_model"),
        schedule=schedule,
        batch=2 * micro_batches,
        micro_batches=micro_batches,
        balance=cuts,
        chunks=len(cuts) // DEVICES,
        placement=schedule_of(schedule, order).placement,
        order=order,
        stages=tuple(
            StageBalance(index=k, recompute="never", layers=tuple(str(next(layers)) for _ in range(count)))
            for k, count in enumerate(cuts)
        ),
    )


def test_the_runtime_of_torch_gives_equal_gradients(tmp_path: Path) -> None:
    """Bit for bit under every schedule. torch divides by M at the end, the executor divides the loss."""
    (tmp_path / "model.py").write_text(MODEL)
    cases: dict[str, tuple[Any, ...]] = {
        "gpipe.yaml": ("gpipe", (2, 4), 4),
        "1f1b.yaml": ("1f1b", (4, 2), 4),
        "chunks.yaml": ("interleaved", (1, 2, 2, 1), 4),
        "rounds.yaml": ("interleaved", (1, 1, 1, 1, 1, 1), 8),
        **{f"{x.name}.yaml": (x.name, (1, 2, 2, 1) if x.is_chunked else (2, 4), 4) for x in SPLITTING},
        "listed.yaml": ("search", (3, 3), 3, PUT_OFF),
    }
    for name, case in cases.items():
        write(str(tmp_path / name), balance_of(*case))
    worker = str(ROOT / "tests" / "support" / "torch_runtime_worker.py")
    run_ranks(DEVICES, [worker, *cases], tmp_path)
    for rank in range(DEVICES):
        differences = json.loads((tmp_path / f"differences{rank}.json").read_text())
        assert set(differences) == set(cases)
        for name, (largest, count, scale) in differences.items():
            schedule, cuts, micro_batches, *_ = cases[name]
            stages = schedule_of(schedule).stages_on(rank, DEVICES, len(cuts) // DEVICES)
            assert count == 2 * sum(cuts[stage] for stage in stages)
            # Where M is a power of two, dividing at the loss or at the end rounds nothing.
            assert scale > 0, name
            assert largest <= (0 if micro_batches in {4, 8} else 1e-7 * scale), name
