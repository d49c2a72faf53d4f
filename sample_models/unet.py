"""U-Net (Ronneberger et al. 2015, figure 1): a model with long skip connections that is not an `nn.Sequential`.

The tensor behind each level of the way down is needed again on the way up, so at the deepest point all of them cross
one boundary. Convolutions are padded here, so the output is as large as the input and nothing is cropped; the paper's
parameter count is not touched by that: 31,030,658 for width 64, 4 levels, 1 image channel and 2 classes.

Shapes: b samples, c channels, h height, w width.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def convolution(channels_in: int, channels_out: int) -> nn.Conv2d:
    """3x3 convolution with the paper's initialisation (section 3): normal, variance 2 / fan-in."""
    layer = nn.Conv2d(channels_in, channels_out, 3, padding=1)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return layer


class DoubleConvolution(nn.Module):
    """Two 3x3 convolutions, each with a ReLU: (b, c, h, w) -> (b, c', h, w)."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.first = convolution(channels_in, channels_out)
        self.second = convolution(channels_out, channels_out)

    def forward(self, features: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(features))))


class Down(nn.Module):
    """Halve the size, double the channels: (b, c, h, w) -> (b, 2*c, h/2, w/2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = DoubleConvolution(channels, 2 * channels)

    def forward(self, features: Tensor) -> Tensor:
        deeper: Tensor = self.convolutions(F.max_pool2d(features, 2))
        return deeper


class Up(nn.Module):
    """Double the size and join the skip: (b, 2*c, h/2, w/2) and (b, c, h, w) -> (b, c, h, w)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.enlarge = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.convolutions = DoubleConvolution(2 * channels, channels)

    def forward(self, features: Tensor, skip: Tensor) -> Tensor:
        joined: Tensor = self.convolutions(torch.cat((skip, self.enlarge(features)), dim=1))
        return joined


class UNet(nn.Module):
    """Images (b, image channels, h, w) -> logits for every pixel (b, classes, h, w)."""

    def __init__(self, width: int, levels: int, image_channels: int, num_classes: int) -> None:
        super().__init__()
        self.entry = DoubleConvolution(image_channels, width)
        self.down = nn.ModuleList(Down(width * 2**level) for level in range(levels))
        self.up = nn.ModuleList(Up(width * 2**level) for level in reversed(range(levels)))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.entry(images)
        skips = []
        for down in self.down:
            skips.append(features)
            features = down(features)
        for up in self.up:
            features = up(features, skips.pop())
        logits: Tensor = self.head(features)
        return logits


def build_model(
    *, width: int = 16, levels: int = 4, image_channels: int = 1, num_classes: int = 2, image_size: int = 64
) -> UNet:
    """Build a U-Net.

    Args:
        width: Channels of the first level; each level down doubles them. 64 in the paper.
        levels: How many times the size is halved. 4 in the paper.
        image_channels: Channels of the images.
        num_classes: Classes to tell apart at every pixel.
        image_size: Height and width of the images; divisible by 2^levels.

    Raises:
        ValueError: If `image_size` cannot be halved `levels` times.

    """
    if image_size % 2**levels:
        message = f"image_size {image_size} must be divisible by 2^levels = {2**levels}"
        raise ValueError(message)
    return UNet(width, levels, image_channels, num_classes)


def example_batch(
    batch_size: int, *, image_size: int = 64, image_channels: int = 1, num_classes: int = 2
) -> tuple[Tensor, Tensor]:
    """Draw noisy images made of 4 x 4 patches, each as bright as its class.

    Returns:
        Images (b, image channels, h, w) and the class of every pixel (b, h, w) int64.

    """
    patches = torch.randint(num_classes, (batch_size, 1, 4, 4)).float()
    labels = F.interpolate(patches, size=(image_size, image_size))
    noise = 0.5 * torch.randn(batch_size, image_channels, image_size, image_size)
    return labels + noise, labels.squeeze(1).long()


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the logits (b, classes, h, w) with the labels (b, h, w), mean over all pixels."""
    return F.cross_entropy(output, target)


def build_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum; 0.9, as the paper's 0.99 suits its batches of one image."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
