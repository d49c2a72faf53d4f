"""Default loss of models without `loss_fn`: the output's `.loss`, its only scalar with a gradient, or its mean."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import ModelError
from planner.model.default_loss import DefaultLoss
from planner.model.load import LoadedModel, load_module
from planner.profile.profiler import profile_model
from planner.profile.task import ProfilerOptions

WORDS, WIDTH = 11, 8


@dataclass
class ModelOutput:
    """A user's output dataclass."""

    logits: Tensor
    parts: dict[str, Tensor]


class NanoGPT(nn.Module):
    """Returns what `answer` makes of logits and loss."""

    def __init__(self, answer: Callable[[Tensor, Tensor], Any] = lambda logits, loss: (logits, loss)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.answer = answer

    def forward(self, words: Tensor, targets: Tensor) -> Any:
        value = self.embedding(words)
        for block in self.blocks:
            value = torch.tanh(block(value))
        logits = self.head(value)
        return self.answer(logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


def batch(size: int) -> tuple[Any, None]:
    """Return words and targets."""
    words = torch.randint(WORDS, (size, 6))
    return (words, words), None


def load_without_loss(model: nn.Module) -> LoadedModel:
    """Load the model as from Python, with an example batch only."""
    return load_module(model, example_batch=batch)


@pytest.mark.parametrize(
    ("answer", "noted"),
    [
        (lambda logits, loss: (logits, loss), 'output "1", the only scalar'),
        (lambda logits, loss: {"logits": logits, "total": loss}, 'output "total", the only scalar'),
        (
            lambda logits, loss: ModelOutput(logits, {"nll": loss, "accuracy": loss.detach()}),
            'output "parts.nll", the only',
        ),
        (lambda logits, loss: (logits, loss.reshape(1)), 'output "1", the only scalar'),
        (lambda logits, loss: (logits, loss, torch.tensor(3)), 'output "1", the only scalar'),
        (lambda _logits, loss: loss, "output, a scalar"),
        (lambda logits, loss: {"extra": logits.mean(), "loss": loss}, "own `.loss`"),
        (lambda logits, loss: SimpleNamespace(loss=loss, extra=logits.mean()), "own `.loss`"),
    ],
)
def test_the_only_scalar_or_loss_attribute_is_the_default_loss(answer, noted):
    """The note names it as soon as the chain exists."""
    model = NanoGPT(answer)
    without = load_without_loss(model)
    assert without.notes == ()
    chain = without.chain(model)
    assert noted in without.notes[0]
    inputs, _ = batch(3)
    value: Any = inputs
    for layer in chain.layers:
        value = layer.module(value)
    logits_and_loss = NanoGPT.forward(_with(model, lambda _, loss: loss), *inputs)
    assert torch.equal(without.loss_fn(value, None).reshape(()), logits_and_loss)


def _with(model: NanoGPT, answer: Callable[[Tensor, Tensor], Any]) -> NanoGPT:
    model.answer = answer
    return model


def test_the_default_loss_is_chosen_once() -> None:
    """A later output without a graph, or of one sample, does not change the choice."""
    loss = DefaultLoss("model.py")
    weight = torch.ones((), requires_grad=True)
    loss((torch.ones(2, 1), weight.detach(), weight * 2), None)
    assert float(loss((torch.ones(1, 1), torch.tensor(5.0), torch.tensor(7.0)), None)) == 7.0
    with pytest.raises(ModelError, match=r'"2".* is trained as the loss, but a later output does not have it'):
        loss((torch.ones(1, 1), torch.tensor(5.0)), None)


def test_the_mean_of_one_sample_is_not_taken_as_a_scalar_loss() -> None:
    loss = DefaultLoss("model.py")
    assert float(loss(torch.ones(1, 1, requires_grad=True), None).detach()) == 1.0
    assert "the mean of the model's output" in loss.note
    assert float(loss(torch.full((2, 1), 3.0), None)) == 3.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda logits, loss: (logits, loss, logits.mean()), '2 scalars that could be the loss: "1", "2"'),
        (lambda logits, loss: ModelOutput(logits, {"a": loss, "b": loss}), 'could be the loss: "parts.a", "parts.b"'),
        (lambda logits, loss: (logits, loss.detach()), 'carry no gradient: "1"'),
        (lambda logits, loss: {"loss": loss.expand(2), "more": logits}, r"own `.loss` has shape \[2\]"),
    ],
)
def test_ambiguous_losses_are_refused_with_their_names(answer: Callable[[Tensor, Tensor], Any], message: str) -> None:
    model = NanoGPT(answer)
    with pytest.raises(ModelError, match=message) as refused:
        load_without_loss(model).chain(model)
    assert "define `loss_fn(output, target)`" in refused.value.hint
    with pytest.raises(ModelError, match=message):
        profile_model(load_without_loss(model), ProfilerOptions(micro_batch_sizes=(1,), repeats=2))


class Split(nn.Module):
    def forward(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return value, value.square().mean(), value.detach().mean()


def test_the_loss_of_a_sequential_is_chosen_with_its_chain() -> None:
    """Its last stage may first run without a graph."""
    model = nn.Sequential(nn.Linear(4, 4), Split())
    without = load_module(model, example_batch=lambda size: (torch.ones(size, 4), None))
    without.chain(model)
    assert 'output "1"' in without.notes[0]
    notes: list[str] = []
    profile_model(without, ProfilerOptions(micro_batch_sizes=(1,), repeats=2, time_budget_s=0.0), note=notes.append)
    assert notes == list(without.notes)
