"""Sparse gradients in a profile: what they take, what an optimizer's step over them takes, and what is refused."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn

from planner import api
from planner.core.cost.costs import costs_at
from planner.core.cost.memory import stage_memory
from planner.core.cost.sparse import accumulated, sparse_layer
from planner.core.errors import ModelError, UsageError
from planner.core.values.profile import Profile
from planner.device.meter import CpuMeter
from tests.support.measure import loaded_model, profile_of_model
from tests.support.moments import moments_with

Build = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

ROWS, WIDTH, WORDS, SIZE = 3000, 64, 16, 8
MICRO_BATCH = SIZE * WORDS * (4 * WIDTH + 8)
"""Bytes of the gradient of one micro-batch: a row and an index for each word."""


def table(rows: int = ROWS) -> nn.Embedding:
    return nn.Embedding(rows, WIDTH, sparse=True)


def words(batch: int) -> Tensor:
    return torch.randint(ROWS, (batch, WORDS))


def profile_of(model: nn.Module, build: Build, size: int = SIZE) -> Profile:
    return profile_of_model(loaded_model(model, words, build_optimizer=build), sizes=(size,))


def peak_of_step(optimizer: torch.optim.Optimizer) -> int:
    def step() -> None:
        optimizer.step()

    return CpuMeter().measure(step).peak_bytes


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's own Adagrad
@pytest.mark.parametrize(
    ("build", "copies"),
    [
        pytest.param(sgd, 0, id="sgd"),
        pytest.param(torch.optim.SparseAdam, 2, id="sparse adam"),
        pytest.param(lambda p: torch.optim.Adagrad(p, lr=0.1), 1, id="adagrad"),
    ],
)
def test_the_optimizers_step_over_what_has_accumulated(build: Build, copies: int) -> None:
    """Against the allocator: state of the whole table, and transients of M micro-batches' gradients."""
    (layer,) = profile_of(nn.Sequential(table()), build).layers
    (detail,) = layer.detail
    assert (detail.sparse_parameter_bytes, detail.sparse_gradient_bytes) == (4 * ROWS * WIDTH, MICRO_BATCH)
    assert copies * 4 * ROWS * WIDTH <= layer.optimizer_bytes <= copies * 4 * ROWS * WIDTH + 64
    for m in (2, 4):
        own = table()
        optimizer = build(own.parameters())
        rows = torch.randperm(ROWS).repeat(1 + m * SIZE * WORDS // ROWS)
        for _ in range(2):
            for part in rows[: m * SIZE * WORDS].view(m, SIZE, WORDS):
                own(part).sum().backward()
            measured = peak_of_step(optimizer)
            optimizer.zero_grad()
        predicted = m * MICRO_BATCH * layer.optimizer_sparse_peak
        assert measured <= predicted + 1024
        assert predicted <= 1.05 * measured + 1024


def test_what_has_accumulated_counts_once() -> None:
    """With M micro-batches, n each, 2 M n at the end of the last backward; accumulating again changes nothing."""
    costs = costs_at(profile_of(nn.Sequential(table(), nn.Linear(WIDTH, WIDTH)), sgd), SIZE)
    assert accumulated(accumulated(costs, 4), 4) is not costs
    peaks = [
        stage_memory(c, 0, 2, moments_with(m, 1), recompute="never").total
        for m in (8, 12)
        for c in (costs, accumulated(costs, m))
    ]
    assert peaks[0] == peaks[1]
    assert peaks[2] - peaks[0] == 4 * 2 * MICRO_BATCH + 4 * SIZE * WORDS * 8


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (torch.optim.AdamW, "is sparse, and the optimizer fails on it: Adam"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "what the optimizer keeps of it grows from step to step"),
    ],
)
def test_optimizers_that_cannot_take_them_are_refused(build: Build, message: str) -> None:
    """Whether they fail at once, or take more with every step."""
    with pytest.raises(ModelError, match=message) as refused:
        profile_of(nn.Sequential(table()), build)
    assert "sparse=False" in refused.value.hint


def test_parameters_that_layers_share_are_refused() -> None:
    """The head's gradient is dense, the table's is not."""
    head = nn.Linear(WIDTH, ROWS, bias=False)
    model = nn.Sequential(table(), nn.Linear(WIDTH, WIDTH), head)
    head.weight = model[0].weight
    with pytest.raises(ModelError, match=r'the gradient of "0\.weight", which several layers share, is sparse'):
        profile_of(model, sgd)


class Tables(nn.Module):
    """Equal blocks of one table each, whose parameters have a name of their own in each block."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(table() for _ in range(6))
        if tied:
            self.blocks[4].weight = self.blocks[3].weight

    def forward(self, numbers: Tensor) -> Tensor:
        """Shape (b, words)."""
        total = torch.zeros(1)
        for block in self.blocks:
            total = total + block(numbers).sum(dim=(1, 2))
        return total


def test_equal_layers_have_sparse_gradients_too() -> None:
    """SparseAdam would fail on a dense gradient of any of them."""
    profile = profile_of(Tables(), torch.optim.SparseAdam)
    assert len({layer.digest for layer in profile.layers[2:5]}) == 1
    assert all(layer.optimizer_boundary_peak_bytes == 0 for layer in profile.layers)


def test_equal_layers_that_share_a_table_are_refused() -> None:
    """As any others, though their parameters have other names than those of the layer that was measured."""
    with pytest.raises(ModelError, match=r'the gradient of "blocks\.[34]\.weight", which several layers share, is'):
        profile_of(Tables(tied=True), torch.optim.SparseAdam)


def test_dense_gradients_leave_no_trace() -> None:
    """Costs of a model without any are what they were, without a copy."""
    costs = costs_at(profile_of(nn.Sequential(nn.Embedding(ROWS, WIDTH)), sgd), SIZE)
    assert accumulated(costs, 4) is costs


def test_replicas_which_would_sum_them_are_refused() -> None:
    """With what to do instead; where the solver may choose there are none, and without sparse gradients there are."""
    sparse, dense = (profile_of(nn.Sequential(nn.Embedding(ROWS, 8, sparse=s)), sgd) for s in (True, False))
    assert (sparse_layer(sparse), sparse_layer(dense)) == ("0", None)
    ask = {"devices": 2, "mem": "1GB", "batch": 2 * SIZE, "extrapolate": True}
    with pytest.raises(UsageError, match='layer "0" are sparse, and 2 replicas would have to sum') as refused:
        api.solve(sparse, replicas=2, **ask)  # type: ignore[arg-type]
    assert "leave `--replicas` out" in refused.value.hint
    assert api.solve(sparse, replicas="auto", **ask).replicas == 1  # type: ignore[arg-type]
    assert api.solve(dense, replicas="auto", **ask).replicas == 2  # type: ignore[arg-type]
