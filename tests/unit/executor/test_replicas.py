"""Tests that buckets of gradients are summed during the last backward, in the same order on all ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planner.executor.run import replicas as replicas_module
from planner.executor.run.replicas import ReplicaGradients, is_replica_hook
from planner.model.split_backward import SplitBackward, count_additions


@pytest.fixture(autouse=True)
def _small_buckets(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make buckets of a few numbers."""
    monkeypatch.setattr(replicas_module, "BUCKET_BYTES", 64)


class Sent(list[str]):
    """Sizes of sent buckets, and marks of the test."""

    def __init__(self) -> None:
        super().__init__()
        self.held_by_gloo: list[Tensor] = []


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Return a list that records sent buckets."""
    found = Sent()
    real = dist.all_reduce

    def noted(tensor: Tensor, *args: object, **kwargs: object) -> object:
        if kwargs.get("async_op"):
            found.append(f"{tensor.numel()}")
            found.held_by_gloo.append(tensor)
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(dist, "all_reduce", noted)
    return found


def group() -> dist.ProcessGroup:
    made = dist.group.WORLD
    assert made is not None
    return made


def step(model: nn.Module, gradients: ReplicaGradients, sent: Sent) -> list[Tensor | None]:
    """Run one micro-batch, and return the gradients, which are then deleted."""
    with gradients.send_during_last_backward(0):
        model(torch.ones(2, 4)).sum().backward()
        sent.append("over")
    gradients.wait_for_sums()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def test_buckets_are_sent_during_the_backward_from_the_second_step(sent: Sent) -> None:
    """From the last parameter to the first."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    gradients = ReplicaGradients([model.parameters()], group(), keeps_earlier=True)
    first = step(model, gradients, sent)
    assert sent == ["over", "4", "16", "4", "16"]
    sent.clear()
    second = step(model, gradients, sent)
    assert sent == ["4", "16", "4", "16", "over"]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None)


class Shared(nn.Module):
    """Uses one layer in two checkpoints, so that its gradient is added to twice, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.layer = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        value = value.requires_grad_()
        for _ in range(2):
            value = checkpoint(self.layer, value, use_reentrant=True)
        return value


def test_gradients_added_to_twice_are_sent_once(sent: Sent) -> None:
    """A parameter without a gradient has none after the sum."""
    torch.manual_seed(0)
    model = Shared()
    gradients = ReplicaGradients([model.parameters()], group(), keeps_earlier=True)
    for _ in range(3):
        expected = torch.autograd.grad(model.layer(model.layer(torch.ones(2, 4))).sum(), [*model.layer.parameters()])
        unused_weight, unused_bias, weight, bias = step(model, gradients, sent)
        assert unused_weight is None
        assert unused_bias is None
        assert torch.allclose(weight, expected[0])
        assert torch.allclose(bias, expected[1])
    # Unused parameters are sent at the end.
    assert sent[-4:] == ["4", "16", "over", "6"]


@pytest.mark.parametrize("order", [(1, 0), (0, 1)], ids=["last stage first", "first stage first"])
def test_a_parameter_of_two_stages_is_sent_after_both_backwards(sent: Sent, order: tuple[int, ...]) -> None:
    layer = nn.Linear(4, 4, bias=False)
    gradients = ReplicaGradients([[layer.weight], [layer.weight]], group(), keeps_earlier=True)
    for stage in order:
        with gradients.send_during_last_backward(stage):
            layer(torch.ones(1, 4)).sum().backward()
        assert sent == []
    gradients.wait_for_sums()
    assert sent == ["16"]
    assert torch.equal(layer.weight.grad, torch.full((4, 4), 2.0))


@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_of_earlier_parts_are_counted_once(sent: Sent, *, keeps: bool) -> None:
    """Only the last part of a mini-batch is sent."""
    model = nn.Linear(4, 4)
    gradients = ReplicaGradients([model.parameters()], group(), keeps_earlier=keeps)
    model.weight.grad, model.bias.grad = torch.ones(4, 4), torch.ones(4)
    gradients.drop_existing()
    for is_last in (False, True):
        gradients.is_last_part = is_last
        sent.append("part")
        with gradients.send_during_last_backward(0):
            model(torch.ones(1, 4)).sum().backward()
    gradients.wait_for_sums()
    assert sent == ["part", "part", "4", "16"]
    assert torch.equal(model.bias.grad, torch.full((4,), 3.0 if keeps else 2.0))


def test_the_memory_of_sums_is_released_with_the_gradients(sent: Sent) -> None:
    """A thread of gloo, which refers to summed tensors a little longer, could otherwise release it, uncounted."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(1, 3), nn.Linear(3, 2))
    gradients = ReplicaGradients([model.parameters()], group(), keeps_earlier=True)
    model[0].weight.grad = torch.ones(4, 4)  # alone in a bucket; the parameters of the other layers are unused
    gradients.wait_for_sums()
    assert torch.equal(model[0].weight.grad, torch.ones(4, 4))
    assert [tensor.untyped_storage().nbytes() for tensor in sent.held_by_gloo] == [0] * len(sent)


def test_deferred_weight_gradients_are_sent_during_the_last_w(sent: Sent) -> None:
    """From the first step. Gradients of I are complete by then."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 16), nn.LayerNorm(16))
    gradients, split = (
        ReplicaGradients([model.parameters()], group(), keeps_earlier=True),
        SplitBackward(ignores_gradient=is_replica_hook),
    )
    expected = torch.autograd.grad(2 * model(torch.ones(2, 4)).square().sum(), [*model.parameters()])
    for _ in range(2):
        kept = []
        for _ in range(2):
            with split.splitting():
                loss = model(torch.ones(2, 4)).square().sum()
            kept.append(split.backward_input([loss], [torch.ones(())]))
        assert [len(put_off) for put_off in kept] == [2, 2]
        split.backward_weight(kept[0])
        assert sent == []
        with gradients.send_during_last_backward(0, count_additions(kept[1])):
            sent.append("W")
            split.backward_weight(kept[1])
            sent.append("over")
        gradients.wait_for_sums()
        assert sent == ["16", "16", "W", "16", "64", "12", "16", "over"]
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert torch.allclose(parameter.grad, gradient)
        sent.clear()
        model.zero_grad()
