"""Two models of blocks that are alike, for `tpu_composition.py`: `--set name=vit` and `--set name=residual`.

vit         patches of 8x8 of images of 64x64, pre-norm blocks, the mean over patches (Dosovitskiy et al. 2021)
residual    patches of 4x4, blocks of two 3x3 convolutions (He et al. 2016), the mean over places
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

IMAGE, CLASSES = 64, 100


class Patches(nn.Module):
    """(b, 3, 64, 64) -> (b, patches, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, width, 8, stride=8)
        self.position = nn.Parameter(torch.zeros(1, (IMAGE // 8) ** 2, width))

    def forward(self, image: Tensor) -> Tensor:
        patches: Tensor = self.convolution(image)
        return patches.flatten(2).transpose(1, 2) + self.position


class Block(nn.Module):
    """Attention and a perceptron of four times the width, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.query_key_value(self.norms[0](hidden)).unflatten(2, (3, self.heads, -1))
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value)
        hidden = hidden + self.output(attended.transpose(1, 2).flatten(2))
        found: Tensor = hidden + self.down(functional.gelu(self.up(self.norms[1](hidden))))
        return found


class Convolutions(nn.Module):
    """Two convolutions, each after a norm, and a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.two = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(width), nn.BatchNorm2d(width)])

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.two(functional.relu(self.norms[0](self.one(hidden))))
        return functional.relu(hidden + self.norms[1](inner))


class Head(nn.Module):
    """Classes from the mean over `axes`."""

    def __init__(self, width: int, *axes: int) -> None:
        super().__init__()
        self.axes, self.linear = axes, nn.Linear(width, CLASSES)

    def forward(self, hidden: Tensor) -> Tensor:
        classes: Tensor = self.linear(hidden.mean(self.axes))
        return classes


def build_model(*, name: str = "vit", blocks: int = 6, width: int = 192) -> nn.Sequential:
    """Return one of the two models."""
    if name == "vit":
        return nn.Sequential(Patches(width), *(Block(width, heads=width // 64) for _ in range(blocks)), Head(width, 1))
    stem = nn.Sequential(nn.Conv2d(3, width, 4, stride=4), nn.BatchNorm2d(width))
    return nn.Sequential(stem, *(Convolutions(width) for _ in range(blocks)), Head(width, 2, 3))


def example_batch(size: int) -> tuple[Tensor, Tensor]:
    """Return noise."""
    return torch.randn(size, 3, IMAGE, IMAGE), torch.randint(CLASSES, (size,))


loss_fn = functional.cross_entropy
