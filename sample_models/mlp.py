"""A deep multi-layer perceptron as nested `nn.Sequential`s: the smallest model worth cutting.

Planning flattens the nesting, so every `Linear` and every `ReLU` is a layer of its own: 2*depth + 1 layers, with
F*w + w + (depth - 1)*(w*w + w) + w*C + C parameters for F features, width w and C classes.
"""

from collections.abc import Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def build_model(*, depth: int = 8, width: int = 512, features: int = 64, num_classes: int = 10) -> nn.Sequential:
    """Build the perceptron: (b, features) -> logits (b, classes).

    Args:
        depth: Hidden layers; at least 1.
        width: Neurons in each of them.
        features: Numbers per sample; at least `num_classes` (see `example_batch`).
        num_classes: Classes to tell apart.

    """
    sizes = [features] + depth * [width]
    hidden = [nn.Sequential(hidden_linear(before, after), nn.ReLU()) for before, after in pairwise(sizes)]
    return nn.Sequential(*hidden, nn.Linear(width, num_classes))


def hidden_linear(features_in: int, features_out: int) -> nn.Linear:
    """Build a linear layer initialised as in He et al. 2015: the signal keeps its size however deep the chain."""
    layer = nn.Linear(features_in, features_out)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer


def example_batch(batch_size: int, *, features: int = 64, num_classes: int = 10) -> tuple[Tensor, Tensor]:
    """Draw noise in which the number at the place of the class is larger by 4.

    Returns:
        Inputs (b, features) and labels (b,) int64.

    """
    labels = torch.randint(num_classes, (batch_size,))
    return torch.randn(batch_size, features) + 4.0 * F.one_hot(labels, features), labels


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the logits (b, classes) with the labels (b,), mean over the samples."""
    return F.cross_entropy(output, target)


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum 0.9."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
