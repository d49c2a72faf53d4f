"""Bytes of state that layers write in each forward, measured and estimated."""

import pytest
import torch
from torch import Tensor, nn

from planner.model.load import load_model
from planner.profile.profiler import profile_model
from planner.profile.task import ProfilerOptions
from tests.support.measure import loaded_model, profile_of_model
from tests.support.training import ROOT

STATEFUL = ROOT / "tests/zoo/models/stateful.py"
BYTES = 4


@pytest.mark.parametrize("sequential", ["True", "False"])
def test_state_written_by_every_forward_is_counted(sequential: str) -> None:
    """In place, through `data`, by replacement, and in frozen parameters; not state that is written rarely."""
    loaded = load_model(str(STATEFUL), settings={"sequential": sequential})
    profile = profile_of_model(loaded, sizes=(2,))
    mean, slow, plain, norms, codes, sizes = 8, 64, 1, 4, 16 * 8, 16
    vectors = 8 + 8
    assert [layer.rewritten_bytes / BYTES for layer in profile.layers] == [
        0,
        mean + slow + plain,
        vectors,
        norms,
        codes + sizes,
        0,
    ]


def test_estimates_count_written_state() -> None:
    def build() -> nn.Sequential:
        norms = nn.InstanceNorm1d(2, track_running_stats=True), nn.BatchNorm1d(2)
        return nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), *norms)

    options = ProfilerOptions(micro_batch_sizes=(2,), device="estimate:h100")
    profile = profile_model(loaded_model(build), options)
    assert [layer.rewritten_bytes / BYTES for layer in profile.layers] == [0, 0, 2 + 2, 0]


def test_state_made_once_and_deferred_statistics_are_not_counted() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("mask", torch.ones(8))
            self.register_buffer("table", None)

        def forward(self, value: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.ones(8)
            return self.linear(value) * self.mask * self.table

    profile = profile_of_model(loaded_model(lambda: nn.Sequential(nn.Linear(8, 8), Table(), nn.BatchNorm1d(8))))
    assert [layer.rewritten_bytes for layer in profile.layers] == [0, 0, 0]
