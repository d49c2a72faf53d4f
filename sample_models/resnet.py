"""ResNet-50, -101 and -152 (He et al. 2016, table 1) as a chain of bottleneck blocks; small images by default.

As in most implementations since, the 3x3 convolution of a block carries the stride. For 1000 classes the published
counts hold: 25,557,032 parameters for depth 50, 44,549,160 for depth 101.

Shapes: b samples, c channels, h height, w width.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Depth -> blocks in each of the four groups.
BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
# A block's output has this many times the channels of its 3x3 convolution.
EXPANSION = 4


class NormedConvolution(nn.Module):
    """Convolution without bias, then batch norm: (b, c, h, w) -> (b, c', h/stride, w/stride)."""

    def __init__(self, channels_in: int, channels_out: int, kernel: int = 1, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)
        nn.init.kaiming_normal_(self.convolution.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, features: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.convolution(features))
        return normed


class Stem(nn.Module):
    """7x7 convolution and 3x3 pool, both of stride 2: images (b, 3, h, w) -> (b, 64, h/4, w/4)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = NormedConvolution(3, 64, kernel=7, stride=2)

    def forward(self, images: Tensor) -> Tensor:
        return F.max_pool2d(F.relu(self.convolution(images)), 3, stride=2, padding=1)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut: (b, c, h, w) -> (b, 4*channels, h/stride, w/stride)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = EXPANSION * channels
        self.reduce = NormedConvolution(channels_in, channels)
        self.convolve = NormedConvolution(channels, channels, kernel=3, stride=stride)
        self.expand = NormedConvolution(channels, channels_out)
        # Each block starts as its shortcut alone (Goyal et al. 2017): without it small batches diverge at first.
        nn.init.zeros_(self.expand.norm.weight)
        # The paper's option B: a projection only where the shape changes.
        is_same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if is_same else NormedConvolution(channels_in, channels_out, stride=stride)

    def forward(self, features: Tensor) -> Tensor:
        residual = F.relu(self.convolve(F.relu(self.reduce(features))))
        return F.relu(self.expand(residual) + self.shortcut(features))


class Classifier(nn.Module):
    """Mean over the pixels, linear layer: (b, c, h, w) -> logits (b, classes)."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.linear(features.mean(dim=(2, 3)))
        return logits


def build_model(*, depth: int = 50, num_classes: int = 10, image_size: int = 64) -> nn.Sequential:
    """Build a ResNet as a chain: stem, one layer per block (16, 33 or 50), classifier.

    Args:
        depth: 50, 101 or 152.
        num_classes: Classes to tell apart.
        image_size: Height and width of the images; at least 33, as 1/32 of it remains at the end and batch norm
            needs more than one pixel when a micro-batch is a single sample.

    Raises:
        ValueError: If `depth` is another number or the images are too small.

    """
    if depth not in BLOCKS or image_size < 33:
        message = f"depth {depth} must be one of {sorted(BLOCKS)}, image_size {image_size} at least 33"
        raise ValueError(message)
    chain: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem())
    channels_in = 64
    for group, num_blocks in enumerate(BLOCKS[depth]):
        channels = 64 * 2**group
        for index in range(num_blocks):
            stride = 2 if group > 0 and index == 0 else 1
            chain[f"group_{group}_block_{index}"] = Bottleneck(channels_in, channels, stride)
            channels_in = EXPANSION * channels
    chain["classifier"] = Classifier(channels_in, num_classes)
    return nn.Sequential(chain)


def example_batch(batch_size: int, *, image_size: int = 64, num_classes: int = 10) -> tuple[Tensor, Tensor]:
    """Draw noisy gratings whose orientation tells the class.

    Returns:
        Images (b, 3, h, w) and labels (b,) int64.

    """
    labels = torch.randint(num_classes, (batch_size,))
    angle = (labels * (math.pi / num_classes)).view(-1, 1, 1)
    axis = torch.linspace(-1.0, 1.0, image_size)
    waves = torch.sin(12.0 * (angle.cos() * axis.view(1, -1, 1) + angle.sin() * axis.view(1, 1, -1)))
    return waves.unsqueeze(1) + 0.3 * torch.randn(batch_size, 3, image_size, image_size), labels


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the logits (b, classes) with the labels (b,), mean over the samples."""
    return F.cross_entropy(output, target)


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum 0.9 and weight decay 1e-4 (He et al., section 3.4), slower than theirs for small batches."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, weight_decay=1e-4)
