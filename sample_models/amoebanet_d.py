"""AmoebaNet-D(L, D), the image model of the GPipe paper (Huang et al. 2019, table 1), small by default.

The architecture was found by evolution (Real et al. 2019, "Regularized Evolution for Image Classifier Architecture
Search"). The chain has L + 6 layers, L divisible by 3:

    stem, 2 reduction cells, L/3 cells, reduction cell, L/3 cells, reduction cell, L/3 cells, classifier

Channels start at D/4 and double in each reduction cell. Each cell reads the outputs of the two cells before it, so a
pair (output, skip) crosses every boundary between cells: `skip` is the output of the cell before.

Real et al.'s figure joins states 4, 5, 6 in a normal cell. The settings published later (tensorflow/tpu) join 0, 3, 4,
6, and these give the parameters the GPipe paper counts for 1000 classes: (18, 208) 81,505,540 up to (72, 512)
1,844,858,344.

Shapes: b samples, c channels, h height, w width.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Five steps, each the sum of two (state read, operation). State 0 is the cell's input, state 1 its skip, both brought
# to the cell's channels first; step i makes state i + 2. JOINED states, concatenated, are the output.
NORMAL_STEPS = (
    ((1, "conv_1x1"), (1, "max_3x3")),
    ((1, "none"), (0, "conv_1x7_7x1")),
    ((0, "conv_1x1"), (0, "conv_1x7_7x1")),
    ((2, "max_3x3"), (2, "none")),
    ((1, "avg_3x3"), (5, "conv_1x1")),
)
NORMAL_JOINED = (0, 3, 4, 6)
REDUCTION_STEPS = (
    ((0, "max_2x2"), (0, "max_3x3")),
    ((2, "none"), (1, "conv_3x3")),
    ((2, "conv_1x7_7x1"), (2, "max_3x3")),
    ((3, "none"), (1, "max_2x2")),
    ((2, "avg_3x3"), (3, "conv_1x1")),
)
REDUCTION_JOINED = (4, 5, 6)

# A stem layer's output, or (output, skip) from any cell but the last.
States = Tensor | tuple[Tensor, Tensor]


def convolution(
    channels_in: int, channels_out: int, kernel: tuple[int, int] = (1, 1), stride: tuple[int, int] = (1, 1)
) -> nn.Sequential:
    """ReLU, convolution, batch norm; the ReLU is never in place, as other operations read the same state."""
    padding = (kernel[0] // 2, kernel[1] // 2)
    layer = nn.Conv2d(channels_in, channels_out, kernel, stride, padding, bias=False)
    return nn.Sequential(nn.ReLU(), layer, nn.BatchNorm2d(channels_out))


def bottleneck(channels: int, *middle: tuple[tuple[int, int], tuple[int, int]]) -> nn.Sequential:
    """Convolutions of the given (kernel, stride) on a quarter of the channels, between two of 1x1."""
    inner = channels // 4
    layers = [convolution(inner, inner, kernel, stride) for kernel, stride in middle]
    return nn.Sequential(convolution(channels, inner), *layers, convolution(inner, channels))


# Operation name -> factory of (channels, stride). "none" and 1x1 are never strided in these two cells. Pools round up,
# so that an odd size shrinks alike in all operations.
OPERATIONS: dict[str, Callable[[int, int], nn.Module]] = {
    "none": lambda _channels, _stride: nn.Identity(),
    "avg_3x3": lambda _channels, stride: nn.AvgPool2d(3, stride, padding=1, count_include_pad=False),
    "max_2x2": lambda _channels, stride: nn.MaxPool2d(2, stride, ceil_mode=True),
    "max_3x3": lambda _channels, stride: nn.MaxPool2d(3, stride, padding=1),
    "conv_1x1": lambda channels, _stride: convolution(channels, channels),
    "conv_3x3": lambda channels, stride: bottleneck(channels, ((3, 3), (stride, stride))),
    "conv_1x7_7x1": lambda channels, stride: bottleneck(channels, ((1, 7), (1, stride)), ((7, 1), (stride, 1))),
}


class FactorizedReduction(nn.Module):
    """Halve height and width without dropping pixels: (b, c, h, w) -> (b, c', h/2, w/2).

    Half of the new channels come from the pixels at even positions, half from those one down and one right of them.
    """

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(channels_in, channels_out // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(channels_in, channels_out // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(channels_out)

    def forward(self, features: Tensor) -> Tensor:
        features = F.relu(features)
        shifted = F.pad(features, (-1, 1, -1, 1))
        reduced: Tensor = self.norm(torch.cat((self.even(features), self.odd(shifted)), dim=1))
        return reduced


class Stem(nn.Module):
    """3x3 convolution of stride 2 with batch norm: images (b, 3, h, w) -> (b, c, h/2, w/2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.norm(self.convolution(images))
        return features


class Cell(nn.Module):
    """One normal or reduction cell: (output, skip) -> (output, skip).

    The first cell gets the stem's tensor, which is both its input and its skip. The last one returns its output alone:
    nothing reads its skip, which would cross a stage boundary for nothing and come back without a gradient.
    """

    def __init__(
        self, channels_in: int, channels_skip: int, channels: int, *, reduces: bool, skip_reduces: bool, is_last: bool
    ) -> None:
        super().__init__()
        self.is_last = is_last
        self.steps = REDUCTION_STEPS if reduces else NORMAL_STEPS
        self.joined = REDUCTION_JOINED if reduces else NORMAL_JOINED
        self.channels_out = channels * len(self.joined)
        self.fit_input = convolution(channels_in, channels)
        self.fit_skip = self._skip_fit(channels_skip, channels, reduces=skip_reduces)
        # Only the cell's own inputs are still at the old size: a reduction cell strides where it reads one of them.
        self.operations = nn.ModuleList(
            OPERATIONS[name](channels, 2 if reduces and state < 2 else 1) for step in self.steps for state, name in step
        )

    @staticmethod
    def _skip_fit(channels_in: int, channels: int, *, reduces: bool) -> nn.Module:
        if reduces:
            return FactorizedReduction(channels_in, channels)
        return nn.Identity() if channels_in == channels else convolution(channels_in, channels)

    def forward(self, incoming: States) -> States:
        features, skip = (incoming, incoming) if isinstance(incoming, Tensor) else incoming
        states = [self.fit_input(features), self.fit_skip(skip)]
        for index, ((left, _), (right, _)) in enumerate(self.steps):
            states.append(self.operations[2 * index](states[left]) + self.operations[2 * index + 1](states[right]))
        output = torch.cat([states[index] for index in self.joined], dim=1)
        return output if self.is_last else (output, features)


class Classifier(nn.Module):
    """ReLU, mean over the pixels, linear layer: (b, c, h, w) -> logits (b, classes)."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, num_classes)

    def forward(self, features: Tensor) -> Tensor:
        logits: Tensor = self.linear(F.relu(features).mean(dim=(2, 3)))
        return logits


def cell_names(num_layers: int) -> list[str]:
    """Return the cells in order; a name that starts with `reduction` is a reduction cell."""
    third = num_layers // 3
    names = ["reduction_stem_1", "reduction_stem_2"]
    for group in range(3):
        names += [f"reduction_{group}"] if group else []
        names += [f"cell_{index}" for index in range(group * third, (group + 1) * third)]
    return names


def build_model(
    *, num_layers: int = 6, num_filters: int = 32, num_classes: int = 10, image_size: int = 64
) -> nn.Sequential:
    """Build AmoebaNet-D(L, D) as a chain of L + 6 layers.

    Args:
        num_layers: L, the number of normal cells; divisible by 3.
        num_filters: D, the channels of the first normal cells' operations; divisible by 8.
        num_classes: Classes to tell apart.
        image_size: Height and width of the images; at least 33, as 1/32 of it remains at the end and batch norm
            needs more than one pixel when a micro-batch is a single sample.

    Raises:
        ValueError: If a setting is not as described.

    """
    if num_layers < 3 or num_layers % 3 or num_filters < 8 or num_filters % 8:
        message = f"num_layers {num_layers} must be a positive multiple of 3, num_filters {num_filters} one of 8"
        raise ValueError(message)
    if image_size < 33:
        message = f"image_size {image_size} is too small, the smallest is 33"
        raise ValueError(message)
    channels = channels_in = channels_skip = num_filters // 4
    chain: OrderedDict[str, nn.Module] = OrderedDict(stem=Stem(channels))
    names = cell_names(num_layers)
    skip_reduces = False
    for name in names:
        reduces = name.startswith("reduction")
        channels *= 2 if reduces else 1
        cell = Cell(
            channels_in, channels_skip, channels, reduces=reduces, skip_reduces=skip_reduces, is_last=name == names[-1]
        )
        chain[name] = cell
        channels_skip, channels_in, skip_reduces = channels_in, cell.channels_out, reduces
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
    """RMSProp with decay 0.9 and epsilon 0.1 (Real et al.); one number of state per parameter."""
    return torch.optim.RMSprop(parameters, lr=0.003, alpha=0.9, eps=0.1)
