"""Tests of recomputed layers that change their own state: equal to a run without recomputation, or an error."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

from planner.core.cost.costs import costs_at
from planner.core.errors import ModelError
from planner.core.values.plan import Recompute, ScheduleName
from planner.device.meter import CpuMemoryMeter
from planner.executor.build.building import StageRange, build_stages, build_structure
from planner.executor.run.replay import LayerState
from planner.executor.run.shapes import chain_shapes
from planner.executor.run.stage_module import StageModule
from planner.model.chain import chain_of
from planner.model.load import LoadedModel, load_model
from tests.support.cli import write_model
from tests.support.measure import profile_of_model
from tests.support.peaks import measured_peaks
from tests.support.training import ROOT, Case, predicted_peaks, run_cases
from tests.unit.executor.test_one_forward_one_backward import HIGHEST, LOWEST

CODEBOOKS = """
import torch
from torch import nn

class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(2048, 512))

    def forward(self, value):
        nearest = self.codes[torch.cdist(value.detach(), self.codes).argmin(1)]
        self.codes.data[:16].lerp_(value.detach(), 0.1)
        return value + nearest

def build_model():
    return nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(512, 512), Codebook(), nn.Tanh())))

def example_batch(batch_size):
    return torch.randn(batch_size, 512), torch.randn(batch_size, 512)

def loss_fn(output, target):
    return ((output - target) ** 2).mean()

def build_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)
"""

STATEFUL = ROOT / "tests/zoo/models/stateful.py"
MICRO_BATCHES = 4


def stages_of(loaded: LoadedModel, balance: tuple[int, ...], recompute: Recompute) -> list[StageModule]:
    """Return all stages in this process."""
    chain = build_structure(loaded)
    shapes = chain_shapes(chain, loaded.example_batch(2).inputs)
    cuts = list(accumulate(balance, initial=0))
    apart = recompute == "layers"
    ranges = [StageRange(first, end, apart) for first, end in pairwise(cuts)]
    built = build_stages(loaded, chain, ranges, seed=3, device=torch.device("cpu"))
    return [
        StageModule(
            layers,
            received=shapes.boundaries[span.first],
            recompute=recompute,
            micro_batches=MICRO_BATCHES,
            loss_fn=loaded.loss_fn if span.end == cuts[-1] else None,
            copies_input=False,
            carries=() if span.end == cuts[-1] else [True],
            recomputed={n: shapes.recomputed_layer(span.first + n, span.end) for n in range(len(layers))}
            if apart
            else {},
            first_layer=span.first,
        )
        for span, layers in zip(ranges, built, strict=True)
    ]


def train_unpartitioned(loaded: LoadedModel, batch: Any) -> nn.Module:
    """Return the model with gradients accumulated over the micro-batches."""
    torch.manual_seed(3)
    model = loaded.build()
    for inputs, targets in zip(*(t.chunk(MICRO_BATCHES) for t in batch), strict=True):
        (loaded.loss_fn(model(inputs), targets) / MICRO_BATCHES).backward()
    return model


def run_actions(stages: list[StageModule], batch: Any, order: list[tuple[str, int]]) -> None:
    """Run forwards and backwards of micro-batches through all stages, in this order."""
    inputs, targets = (t.chunk(MICRO_BATCHES) for t in batch)
    stages[-1].targets = list(targets)
    losses = {}
    for what, m in order:
        if what == "B":
            (losses.pop(m) / MICRO_BATCHES).backward()
            continue
        value: Any = (inputs[m],)
        for stage in stages:
            stage.micro_batch = m
            value = stage(*value)
        losses[m] = value


GPIPE = [*(("F", m) for m in range(MICRO_BATCHES)), *(("B", m) for m in range(MICRO_BATCHES))]
ONE_FORWARD_ONE_BACKWARD = [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("F", 3), ("B", 2), ("B", 3)]


@pytest.mark.slow
@pytest.mark.parametrize("sequential", ["True", "False"])
@pytest.mark.parametrize("recompute", get_args(Recompute))
@pytest.mark.parametrize("order", [GPIPE, ONE_FORWARD_ONE_BACKWARD], ids=["gpipe", "1f1b"])
@pytest.mark.parametrize(
    "balance", [(2, 2, 2), *(pytest.param(b, marks=pytest.mark.nightly) for b in ((6,), (3, 3)))], ids=str
)
def test_buffers_and_gradients_of_stateful_models_equal_the_unpartitioned_model(sequential, recompute, order, balance):
    """Bit for bit: codebooks, running means, queues, slow copies, counts and spectral norms."""
    loaded = load_model(str(STATEFUL), settings={"sequential": sequential})
    torch.manual_seed(1)
    batch = tuple(loaded.example_batch(MICRO_BATCHES * 2))
    model = train_unpartitioned(loaded, batch)
    stages = stages_of(loaded, balance, recompute)
    run_actions(stages, batch, order)
    parameters = {name: p for stage in stages for name, p in stage.named_parameters()}
    buffers = {name: b for stage in stages for name, b in stage.named_buffers()}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameters[name], parameter), name
        if parameter.grad is not None:
            assert torch.equal(parameters[name].grad, parameter.grad), name
    assert set(buffers) == {name for name, _ in model.named_buffers()}
    for name, buffer in model.named_buffers():
        assert torch.equal(buffers[name], buffer), name


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [*(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2)), 3])
def test_stateful_models_train_equally_under_every_schedule(num_devices: int, tmp_path: Path) -> None:
    balance = {1: (6,), 2: (3, 3), 3: (2, 2, 2)}[num_devices]
    plans: list[tuple[ScheduleName, Recompute, tuple[int, ...]]] = [
        *([("gpipe", "always", balance)] if num_devices < 3 else ()),
        ("gpipe", "layers", balance),
        *([("1f1b", "except-last", balance)] if num_devices > 1 else ()),
        *([("interleaved", "always", (2, 1, 1, 2))] if num_devices == 2 else ()),
        *([("interleaved", "except-last", (1,) * 6)] if num_devices == 3 else ()),
    ]
    cases = [
        Case(
            model=STATEFUL,
            balance=stages,
            chunks=len(stages) // num_devices,
            schedule=schedule,
            recompute=recompute,
            micro_batches=6,
            batch=12,
            steps=2,
            settings=(("sequential", n % 2 > 0),),
        )
        for n, (schedule, recompute, stages) in enumerate(plans)
    ]
    for case, result in zip(cases, run_cases(cases, tmp_path, ("split",)), strict=True):
        assert result["split_loss"] < 1e-6, case
        assert result["split_gradient"] < 1e-6, case
        assert result["split_parameter"] < 1e-6, case
        assert result["split_buffer"] < 1e-6, case


@pytest.mark.slow
def test_peaks_with_rewritten_codebooks_are_as_predicted(tmp_path: Path) -> None:
    """Within -1 % / +5 %: every micro-batch in flight keeps a codebook of 4 MB."""
    model = write_model(tmp_path, CODEBOOKS)
    profile = profile_of_model(load_model(str(model)), sizes=(16,))
    assert [layer.rewritten_bytes for layer in profile.layers] == [0, 4 << 20, 0, 0, 4 << 20, 0]
    plans: list[tuple[ScheduleName, Recompute, tuple[int, ...]]] = [
        *(("gpipe", recompute, (3, 3)) for recompute in ("never", "layers")),
        ("1f1b", "always", (3, 3)),
        ("interleaved", "except-last", (1, 2, 1, 2)),
    ]
    cases = [
        Case(
            model=model,
            balance=balance,
            chunks=len(balance) // 2,
            schedule=schedule,
            recompute=recompute,
            micro_batches=8,
            batch=128,
        )
        for schedule, recompute, balance in plans
    ]
    costs, errors = costs_at(profile, 16), {}
    for case, peaks in zip(cases, measured_peaks(cases, tmp_path), strict=True):
        for k, predicted in enumerate(predicted_peaks(case, costs)):
            errors[case.schedule, case.recompute, k] = round(predicted / peaks[k] - 1, 4)
    assert len(errors) == 2 * len(cases)
    assert {key: error for key, error in errors.items() if not LOWEST <= error <= HIGHEST} == {}, errors


# ---- what cannot be done over


def stage_of(model: nn.Sequential, recompute: Recompute) -> StageModule:
    """Return a Sequential as one stage with a loss."""
    layers = chain_of(model).layers
    shapes = chain_shapes(chain_of(deepcopy(model).to("meta")), torch.randn(2, 4))
    stage = StageModule(
        layers,
        received=shapes.boundaries[0],
        recompute=recompute,
        micro_batches=1,
        loss_fn=lambda output, _: output.sum(),
        copies_input=False,
        recomputed={n: shapes.recomputed_layer(n, len(layers)) for n in range(len(layers) * (recompute == "layers"))},
    )
    stage.targets = [None]
    return stage


class WritesInBackward(nn.Module):
    """Writes its buffer only if gradients are enabled: in backward, not in a forward to be recomputed."""

    def __init__(self, write: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(3))
        self.write = write

    def forward(self, value: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.write(self)
        return self.linear(value)


def writes(module: nn.Module) -> None:
    """Write in place, without a new version."""
    module.get_buffer("seen").data.add_(1)


def assigns(module: nn.Module) -> None:
    """Assign another tensor."""
    module._buffers["seen"] = torch.ones(3)


@pytest.mark.parametrize("write", [writes, assigns])
@pytest.mark.parametrize("per_layer", [False, True], ids=["always", "layers"])
def test_state_changed_only_by_the_recomputation_is_an_error(write, *, per_layer):
    """Layer and buffer are named, and the state is restored."""
    model = nn.Sequential(nn.Linear(4, 4), WritesInBackward(write))
    stage = stage_of(model, "layers" if per_layer else "always")
    loss = stage(torch.randn(2, 4))
    with pytest.raises(ModelError, match='the layer "1" changed its "seen" when it was recomputed') as raised:
        loss.backward()
    assert "--recompute never" in raised.value.hint
    assert write is writes or torch.equal(model[1].get_buffer("seen"), torch.zeros(3))


# ---- what it takes


MASK, MEAN, TIMES = 4 << 20, 4096, 8


@pytest.mark.parametrize(
    ("calls", "copies", "most"),
    [(TIMES, TIMES, TIMES), (2 * TIMES, 0, TIMES)],
    ids=["forwards", "forwards and backwards"],
)
def test_written_buffers_are_held_once_per_micro_batch(calls: int, copies: int, most: int) -> None:
    """A mask that is only read is held once. A recomputation overwrites the held state."""

    def work() -> None:
        layer = nn.Module()
        layer.register_buffer("mask", torch.zeros(MASK // 4))
        layer.register_buffer("mean", torch.ones(MEAN // 4))
        mean, mask = layer.get_buffer("mean"), layer.get_buffer("mask")
        state = LayerState([("layer", layer)])
        runs = [state.with_same_state(lambda: layer.get_buffer("mean").add_(mask[1] + 1)) for _ in range(TIMES)]
        for n in range(calls):
            runs[n % TIMES]()
        alive.extend((mean, mask, runs))

    alive: list[object] = []
    used = CpuMemoryMeter().measure(work)
    assert used.end_bytes == MASK + MEAN + copies * MEAN
    assert used.peak_bytes < MASK + MEAN + most * MEAN + MEAN // 2  # a few numbers besides


@pytest.mark.parametrize("step", [1, -1], ids=["in order", "from the last"])
def test_forwards_that_begin_with_the_same_state_share_its_copy(step: int) -> None:
    """The second of them changes the state; neither the first nor the third may see a wrong one."""
    layer = nn.Module()
    layer.register_buffer("codes", torch.zeros(2))
    layer.register_buffer("front", layer.get_buffer("codes")[:1])
    layer.calls = 0

    def run(*, is_changing: bool) -> list[Any]:
        if is_changing:
            layer.get_buffer("codes").add_(1)
            layer.calls += 1
        return [*layer.get_buffer("codes").tolist(), *layer.get_buffer("front").tolist(), layer.calls]

    state = LayerState([("layer", layer)])
    runs = [state.with_same_state(partial(run, is_changing=n % 2 == 1)) for n in range(6)]
    first = [run() for run in runs]
    assert first == [[n] * 4 for n in (0, 1, 1, 2, 2, 3)]
    assert [run() for run in runs[::step]] == first[::step]
    assert run(is_changing=False) == [3, 3, 3, 3]


def test_unchanged_buffers_are_cloned_once_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolutional network has hundreds of buffers. After a step nothing is copied."""
    layer = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(TIMES)))
    buffers = dict(layer.named_buffers())
    clones: list[Tensor] = []
    clone = torch._lazy_clone
    monkeypatch.setattr(torch, "_lazy_clone", lambda tensor: clones.append(tensor) or clone(tensor))
    state = LayerState([("layer", layer)])
    for steps in (1, 2):
        runs = [state.with_same_state(lambda: None) for _ in range(4)]
        for run in (*runs, *runs):
            run()
        assert len(clones) == steps * len(buffers)
        state.release_snapshot()
        del runs, run
        addresses = [torch._C._data_address(buffer) for buffer in buffers.values()]
        for buffer in buffers.values():
            buffer.add_(1)
        assert [torch._C._data_address(buffer) for buffer in buffers.values()] == addresses


def test_buffers_that_share_memory_still_do_so_in_recomputation() -> None:
    layer = nn.Module()
    layer.register_buffer("whole", torch.zeros(4))
    layer.register_buffer("front", layer.get_buffer("whole")[:2])
    layer.register_buffer("foreign", torch.from_numpy(torch.zeros(2).numpy()))
    layer.add_module("other", nn.Module())
    layer.get_submodule("other").register_buffer("same", layer.get_buffer("whole"))

    def run() -> list[float]:
        layer.get_buffer("front").add_(1)
        layer.get_buffer("foreign").add_(1)
        return [*layer.get_buffer("other.same").tolist(), *layer.get_buffer("foreign").tolist()]

    state = LayerState([("layer", layer)])
    first, second = state.with_same_state(run), state.with_same_state(run)
    assert (first(), second()) == ([1, 1, 0, 0, 1, 1], [2, 2, 0, 0, 2, 2])
    assert (first(), second()) == ([1, 1, 0, 0, 1, 1], [2, 2, 0, 0, 2, 2])
    assert layer.get_buffer("whole").tolist() == [2, 2, 0, 0]


@pytest.mark.parametrize("times", [1, 2], ids=["forwards", "forwards and backwards"])
def test_buffers_read_by_address_are_not_kept_as_copies(times: int) -> None:
    """Custom kernels read addresses: the buffer is copied while a forward runs, and not kept."""

    def work() -> None:
        layer = nn.Module()
        layer.register_buffer("weight", torch.ones(MEAN // 4))
        state = LayerState([("layer", layer)])
        runs = [state.with_same_state(lambda: layer.get_buffer("weight").data_ptr()) for _ in range(TIMES)]
        for run in runs * times:
            run()
        alive.extend((layer, runs))

    alive: list[object] = []
    used = CpuMemoryMeter().measure(work)
    assert used.end_bytes == MEAN
    assert used.peak_bytes < 2 * MEAN + MEAN // 2


def test_buffers_registered_in_forward_are_registered_again() -> None:
    layer = nn.Module()

    def run() -> int:
        if not hasattr(layer, "table"):
            layer.register_buffer("table", torch.zeros(2))
        layer.get_buffer("table").add_(1)
        return int(layer.get_buffer("table").sum())

    state = LayerState([("layer", layer)])
    runs = [state.with_same_state(run) for _ in range(3)]
    assert [run() for run in runs] == [run() for run in runs] == [2, 4, 6]
    assert {name: b.tolist() for name, b in layer.named_buffers()} == {"table": [3, 3]}


def test_sparse_buffers_may_be_read_but_not_written() -> None:
    layer = nn.Module()
    layer.register_buffer("graph", torch.eye(3).to_sparse())
    reads = LayerState([("layer", layer)]).with_same_state(lambda: float(torch.sparse.sum(layer.get_buffer("graph"))))
    assert reads() == reads() == 3
    writes = LayerState([("layer", layer)]).with_same_state(lambda: layer.get_buffer("graph").mul_(2))
    with pytest.raises(ModelError, match='"graph" of the layer "layer" is a Tensor that a forward writes into'):
        writes()
