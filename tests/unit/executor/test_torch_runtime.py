"""The engine that people know stays the reference: the same order in torch's own runtime makes the same gradients."""

import json
from pathlib import Path

import pytest

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


def balance_of(schedule: ScheduleName, cuts: tuple[int, ...], micro_batches: int) -> Balance:
    layers = iter(range(6))
    return Balance(
        plan_digest="sha256:test",
        model=Model(source="model.py:build_model"),
        schedule=schedule,
        batch=2 * micro_batches,
        micro_batches=micro_batches,
        balance=cuts,
        chunks=len(cuts) // DEVICES,
        stages=tuple(
            StageBalance(index=k, recompute="never", layers=tuple(str(next(layers)) for _ in range(count)))
            for k, count in enumerate(cuts)
        ),
    )


def test_torchs_runtime_makes_the_same_gradients(tmp_path: Path) -> None:
    """Every schedule, bit for bit; torch divides by M at the end, which is done here, and the executor at the loss."""
    (tmp_path / "model.py").write_text(MODEL)
    cases: dict[str, tuple[ScheduleName, tuple[int, ...], int]] = {
        "gpipe.yaml": ("gpipe", (2, 4), 4),
        "1f1b.yaml": ("1f1b", (4, 2), 4),
        "chunks.yaml": ("interleaved", (1, 2, 2, 1), 4),
        "rounds.yaml": ("interleaved", (1, 1, 1, 1, 1, 1), 8),
    }
    for name, case in cases.items():
        write(str(tmp_path / name), balance_of(*case))
    worker = str(ROOT / "tests" / "support" / "torch_runtime_worker.py")
    run_ranks(DEVICES, [worker, *cases], tmp_path)
    for rank in range(DEVICES):
        differences = json.loads((tmp_path / f"differences{rank}.json").read_text())
        assert set(differences) == set(cases)
        for name, (largest, count, scale) in differences.items():
            assert count == 2 * sum(cases[name][1][rank::DEVICES])
            # M is a power of two: dividing at the loss or at the end rounds nothing.
            assert largest == 0 < scale, name
