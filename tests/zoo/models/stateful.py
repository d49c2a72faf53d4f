"""Layers that read and change their own state in every forward, in several ways."""

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

__all__ = ["build_model", "example_batch", "loss_fn"]

WIDTH = 8


class Codebook(nn.Module):
    """A codebook that follows the quantized values, as in vector-quantized autoencoders."""

    def __init__(self, width: int, codes: int) -> None:
        super().__init__()
        self.codes: Tensor
        self.sizes: Tensor
        self.register_buffer("codes", torch.randn(codes, width))
        self.register_buffer("sizes", torch.ones(codes))
        self.linear = nn.Linear(width, width)

    def forward(self, value: Tensor) -> Tensor:
        value = self.linear(value)
        distances = torch.cdist(value.detach(), self.codes)
        chosen = distances.argmin(1)
        nearest = nn.functional.embedding(chosen, self.codes)
        hits = nn.functional.one_hot(chosen, len(self.codes)).to(value)
        with torch.no_grad():
            # By way of `data`, so that no version tells of it.
            self.sizes.data.mul_(0.9).add_(hits.sum(0), alpha=0.1)
            self.codes.data.lerp_(hits.t() @ value / self.sizes[:, None], 0.1)
        return value + (nearest - value).detach() + 0.1 * value * nearest


class Follows(nn.Module):
    """An assigned mean, a count, a queue that is written sometimes, and a slow copy of the weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean: Tensor
        self.queue: Tensor
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("queue", torch.ones(4, width))
        self.fast = nn.Linear(width, width)
        self.slow = nn.Linear(width, width).requires_grad_(False)
        self.steps = 0
        self.plain = torch.zeros(())

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.fast(value) + self.plain - self.mean + self.queue.mean(0) + 0.01 * self.steps
        result = result + 0.5 * self.slow(value.detach())
        self.slow.weight.data = 0.9 * self.slow.weight.data + 0.1 * self.fast.weight.data
        self.mean = 0.9 * self.mean + 0.1 * result.detach().mean(0)
        self.steps += 1
        if self.steps % 2 == 0:
            self.queue[self.steps % 4] = result.detach().mean(0)
        self.plain += 0.1
        return result


class Normed(nn.Module):
    """Running statistics of single samples."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(width // 4, affine=True, track_running_stats=True)
        self.linear = nn.Linear(width, width)

    def forward(self, value: Tensor) -> Tensor:
        normed: Tensor = self.linear(self.norm(value.unflatten(1, (-1, 4))).flatten(1))
        return torch.tanh(normed)


class Blocks(nn.Module):
    """The same blocks in a module with its own forward, which counts as well."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return value


def build_model(*, sequential: bool = True) -> nn.Module:
    """Return six layers, the first and the last without state."""
    blocks = [
        nn.Linear(WIDTH, WIDTH),
        Follows(WIDTH),
        spectral_norm(nn.Linear(WIDTH, WIDTH)),
        Normed(WIDTH),
        Codebook(WIDTH, 16),
        nn.Linear(WIDTH, WIDTH),
    ]
    return nn.Sequential(*blocks) if sequential else Blocks(blocks)


def example_batch(batch_size: int) -> tuple[Tensor, Tensor]:
    drift = torch.linspace(0, 2, batch_size)[:, None]
    return torch.randn(batch_size, WIDTH) + drift, torch.randn(batch_size, WIDTH)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)
