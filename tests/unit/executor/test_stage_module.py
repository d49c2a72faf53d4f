"""Tests of a stage as a module: boundaries, names and recomputation."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.errors import ModelError, UsageError
from planner.core.values.cluster import Cluster
from planner.core.values.plan import Recompute
from planner.device.meter import CpuMemoryMeter
from planner.executor.run.shapes import Boundary, ChainShapes, chain_shapes
from planner.executor.run.stage_module import StageModule
from planner.model.chain import Layer, chain_of
from tests.support.measure import loaded_model, profile_of_model


def shapes(model: nn.Sequential, inputs: Any) -> ChainShapes:
    """Return the shapes of the model's chain, found on the meta device."""
    return chain_shapes(chain_of(model.to("meta")), inputs)


class Pair(nn.Module):
    """Returns a new tensor, its input, and a number."""

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor, float]:
        return value * 2, value, 0.5


class Sum(nn.Module):
    """Takes the outputs of `Pair`."""

    def forward(self, parts: tuple[Tensor, Tensor, float]) -> Tensor:
        return parts[0] + parts[1] * parts[2]


class Writes(nn.Module):
    """Adds to its input in place, through a view."""

    def forward(self, value: Tensor) -> Tensor:
        value[:, 0].add_(1)
        return value * 2


# Shapes


def test_boundary_shapes_are_found_on_the_meta_device() -> None:
    found = shapes(nn.Sequential(nn.Linear(8, 16), Pair(), Sum(), nn.Linear(16, 4)), torch.randn(3, 8))
    assert [[tuple(t.shape) for t in b.tensors] for b in found.boundaries] == [
        [(3, 8)],
        [(3, 16)],
        [(3, 16), (3, 16)],
        [(3, 16)],
        [(3, 4)],
    ]
    assert all(t.is_meta for boundary in found.boundaries for t in boundary.tensors)
    assert [t.requires_grad for b in found.boundaries for t in b.tensors] == [False] + [True] * 5


@pytest.mark.parametrize(
    ("layer", "writes", "aliases"),
    [
        (nn.ReLU, False, False),
        (lambda: nn.ReLU(inplace=True), True, True),
        (nn.Identity, False, True),
        (nn.Flatten, False, True),
        (lambda: nn.Dropout(0.5, inplace=True), True, True),
        (lambda: nn.Linear(8, 8), False, False),
        (Writes, True, False),
        (Pair, False, True),
    ],
)
def test_layers_that_overwrite_or_return_their_input_are_found(layer, *, writes, aliases):
    found = shapes(nn.Sequential(nn.Linear(8, 8), layer()), torch.randn(3, 8))
    assert (found.writes[1], found.aliases[1]) == (writes, aliases)


@pytest.mark.parametrize(
    ("first", "end", "writes"),
    [
        (0, 1, False),
        (0, 4, False),
        (1, 2, False),
        (1, 4, True),
        (2, 4, True),
        (3, 4, True),
        (4, 6, False),
        (5, 6, True),
    ],
)
def test_stages_that_overwrite_their_input_are_found(first: int, end: int, *, writes: bool) -> None:
    """A layer that returns a new tensor protects the input from later layers."""
    model = nn.Sequential(
        nn.Linear(8, 8), nn.Identity(), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(8, 8), nn.ReLU(inplace=True)
    )
    assert shapes(model, torch.randn(3, 8)).stage_writes_input(first, end) is writes


class Peeks(nn.Module):
    """Layer that reads a value of its input."""

    def forward(self, value: Tensor) -> Tensor:
        return value.add_(1.0) if float(value.sum()) < 1e6 else value.numpy().argsort()


def test_shapes_of_layers_that_read_values_are_found() -> None:
    found = shapes(nn.Sequential(nn.Linear(8, 8), Peeks(), nn.Linear(8, 4)), torch.randn(3, 8))
    assert [tuple(boundary.tensors[0].shape) for boundary in found.boundaries] == [(3, 8), (3, 8), (3, 8), (3, 4)]
    assert all(boundary.tensors[0].is_meta for boundary in found.boundaries)
    assert (found.writes, found.aliases) == ((False, True, False), (False, True, False))


class Picky(nn.Module):
    """Layer that refuses positive values."""

    def forward(self, value: Tensor) -> Tensor:
        if float(value.max()) > 0:
            raise ValueError("positive")
        return value


@pytest.mark.parametrize("budget", ["0s", "10s"])
def test_layers_that_fail_on_random_values_are_refused_by_profile(budget: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Picky())
    nn.init.zeros_(model[0].weight)
    nn.init.constant_(model[0].bias, -1.0)
    with pytest.raises(ModelError, match=r'layer "1" \(Picky\) does not run on random values.*ValueError: positive'):
        planner.profile(
            model, example_batch=lambda size: (torch.ones(size, 8), torch.ones(size, 8)), proof_budget=budget
        )


def test_a_boundary_rebuilds_structure_and_constants() -> None:
    value = {"a": (torch.zeros(2, device="meta"), 3), "b": [None, torch.ones(4, device="meta")]}
    boundary = Boundary.of(value)
    assert [tuple(t.shape) for t in boundary.tensors] == [(2,), (4,)]
    received = [torch.full((2,), 5.0), torch.full((4,), 6.0)]
    rebuilt = boundary.rebuild(received)
    assert rebuilt["a"][0] is received[0]
    assert rebuilt["a"][1] == 3
    assert rebuilt["b"] == [None, received[1]]


# The module


def stage(layers: Sequence[Layer], received: Any, **options: Any) -> StageModule:
    """Return a stage that receives a value like `received`."""
    received = received if isinstance(received, Boundary) else Boundary.of(received)
    default = {"recompute": "never", "micro_batches": 1, "loss_fn": None, "copies_input": False}
    return StageModule(layers, received=received, **{**default, **options})


def test_parameters_of_a_stage_have_the_models_names() -> None:
    """So checkpoints fit any cut."""
    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8))),
        nn.Linear(8, 4),
    )
    layers = chain_of(model).layers
    whole = model.state_dict()
    for first, end in ((0, 1), (1, 3), (2, 4), (3, 5), (0, 5)):
        module = stage(layers[first:end], torch.zeros(2, 8))
        names = [name for layer in layers[first:end] for name in whole if name.startswith(f"{layer.name}.")]
        assert list(module.state_dict()) == names
        assert dict(module.named_parameters()).keys() <= dict(model.named_parameters()).keys()
    assert list(stage(layers, torch.zeros(2, 8)).state_dict()) == list(whole)


def test_a_stage_rebuilds_inputs_and_lays_out_outputs() -> None:
    """Outputs have the agreed layout, or are contiguous."""

    class Turn(nn.Module):
        def forward(self, parts: tuple[Tensor, Tensor, float]) -> tuple[Tensor, Tensor]:
            return parts[0].t(), parts[1]

    received = (torch.randn(3, 8), torch.randn(3, 8), 0.5)
    module = stage([Layer("a.b", Turn())], tuple(t.to("meta") if isinstance(t, Tensor) else t for t in received))
    turned, same = module(received[0], received[1])
    assert turned.is_contiguous()
    assert torch.equal(turned, received[0].t())
    assert torch.equal(same, received[1])
    module.sent = Boundary.of((torch.empty(3, 8, device="meta").t(), torch.empty(3, 8, device="meta")))
    turned, same = module(received[0], received[1])
    assert turned.stride() == (1, 8)
    assert torch.equal(turned, received[0].t())


def test_the_last_stage_returns_the_loss_of_its_micro_batch() -> None:
    module = stage(
        [Layer("0", nn.Identity())], torch.zeros(2, 8), micro_batches=2, loss_fn=lambda out, t: (out - t).mean()
    )
    module.targets = [torch.zeros(2, 8), torch.ones(2, 8)]
    for index, loss in enumerate((1.0, 0.0)):
        module.micro_batch = index
        assert float(module(torch.ones(2, 8))) == loss


def test_a_script_must_not_call_a_stage() -> None:
    module = stage([Layer("0", nn.Identity())], torch.zeros(2, 8), micro_batches=1, loss_fn=lambda out, _: out.mean())
    with pytest.raises(UsageError, match="the script calls a stage, as `update_bn`"):
        torch.optim.swa_utils.update_bn([torch.zeros(2, 8)], nn.Sequential(nn.BatchNorm1d(8), module))


def block() -> nn.Sequential:
    """Return layers with dropout, so that recomputation must draw the same numbers."""
    return nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.ReLU(inplace=True), nn.Linear(32, 8))


@pytest.mark.parametrize("recompute", ["always", "except-last"])
@pytest.mark.parametrize("first_stage", [True, False])
def test_recomputation_does_not_change_outputs_and_gradients(recompute: Recompute, *, first_stage: bool) -> None:
    """Bit for bit, with dropout, on two micro-batches."""
    results = []
    for choice in ("never", recompute):
        torch.manual_seed(0)
        module = stage(chain_of(block()).layers, torch.zeros(4, 8), recompute=choice, micro_batches=2)
        inputs = [torch.randn(4, 8, requires_grad=not first_stage) for _ in range(2)]
        found = []
        outputs = []
        for index, value in enumerate(inputs):
            module.micro_batch = index
            outputs.append(module(value)[0])
        for output in outputs:
            torch.rand(3)  # other draws between forward and backward do not matter
            output.pow(2).sum().backward()
        found += [output.detach() for output in outputs]
        found += [value.grad for value in inputs if value.grad is not None]
        found += [p.grad for p in module.parameters() if p.grad is not None]
        results.append(found)
    plain, recomputed = results
    assert len(plain) == len(recomputed) == 2 + (0 if first_stage else 2) + 4
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize(
    ("recompute", "runs"), [("never", [1, 1, 1]), ("except-last", [2, 2, 1]), ("always", [2, 2, 2])]
)
def test_layers_run_twice_if_the_plan_recomputes_them(recompute: Recompute, runs: list[int]) -> None:
    calls: list[int] = []

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, value: Tensor) -> Tensor:
            calls.append(1)
            return self.linear(value).tanh()

    module = stage([Layer("0", Counts())], torch.zeros(2, 8), recompute=recompute, micro_batches=3)
    for index, expected in enumerate(runs):
        calls.clear()
        module.micro_batch = index
        module(torch.randn(2, 8))[0].sum().backward()
        assert len(calls) == expected


def test_a_recomputed_stage_may_return_a_parameter() -> None:
    """The parameter must not become a result of the checkpoint, whose backward would call itself forever."""

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))

        def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
            return value @ self.weight, self.weight

    module = stage([Layer("0", Embedding())], torch.zeros(2, 8), recompute="always")
    product, weight = module(torch.ones(2, 8))
    (parameter,) = module.parameters()
    assert parameter.is_leaf
    (product.sum() + 3 * weight.sum()).backward()
    assert torch.equal(parameter.grad, torch.full((8, 8), 5.0))


def test_a_recomputed_stage_in_evaluation_has_no_graph() -> None:
    module = stage(chain_of(block().eval()).layers, torch.zeros(2, 8), recompute="always")
    with torch.no_grad():
        (result,) = module(torch.randn(2, 8))
    assert not result.requires_grad


def test_a_frozen_first_stage_has_no_graph() -> None:
    module = stage(chain_of(block().requires_grad_(False)).layers, torch.zeros(2, 8), recompute="always")
    (result,) = module(torch.randn(2, 8))
    assert not result.requires_grad


@pytest.mark.parametrize("frozen", range(4))
@pytest.mark.parametrize("recompute", ["always", "layers"])
def test_recomputed_layers_are_those_of_the_predicted_time(recompute: Recompute, frozen: int) -> None:
    """The first of four layers are frozen, in two stages."""

    def build() -> nn.Sequential:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        for n in range(frozen):
            model[n].requires_grad_(False)
        return model

    costs = costs_at(profile_of_model(loaded_model(build), sizes=(2,)), 2)
    recomputed = ((0, 1), (2, 3)) if recompute == "layers" else ()
    partition = Partition(
        schedule="gpipe", micro_batches=1, balance=(2, 2), recompute=(recompute,) * 2, recomputed=recomputed
    )
    times = Evaluation(costs, partition, Cluster(memory_bytes=(0, 0))).stage_times
    layers, known = chain_of(build()).layers, shapes(build(), torch.randn(2, 8))
    calls: list[int] = []
    for n, layer in enumerate(layers):
        layer.module.register_forward_hook(lambda *_, n=n: calls.append(n))
    value = torch.randn(2, 8)
    for k, first in enumerate((0, 2)):
        module = stage(
            layers[first : first + 2],
            known.boundaries[first],
            recompute=recompute,
            carries=[t.requires_grad for t in known.boundaries[first + 2].tensors],
            recomputed={n: known.recomputed_layer(first + n, first + 2) for n in range(2 * bool(recomputed))},
        )
        calls.clear()
        (value,) = module(value.detach().requires_grad_(value.requires_grad))
        if value.requires_grad:
            value.sum().backward()
        again = [n for n in set(calls) if calls.count(n) > 1]
        assert times[k].recompute_us == pytest.approx(costs.forward_us[again].sum())
        assert bool(again) == (frozen < first + 2)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_a_stage_that_overwrites_its_input_copies_it(recompute: Recompute) -> None:
    """The received tensor is a leaf, and is read again in recomputation."""
    layers = [Layer("0", nn.ReLU(inplace=True)), Layer("1", nn.Linear(8, 8))]
    module = stage(layers, torch.zeros(4, 8), recompute=recompute, copies_input=True)
    received = torch.randn(4, 8, requires_grad=True)
    before = received.detach().clone()
    module(received)[0].sum().backward()
    assert torch.equal(received, before)
    plain = before.clone().requires_grad_()
    layers[1].module(plain.relu()).sum().backward()
    assert torch.allclose(received.grad, plain.grad)


def test_a_recomputed_stage_holds_only_output_and_random_state() -> None:
    held = {}
    for recompute in ("never", "always"):
        wide = nn.Sequential(nn.Linear(8, 4096), nn.GELU(), nn.Linear(4096, 8))
        module = stage(chain_of(wide).layers, torch.zeros(16, 8), recompute=recompute)
        value = torch.randn(16, 8, requires_grad=True)
        kept: list[Any] = []
        held[recompute] = CpuMemoryMeter().measure(lambda m=module, v=value, k=kept: k.append(m(v))).end_bytes
    assert held["never"] >= 2 * 4 * 16 * 4096
    assert held["always"] <= 4 * 16 * 8 + 6000


class Masked(nn.Module):
    """Also returns a mask without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(value), torch.zeros(len(value), 4)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_outputs_without_gradient_do_not_require_one(recompute: Recompute) -> None:
    """The engine has no gradient for a mask."""
    masked = Masked()
    received = torch.empty(2, 4, device="meta", requires_grad=True)
    module = stage([Layer("0", masked)], received, recompute=recompute, carries=(True, False))
    given = torch.randn(2, 4, requires_grad=True)
    value, mask = module(given)
    assert (value.requires_grad, mask.requires_grad) == (True, False)
    value.sum().backward()
    assert torch.equal(given.grad, masked.linear.weight.sum(0).expand(2, 4))


class MaskedAndSkipped(nn.Module):
    """Returns a mask, and its result or, in training, its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros(len(value), 4), value if self.training else self.linear(value)


def test_a_recomputed_stage_of_skipped_layers_has_no_gradients() -> None:
    module = stage(
        [Layer("0", MaskedAndSkipped())], torch.empty(2, 4, device="meta"), recompute="always", carries=(False, True)
    )
    mask, value = module(torch.randn(2, 4))
    assert (mask.requires_grad, value.requires_grad) == (False, True)
    value.sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())


class WithTable(nn.Module):
    """Returns a small output and a large table without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(value), torch.ones(2000, 4)


def test_a_recomputed_stage_allocates_no_gradient_of_a_table() -> None:
    """Its backward needs memory for the recomputed table only."""
    module = stage(
        [Layer("0", WithTable())],
        torch.empty(2, 4, device="meta", requires_grad=True),
        recompute="always",
        carries=(True, False),
    )
    value, _ = module(torch.randn(2, 4, requires_grad=True))
    size = 2000 * 4 * 4
    assert size <= CpuMemoryMeter().measure(value.sum().backward).peak_bytes < 2 * size


def test_sent_shapes_must_be_the_planned_ones() -> None:
    """One message with the shapes, before anything is sent."""
    layers = [Layer("0", nn.Linear(8, 8))]
    module = stage(
        layers,
        torch.zeros(2, 5, 8, device="meta"),
        sent=Boundary.of(torch.zeros(2, 5, 8, device="meta", requires_grad=True)),
    )
    module(torch.zeros(2, 5, 8))
    expected = r"a stage that received float32\[2, 4, 8\] should send float32\[2, 5, 8\], but has float32\[2, 4, 8\]"
    with pytest.raises(ModelError, match=expected) as caught:
        module(torch.zeros(2, 4, 8))
    assert "example_batch" in caught.value.hint


def test_constants_at_a_boundary_must_be_the_planned_ones() -> None:
    """They are not sent: the next stage would use the planned ones."""

    class Length(nn.Module):
        def forward(self, value: Tensor) -> tuple[Tensor, int]:
            return value.mean(1), value.shape[1]

    module = stage(
        [Layer("0", Length())],
        torch.zeros(2, 5, 8, device="meta"),
        sent=Boundary.of((torch.zeros(2, 8, device="meta"), 5)),
    )
    module(torch.zeros(2, 5, 8))
    with pytest.raises(ModelError, match="returned 4 where it returned 5 for `example_batch`"):
        module(torch.zeros(2, 4, 8))
