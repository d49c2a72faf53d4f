"""Errors in a user's file are told with what was behind them."""

from pathlib import Path

import pytest

import planner
from planner.core.errors import ModelError
from planner.model.load import load_model
from tests.support.cli import write_model

_LAZY = """
def load():
    raise RuntimeError("{}")
try:
    load()
except RuntimeError as error:
    raise ModuleNotFoundError("Could not import module 'GPT2LMHeadModel'.") from error
"""
"""As `transformers` imports its models."""


def refused(folder: Path, text: str) -> ModelError:
    with pytest.raises(ModelError) as error:
        load_model(str(write_model(folder, text)))
    return error.value


def test_a_failed_import_names_its_cause(tmp_path: Path) -> None:
    """The first exception of the chain, and not only that something could not be imported."""
    error = refused(tmp_path, _LAZY.format("no CUDA runtime"))
    assert error.message.endswith(
        "ModuleNotFoundError: Could not import module 'GPT2LMHeadModel'.; the cause: RuntimeError: no CUDA runtime"
    )
    assert "--debug" in error.hint


def test_a_torchvision_that_does_not_fit_torch_is_named(tmp_path: Path) -> None:
    """Its operators are not there; the hint says what to install."""
    error = refused(tmp_path, _LAZY.format("operator torchvision::nms does not exist"))
    assert "RuntimeError: operator torchvision::nms does not exist" in error.message
    assert "torchvision that is installed does not fit torch" in error.hint


def test_other_errors_speak_for_themselves(tmp_path: Path) -> None:
    """What happened before an error that is no failed import is not its cause as a rule."""
    text = "try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('no such layer')\n"
    error = refused(tmp_path, text)
    assert error.message.endswith("raised ValueError: no such layer")


def test_an_import_that_hides_its_cause_is_left_alone(tmp_path: Path) -> None:
    """`raise … from None` says that what was before does not matter."""
    text = "try:\n    {}['a']\nexcept KeyError:\n    raise ImportError('install einops') from None\n"
    assert refused(tmp_path, text).message.endswith("raised ImportError: install einops")


FAILING = """
import torch
from torch import nn

def example_batch(n):
    return torch.randn(n, 4), torch.randn(n, 4)

def loss_fn(out, y):
    loss = (out - y).square().mean()
    return loss + torch.autograd.grad(loss, out, create_graph=True)[0].square().sum()

def build_model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
"""

WRONG = {
    "a list of layers": ("return nn.Seq", "return [1] or nn.Seq", "return the model alone"),
    "parameters with names": (
        "def build_model",
        "def build_optimizer(named):\n    return torch.optim.SGD([p for n, p in named])\n\ndef build_model",
        "one by one and without names",
    ),
    "a loss that differentiates": ("", "", "if torch.is_grad_enabled"),
}


@pytest.mark.parametrize("case", WRONG)
def test_refusals_say_what_to_do(case: str, tmp_path: Path) -> None:
    """In the hint."""
    old, new, expected = WRONG[case]
    path = write_model(tmp_path, FAILING.replace(old, new, 1) if old else FAILING)
    with pytest.raises(ModelError) as refused:
        planner.profile(str(path), batch_sizes=(2,), repeat=2, time_budget="0s", proof_budget="0s", note=str, warn=str)
    assert expected in refused.value.hint
