"""Deferred batch normalization updates running statistics once per mini-batch, as the unpartitioned model does."""

import copy

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.device.meter import CpuMemoryMeter
from planner.model.batch_norm import BatchStatistics, defer_batch_norms
from planner.model.chain import chain_of
from planner.model.state import batch_norm_statistics_bytes


def train_whole(module: nn.Module, steps: list[Tensor]) -> dict[str, Tensor]:
    """Return the state after training on whole mini-batches."""
    for value in steps:
        module(value)
    return module.state_dict()


def train_deferred(module: nn.Module, steps: list[Tensor], pieces: list[int]) -> dict[str, Tensor]:
    """Return the state after training on micro-batches, each run a second time without collecting."""
    statistics = BatchStatistics(module.named_modules())
    for value in steps:
        made = []
        for piece in value.requires_grad_().split(pieces):
            with statistics.collecting():
                made.append(module(piece))
            assert torch.equal(made[-1], module(piece))
        torch.cat(made).square().sum().backward()
        statistics.update_running_statistics()
    return module.state_dict()


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.BatchNorm1d(4), (4,)),
        (lambda: nn.BatchNorm1d(4, momentum=None), (4, 5)),
        (lambda: nn.BatchNorm2d(4, momentum=0.7), (4, 3, 5)),
        (lambda: nn.BatchNorm3d(4, affine=False), (4, 2, 3, 2)),
        (lambda: nn.BatchNorm2d(4).eval(), (4, 3, 5)),
        (lambda: nn.BatchNorm2d(4, track_running_stats=False), (4, 3, 5)),
    ],
)
@pytest.mark.parametrize("pieces", [[8], [2, 2, 2, 2], [3, 3, 2]])
def test_running_statistics_are_those_of_the_mini_batch(build, shape, pieces):
    """Inputs drift and have a large mean. A second forward without collecting changes nothing."""
    steps = [torch.randn(8, *shape) * (step + 1) + 30 * step for step in range(3)]
    ours, theirs = build(), build()
    got, expected = train_deferred(ours, steps, pieces), train_whole(theirs, steps)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-6)
    assert getattr(ours, "momentum", None) == getattr(theirs, "momentum", None)


def test_a_layer_that_is_called_twice_is_updated_twice() -> None:
    """Updates keep the order of calls. A layer that is skipped in some steps is updated only when it runs."""
    norm = nn.BatchNorm1d(4)
    late = nn.BatchNorm1d(2)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.late = norm, late
            self.step = 0

        def forward(self, value: Tensor) -> Tensor:
            value = self.norm(self.norm(value * 3 + 1))
            return self.late(value[:, :2]) if self.step else value

    model = Twice()
    statistics = BatchStatistics(model.named_modules())
    theirs = copy.deepcopy(norm), copy.deepcopy(late)
    for module in theirs:
        vars(module).pop("forward")
    for step in (0, 1, 0):
        model.step = step
        value = torch.randn(6, 4)
        with statistics.collecting():
            model(value)
        statistics.update_running_statistics()
        second = theirs[0](theirs[0](value * 3 + 1))
        if step:
            theirs[1](second[:, :2])
    for ours, their in zip((norm, late), theirs, strict=True):
        for name, buffer in their.named_buffers():
            torch.testing.assert_close(dict(ours.named_buffers())[name], buffer)


def test_an_error_in_forward_restores_momentum_and_statistics() -> None:
    norm = nn.BatchNorm1d(4)
    statistics = BatchStatistics([("norm", norm)])
    with statistics.collecting(), pytest.raises(ValueError, match="expected 2D or 3D"):
        norm(torch.randn(2, 4, 3, 3))
    assert norm.momentum == 0.1
    assert torch.equal(norm.state_dict()["running_var"], torch.ones(4))


def test_sync_batch_norm_is_refused_unless_frozen() -> None:
    """It would wait for the other stages."""
    with pytest.raises(ModelError, match='"1" is a SyncBatchNorm') as refused:
        BatchStatistics(nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4)).named_modules())
    assert "plain BatchNorm" in refused.value.hint
    BatchStatistics(nn.Sequential(nn.SyncBatchNorm(4)).eval().named_modules())


def test_deferral_restores_forward_methods() -> None:
    """A forward that the user replaced is kept, and no statistics are updated."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    replaced = vars(model[1])["forward"] = lambda value: value + 1
    with defer_batch_norms(model) as statistics, statistics.collecting():
        model(torch.randn(3, 4))
    assert "forward" not in vars(model[0])
    assert vars(model[1])["forward"] is replaced
    assert torch.equal(model[0].running_mean, torch.zeros(4))


def test_held_statistics_are_a_few_doubles_per_channel() -> None:
    norm = nn.BatchNorm2d(64)
    statistics = BatchStatistics([("", norm)])
    with statistics.collecting():
        norm(torch.randn(2, 64, 8, 8))
    held = [t for c in statistics._calls.values() for t in (c.mean, c.variance, c.sum, c.squares)]
    assert sum(t.nbytes for t in held) == 24 * 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_statistics_bytes_equal_measured_bytes(dtype: torch.dtype) -> None:
    """Layers with frozen or no statistics hold nothing."""
    frozen, plain = nn.BatchNorm1d(64).eval(), nn.BatchNorm1d(64, track_running_stats=False)
    model = nn.Sequential(nn.BatchNorm1d(64), frozen, plain, nn.BatchNorm1d(64)).to(dtype)
    statistics = BatchStatistics(model.named_modules())
    value = torch.randn(8, 64, dtype=dtype)

    def work() -> None:
        with statistics.collecting(), torch.no_grad():
            model(value)

    expected = 2 * 64 * (2 * dtype.itemsize + 16)
    assert batch_norm_statistics_bytes(model) == expected
    assert 0 <= CpuMemoryMeter().measure(work).end_bytes - expected < 64
    assert CpuMemoryMeter().measure(work).end_bytes == 0


def test_adding_statistics_needs_memory_of_one_layer() -> None:
    """All activations exist at the end of a forward, so extra memory there raises the peak."""
    model = nn.Sequential(*(nn.BatchNorm1d(64) for _ in range(50)))
    statistics = BatchStatistics(model.named_modules())

    def run() -> None:
        with statistics.collecting(), torch.no_grad():
            for norm in model:
                norm(torch.ones(1, 64, 2))
            statistics.is_collecting = False
            peaks.append(CpuMemoryMeter().measure(statistics._add).peak_bytes)

    peaks: list[int] = []
    run()
    assert peaks[0] <= 2 * 8 * 64


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(8), nn.BatchNorm1d(4)

    def forward(self, value: Tensor) -> Tensor:
        return self.second(self.first(value)[:, :4])


def test_statistics_bytes_of_a_layer_count_only_its_own_norms() -> None:
    chain = chain_of(Branching(), lambda size: torch.randn(size, 8))
    per_channel = 2 * 4 + 16
    assert [batch_norm_statistics_bytes(layer.module) for layer in chain.layers] == [per_channel * 8, per_channel * 4]
