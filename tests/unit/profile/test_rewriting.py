"""What a profile says of the state that layers write: by every way in which that is done, measured and estimated."""

import pytest
import torch
from torch import Tensor, nn

from planner.model.load import load_model
from planner.profile import ProfilerOptions, profile_model
from tests.support.measure import loaded_model, profile_of_model
from tests.support.training import ROOT

STATEFUL = ROOT / "tests/zoo/models/stateful.py"
BYTES = 4


@pytest.mark.parametrize("sequential", ["True", "False"])
def test_all_that_a_forward_writes_is_counted(sequential: str) -> None:
    """In place, by way of `data`, put in place of others, in frozen parameters; not what is written now and then."""
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


def test_an_estimate_counts_the_same() -> None:
    """Without values."""

    def build() -> nn.Sequential:
        norms = nn.InstanceNorm1d(2, track_running_stats=True), nn.BatchNorm1d(2)
        return nn.Sequential(nn.Linear(8, 8), nn.Unflatten(1, (2, 4)), *norms)

    options = ProfilerOptions(micro_batch_sizes=(2,), device="estimate:h100")
    profile = profile_model(loaded_model(build), options)
    assert [layer.rewritten_bytes / BYTES for layer in profile.layers] == [0, 0, 2 + 2, 0]


def test_what_is_made_once_or_collected_is_not_written() -> None:
    """A table that the first forward makes, a mask that is read, and batch normalisation."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.register_buffer("mask", torch.ones(8))
            self.register_buffer("table", None)

        def forward(self, value: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.ones(8)
            result: Tensor = self.linear(value) * self.mask * self.table
            return result

    profile = profile_of_model(loaded_model(lambda: nn.Sequential(nn.Linear(8, 8), Table(), nn.BatchNorm1d(8))))
    assert [layer.rewritten_bytes for layer in profile.layers] == [0, 0, 0]
