"""Messages about errors in a user's file."""

import logging
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


def load_error(folder: Path, text: str) -> ModelError:
    """Load a file with this text and return its error."""
    with pytest.raises(ModelError) as error:
        load_model(str(write_model(folder, text)))
    return error.value


def test_a_failed_import_names_its_cause(tmp_path: Path) -> None:
    """The first exception of the chain is named."""
    error = load_error(tmp_path, _LAZY.format("no CUDA runtime"))
    assert error.message.endswith(
        "ModuleNotFoundError: Could not import module 'GPT2LMHeadModel'.; the cause: RuntimeError: no CUDA runtime"
    )
    assert "--debug" in error.hint


def test_an_incompatible_torchvision_is_named(tmp_path: Path) -> None:
    error = load_error(tmp_path, _LAZY.format("operator torchvision::nms does not exist"))
    assert "RuntimeError: operator torchvision::nms does not exist" in error.message
    assert "torchvision that is installed does not fit torch" in error.hint


def test_only_failed_imports_name_a_cause(tmp_path: Path) -> None:
    text = "try:\n    {}['a']\nexcept KeyError:\n    raise ValueError('no such layer')\n"
    error = load_error(tmp_path, text)
    assert error.message.endswith("raised ValueError: no such layer")


def test_a_cause_hidden_by_raise_from_none_is_not_named(tmp_path: Path) -> None:
    text = "try:\n    {}['a']\nexcept KeyError:\n    raise ImportError('install einops') from None\n"
    assert load_error(tmp_path, text).message.endswith("raised ImportError: install einops")


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
    "model in a list": ("return nn.Seq", "return [1] or nn.Seq", "return the model alone"),
    "optimizer of named parameters": (
        "def build_model",
        "def build_optimizer(named):\n    return torch.optim.SGD([p for n, p in named])\n\ndef build_model",
        "one by one and without names",
    ),
    "loss with autograd.grad": ("", "", "if torch.is_grad_enabled"),
}


@pytest.mark.parametrize("case", WRONG)
def test_common_mistakes_are_refused_with_a_hint(case: str, tmp_path: Path) -> None:
    old, new, expected = WRONG[case]
    path = write_model(tmp_path, FAILING.replace(old, new, 1) if old else FAILING)
    with pytest.raises(ModelError) as load_error:
        planner.profile(str(path), batch_sizes=(2,), repeat=2, time_budget="0s", proof_budget="0s", note=str, warn=str)
    assert expected in load_error.value.hint


def test_torch_logs_nothing_about_a_wrong_shape(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layers = "nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 3))"
    text = f"import torch\nfrom torch import nn\n\ndef build_model():\n    return {layers}\n"
    text += "\ndef example_batch(n):\n    return torch.randn(n, 3), torch.randn(n, 3)\n"
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(ModelError, match='layer "1"'):
            planner.profile(write_model(tmp_path, text))
    finally:
        logger.removeHandler(caplog.handler)
    assert not caplog.records
