"""Digests of a model's code: edits that change them, and edits that do not."""

import itertools
from pathlib import Path

import pytest

from planner.model.computation import code_digests
from planner.model.load import load_model

MODEL = '''
import functools
import torch
from torch import nn
from torch.nn.functional import gelu, relu

SMOOTH = 0.1


def act(x):
    return relu(x)


def unused(x):
    return x


class Layer(nn.Module):
    """A layer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.held = gelu
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        # a comment
        return self.dropout(self.held(act(self.linear(x))))


def build_model():
    return nn.Sequential(Layer(), nn.ReLU(), nn.Linear(8, 4), nn.TransformerEncoderLayer(4, 2, activation="relu"))


def example_batch(size):
    return torch.randn(size, 8), torch.randn(size, 4)


def mean(values):
    return values.mean()


inner = nn.CrossEntropyLoss(label_smoothing=0.3)
part = functools.partial(nn.functional.smooth_l1_loss, beta=0.5)


def loss_fn(output, target):
    return mean((output - target) ** 2 + SMOOTH) + part(output, target)
'''
numbers = itertools.count()


def digests_of(folder: Path, text: str) -> dict[str, str]:
    """Return the code digests of a model file with this text."""
    path = folder / f"model_{next(numbers)}.py"
    path.write_text(text)
    loaded = load_model(str(path))
    return code_digests(loaded.build(), loaded)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# a comment", "# another one"),
        ('"""A layer."""', '"""A layer, as described elsewhere."""'),
        ("    return x\n", "    return -x\n"),
        ("(output - target) ** 2", "((output - target)**2)"),
        ("return torch.randn(size, 8)", "return torch.rand(size, 8)"),
    ],
)
def test_comments_layout_and_unused_code_do_not_change_digests(tmp_path: Path, old: str, new: str) -> None:
    assert old in MODEL
    assert digests_of(tmp_path, MODEL.replace(old, new)) == digests_of(tmp_path, MODEL)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("** 2", "** 4", "loss"),
        ("values.mean()", "values.sum()", "loss"),
        ("SMOOTH = 0.1", "SMOOTH = 0.2", "loss"),
        ("beta=0.5", "beta=0.6", "loss"),
        ("def loss_fn(output, target):", "loss_count = len\n\n\ndef loss_fn(output, target):", "loss"),
        ("return relu(x)", "return gelu(x)", "layers"),
        ("import gelu, relu", "import gelu, silu as relu", "layers"),
        ("self.held = gelu", "self.held = relu", "layers"),
        ("Layer(), nn.ReLU()", "Layer(), nn.GELU()", "layers"),
        ('activation="relu"', 'activation="gelu"', "layers"),
        ("Dropout(0.1)", "Dropout(0.2)", "layers"),
        ("self.dropout(self.held(act(self.linear(x))))", "self.dropout(act(self.held(self.linear(x))))", "layers"),
    ],
)
def test_code_changes_change_only_the_digest_of_loss_or_layers(tmp_path: Path, old: str, new: str, what: str) -> None:
    """All tensors stay the same."""
    assert old in MODEL
    before, after = digests_of(tmp_path, MODEL), digests_of(tmp_path, MODEL.replace(old, new))
    assert [name for name in before if before[name] != after[name]] == [what]


def test_digest_of_a_loss_module_includes_its_settings(tmp_path: Path) -> None:
    text = MODEL[: MODEL.index("def loss_fn")] + "loss_fn = inner\n"
    assert digests_of(tmp_path, text) == digests_of(tmp_path, text)
    assert digests_of(tmp_path, text.replace("=0.3", "=0.4"))["loss"] != digests_of(tmp_path, text)["loss"]
