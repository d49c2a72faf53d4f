"""Vision models: detection, segmentation, auxiliary heads, and tensors in attributes."""

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.real_model import RealModel, images

__all__ = ["DETR", "FCOS", "VISION_MODELS", "UNet", "frozen_backbone"]


def conv(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = conv(width, width), nn.Conv2d(width, width, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.two(self.one(x)))


class FeaturePyramid(nn.Module):
    """Lateral and top-down connections (Lin et al. 2017)."""

    def __init__(self, widths: Sequence[int], width: int) -> None:
        super().__init__()
        self.laterals = nn.ModuleList(nn.Conv2d(each, width, 1) for each in widths)
        self.outputs = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1) for _ in widths)

    def forward(self, levels: Sequence[Tensor]) -> list[Tensor]:
        sides = [lateral(level) for lateral, level in zip(self.laterals, levels, strict=True)]
        for n in range(len(sides) - 1, 0, -1):
            sides[n - 1] = sides[n - 1] + F.interpolate(sides[n], size=sides[n - 1].shape[-2:])
        return [output(side) for output, side in zip(self.outputs, sides, strict=True)]


class FCOS(nn.Module):
    """A detector without anchors (Tian et al. 2019): one head for all levels, with a learned scale for each."""

    def __init__(self, width: int = 16, classes: int = 5, levels: int = 3, depth: int = 2) -> None:
        super().__init__()
        self.stem = conv(3, width, 2)
        self.body = nn.ModuleList(
            nn.Sequential(conv(width << n, width << (n + 1), 2), *(Bottleneck(width << (n + 1)) for _ in range(depth)))
            for n in range(levels)
        )
        self.fpn = FeaturePyramid([width << (n + 1) for n in range(levels)], width)
        self.tower = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.GroupNorm(4, width), nn.ReLU())
        self.cls = nn.Conv2d(width, classes, 3, 1, 1)
        self.box = nn.Conv2d(width, 4, 3, 1, 1)
        self.centre = nn.Conv2d(width, 1, 3, 1, 1)
        self.scales = nn.ParameterList(nn.Parameter(torch.full((1,), 1.0 + 0.1 * n)) for n in range(levels))

    def forward(self, x: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        x = self.stem(x)
        features = []
        for stage in self.body:
            x = stage(x)
            features.append(x)
        scores, boxes, centres = [], [], []
        for level, scale in zip(self.fpn(features), self.scales, strict=True):
            y = self.tower(level)
            scores.append(self.cls(y))
            boxes.append(F.relu(self.box(y) * scale))
            centres.append(self.centre(y))
        return scores, boxes, centres


class ScaledHeads(nn.Module):
    """A single-shot detector (SSD): a head after every block, scaled in the model's forward."""

    def __init__(self, width: int = 12, levels: int = 4) -> None:
        super().__init__()
        self.stem = conv(3, width, 2)
        self.blocks = nn.ModuleList(nn.Sequential(conv(width, width, 1), Bottleneck(width)) for _ in range(levels))
        self.boxes = nn.ModuleList(nn.Conv2d(width, 4, 3, 1, 1) for _ in range(levels))
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(0.5 + 0.3 * n)) for n in range(levels))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        outputs = []
        for block, box, scale in zip(self.blocks, self.boxes, self.scales, strict=True):
            x = block(x)
            outputs.append(F.relu(box(x) * scale).flatten(2))
        return outputs


class AuxiliaryHeads(nn.Module):
    """Auxiliary classifiers with a learned temperature, as in GoogLeNet."""

    def __init__(self, width: int = 16, depth: int = 6, classes: int = 7) -> None:
        super().__init__()
        self.stem = conv(3, width, 2)
        self.blocks = nn.ModuleList(Bottleneck(width) for _ in range(depth))
        self.heads = nn.ModuleDict({str(n): nn.Linear(width, classes) for n in range(1, depth - 1, 2)})
        self.head = nn.Linear(width, classes)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        logits: dict[str, Tensor] = {}
        for n, block in enumerate(self.blocks):
            x = block(x)
            if str(n) in self.heads:
                logits[f"head_{n}"] = self.heads[str(n)](x.mean((2, 3))) * self.temperature
        return {**logits, "head": self.head(x.mean((2, 3)))}


class DETR(nn.Module):
    """Boxes by a transformer from learned queries, with the same heads after every decoder layer."""

    def __init__(self, width: int = 32, depth: int = 3, queries: int = 6, classes: int = 5) -> None:
        super().__init__()
        self.backbone = nn.Sequential(conv(3, width // 2, 2), conv(width // 2, width, 2), conv(width, width, 2))
        self.row, self.column = (nn.Parameter(torch.rand(50, width // 2)) for _ in range(2))
        layer = {"d_model": width, "nhead": 4, "dim_feedforward": 2 * width, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(depth))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(**layer) for _ in range(depth))
        self.query = nn.Parameter(torch.rand(queries, width))
        self.linear_class, self.linear_box = nn.Linear(width, classes), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        features = self.backbone(x)
        b, _, h, w = features.shape
        where = torch.cat(
            [self.column[:w].unsqueeze(0).repeat(h, 1, 1), self.row[:h].unsqueeze(1).repeat(1, w, 1)], -1
        ).flatten(0, 1)
        memory = features.flatten(2).transpose(1, 2) + where
        for layer in self.encoder:
            memory = layer(memory)
        boxes = self.query.unsqueeze(0).repeat(b, 1, 1)
        outputs = []
        for layer in self.decoder:
            boxes = layer(boxes, memory)
            outputs.append({"logits": self.linear_class(boxes), "boxes": self.linear_box(boxes).sigmoid()})
        return outputs


class FPNSegmentation(nn.Module):
    """Sums all levels of a pyramid at one size."""

    def __init__(self, width: int = 12, classes: int = 4) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(conv(a, b, 2) for a, b in zip([3, *widths], widths, strict=False))
        self.fpn = FeaturePyramid(widths, width)
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        size, levels = x.shape[-2:], []
        for down in self.down:
            x = down(x)
            levels.append(x)
        up = [F.interpolate(level, size=size, mode="bilinear", align_corners=False) for level in self.fpn(levels)]
        return self.head(torch.stack(up).sum(0))


class UNet(nn.Module):
    """Skips from every level to its mirror."""

    def __init__(self, width: int = 8, depth: int = 3, classes: int = 2) -> None:
        super().__init__()
        widths = [width << n for n in range(depth + 1)]
        self.first = conv(3, width)
        self.downs = nn.ModuleList(conv(a, b, 2) for a, b in pairwise(widths))
        self.middle = Bottleneck(widths[-1])
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.merges = nn.ModuleList(conv(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = [x]
        for down in self.downs:
            x = down(x)
            skips.append(x)
        x = self.middle(skips.pop())
        for up, merge in zip(reversed(self.ups), reversed(self.merges), strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.last(x)


class DropPath(nn.Module):
    """Stochastic depth: drops the branch of some samples."""

    def __init__(self, branch: nn.Module, rate: float) -> None:
        super().__init__()
        self.branch, self.rate = branch, rate

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x + self.branch(x)
        kept = (torch.rand(x.shape[0], 1, 1, 1) >= self.rate).to(x.dtype)
        return x + self.branch(x) * kept / (1 - self.rate)


class SkippedByChance(nn.Module):
    """Stochastic depth that skips whole blocks at random."""

    def __init__(self, width: int = 12, depth: int = 4) -> None:
        super().__init__()
        self.stem = conv(3, width, 2)
        self.blocks = nn.ModuleList(Bottleneck(width) for _ in range(depth))
        self.head = nn.Linear(width, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if not self.training or torch.rand(1) > 0.5:
                x = block(x)
        return self.head(x.mean((2, 3)))


class Grid(nn.Module):
    """Patches; stores the numbers of rows and columns."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, 4, 4)
        self.hw = (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        self.hw = (x.shape[2], x.shape[3])
        return x.flatten(2).transpose(1, 2)


class SideAttribute(nn.Module):
    """A transformer whose last layer reads an attribute of the first."""

    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.grid = Grid(width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 48, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.decode = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grid(x)
        for block in self.blocks:
            x = block(x)
        h, w = self.grid.hw
        return self.decode(x.transpose(1, 2).reshape(x.shape[0], -1, h, w))


class Stylized(nn.Module):
    """Style transfer with instance norms that keep running statistics."""

    def __init__(self, width: int = 12, depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, 1, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, 1, 1),
                nn.InstanceNorm2d(width, affine=True, track_running_stats=True),
                nn.ReLU(),
            )
            for _ in range(depth)
        )
        self.leave = nn.Conv2d(width, 3, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.leave(x))


class Siamese(nn.Module):
    """One encoder for two pictures, and their distance."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.encoder = nn.Sequential(conv(3, width, 2), Bottleneck(width), conv(width, width, 2), Bottleneck(width))
        self.project = nn.Linear(width, width)
        self.compare = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        codes = [self.project(self.encoder(each).mean((2, 3))) for each in (one, two)]
        return self.compare((codes[0] - codes[1]).abs())


def frozen_backbone(width: int = 16, depth: int = 4) -> nn.Module:
    """Return a network whose first residual blocks are frozen and in evaluation mode."""
    model = nn.Sequential(conv(3, width, 2), *(Bottleneck(width) for _ in range(depth)))
    model.eval().requires_grad_(False)
    head = nn.Sequential(Bottleneck(width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 7))
    return Backboned(model, head)


class Backboned(nn.Module):
    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


def weight_normed(norm: Callable[[nn.Module], Any], width: int = 12, depth: int = 4) -> nn.Module:
    """Return dilated convolutions with weight norm."""
    layers = [nn.Conv2d(3, width, 3, 2, 1), *(nn.Conv2d(width, width, 3, 1, 1) for _ in range(depth))]
    head = nn.Conv2d(width, 3, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's older function, which much code still calls
        for layer in (*layers, head):
            norm(layer)
    return Backboned(nn.Sequential(*(nn.Sequential(layer, nn.ELU()) for layer in layers)), head)


def stochastic_depth(width: int = 12, depth: int = 5) -> nn.Module:
    """Return a residual network whose branches are dropped at a rising rate."""
    blocks = [DropPath(nn.Sequential(conv(width, width), nn.Conv2d(width, width, 1)), 0.1 * n) for n in range(depth)]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 7))
    return Backboned(nn.Sequential(conv(3, width, 2), *blocks), head)


def _pairs(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 16, 16), torch.randn(batch, 3, 16, 16)


def _picture(build: Callable[[], nn.Module], *, family: str = "vision", size: int = 32, **more: Any) -> RealModel:
    return RealModel(family=family, build=build, inputs=images(size), **more)


VISION_MODELS: dict[str, RealModel] = {
    "FCOS": _picture(FCOS, family="detection", size=64),
    "SSD with scales": _picture(ScaledHeads, family="detection"),
    "DETR by hand": _picture(DETR, family="detection", size=64),
    "FPN segmentation": _picture(FPNSegmentation, family="segmentation"),
    "U-Net, long skips": _picture(UNet, family="segmentation"),
    "Auxiliary heads, temperature": _picture(AuxiliaryHeads),
    "Stochastic depth": _picture(stochastic_depth),
    "Blocks skipped by chance": _picture(SkippedByChance, refusal="took another path"),
    "Side attribute": _picture(SideAttribute),
    "InstanceNorm, running statistics": _picture(Stylized),
    "Frozen backbone": _picture(frozen_backbone),
    "weight_norm": _picture(lambda: weight_normed(nn.utils.weight_norm)),
    "weight_norm, parametrized": _picture(lambda: weight_normed(nn.utils.parametrizations.weight_norm)),
    "Siamese": RealModel(family="several inputs", build=Siamese, inputs=_pairs),
}
