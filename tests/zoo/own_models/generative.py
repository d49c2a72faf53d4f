"""Generative models: codebooks, spectral norms, noise and flows."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.real_model import RealModel, images

__all__ = ["GENERATIVE", "VQVAE", "Discriminator"]


class Discriminator(nn.Module):
    """Of a GAN, every weight divided by its spectral norm (Miyato et al. 2018), which one power iteration updates.

    Args:
        norm: torch's older function or its parametrization.
        width: Channels of the first layer.
    """

    def __init__(self, norm: Callable[[nn.Module], nn.Module] = nn.utils.spectral_norm, width: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            norm(nn.Conv2d(inputs, outputs, 4, 2, 1))
            for inputs, outputs in ((3, width), (width, 2 * width), (2 * width, 4 * width), (4 * width, 4 * width))
        )
        self.score = norm(nn.Linear(4 * width, 1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.leaky_relu(layer(x), 0.2)
        return self.score(x.mean((2, 3)))


class Codebook(nn.Module):
    """Nearest codes, which follow their values by exponential moving averages (van den Oord et al. 2017)."""

    def __init__(self, codes: int, width: int, decay: float = 0.9) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("embed", torch.randn(codes, width))
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", self.embed.clone())

    embed: Tensor
    cluster_size: Tensor
    embed_avg: Tensor

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        flat = z.permute(0, 2, 3, 1).flatten(0, 2)
        codes = torch.cdist(flat, self.embed).argmin(1)
        quantized = F.embedding(codes, self.embed).view(z.shape[0], *z.shape[2:], -1).permute(0, 3, 1, 2)
        if self.training:
            with torch.no_grad():
                hits = F.one_hot(codes, len(self.embed)).to(flat.dtype)
                self.cluster_size.mul_(self.decay).add_(hits.sum(0), alpha=1 - self.decay)
                self.embed_avg.mul_(self.decay).add_(hits.t() @ flat, alpha=1 - self.decay)
                self.embed.copy_(self.embed_avg / (self.cluster_size.unsqueeze(1) + 1e-5))
        return z + (quantized - z).detach(), F.mse_loss(z, quantized.detach())


class VQVAE(nn.Module):
    """A vector-quantized autoencoder that returns its loss."""

    def __init__(self, width: int = 12, codes: int = 16) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(
            [nn.Conv2d(3, width, 4, 2, 1), nn.Conv2d(width, width, 4, 2, 1), nn.Conv2d(width, width, 3, 1, 1)]
        )
        self.codebook = Codebook(codes, width)
        self.decoder = nn.ModuleList(
            [
                nn.Conv2d(width, width, 3, 1, 1),
                nn.ConvTranspose2d(width, width, 4, 2, 1),
                nn.ConvTranspose2d(width, 3, 4, 2, 1),
            ]
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = x
        for layer in self.encoder:
            z = F.relu(layer(z))
        z, commitment = self.codebook(z)
        for layer in self.decoder:
            z = layer(F.relu(z))
        return {"picture": z, "loss": F.mse_loss(z, x) + 0.25 * commitment}


class VAE(nn.Module):
    """A variational autoencoder, whose loss adds a divergence."""

    def __init__(self, width: int = 32, latent: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, width), nn.ReLU(), nn.Linear(width, width))
        self.mean, self.log_variance = nn.Linear(width, latent), nn.Linear(width, latent)
        self.sample = Reparameterized()
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, 3 * 16 * 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        code = self.encoder(x)
        mean, log_variance = self.mean(code), self.log_variance(code)
        return self.decoder(self.sample(mean, log_variance)), mean, log_variance


class Reparameterized(nn.Module):
    """A normal sample that is differentiable in both parameters."""

    def forward(self, mean: Tensor, log_variance: Tensor) -> Tensor:
        return mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance) if self.training else mean


class TimedBlock(nn.Module):
    """A block of a diffusion network with the time as input."""

    def __init__(self, inputs: int, outputs: int, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, inputs), nn.Conv2d(inputs, outputs, 3, 1, 1)
        self.time = nn.Linear(width, outputs)
        self.again = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv(F.silu(self.norm(x))) + self.time(F.silu(time))[:, :, None, None]
        return self.skip(x) + self.again(F.silu(y))


class DiffusionUNet(nn.Module):
    """Predicts the noise in a picture, with skips, and the time for every block."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.frequencies = nn.Buffer(torch.exp(torch.linspace(0, -6, width // 2)))
        self.enter = nn.Conv2d(3, width, 3, 1, 1)
        self.down = nn.ModuleList([TimedBlock(width, width, width), TimedBlock(width, 2 * width, width)])
        self.middle = TimedBlock(2 * width, 2 * width, width)
        self.up = nn.ModuleList([TimedBlock(4 * width, width, width), TimedBlock(2 * width, width, width)])
        self.leave = nn.Conv2d(width, 3, 3, 1, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angles = t[:, None] * self.frequencies
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.enter(x)
        skips = []
        for block in self.down:
            x = block(x, time)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.middle(x, time)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = block(torch.cat([x, skips.pop()], 1), time)
        return self.leave(x)


class Coupling(nn.Module):
    """Moves and scales one half of the values by the other half."""

    def __init__(self, width: int, *, swapped: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width // 2, 32), nn.Tanh(), nn.Linear(32, width))
        self.swapped = swapped

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, two = reversed(x.chunk(2, 1)) if self.swapped else x.chunk(2, 1)
        shift, stretch = self.net(one).chunk(2, 1)
        stretch = torch.tanh(stretch)
        halves = [one, two * torch.exp(stretch) + shift]
        return torch.cat(halves[::-1] if self.swapped else halves, 1), stretch.sum(1)


class Flow(nn.Module):
    """RealNVP, which sums the determinants of all layers."""

    def __init__(self, width: int = 8, depth: int = 6) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(width, swapped=bool(n % 2)) for n in range(depth))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        total = x.new_zeros(x.shape[0])
        for coupling in self.couplings:
            x, determinant = coupling(x)
            total = total + determinant
        return {"z": x, "loss": (0.5 * x.square().sum(1) - total).mean()}


class Forgetting(torch.autograd.Function):
    """Layers without a graph in forward, recomputed in backward, as in RevNets and Reformer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.ModuleList) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        with torch.no_grad():
            for layer in layers:
                x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = x
            for layer in ctx.layers:
                y = layer(y)
        y.backward(gradient)
        return x.grad, None


class Denoiser(nn.Module):
    """Layers of which no activation is kept."""

    def __init__(self, width: int = 12, depth: int = 4) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, 1, 1)
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(width, width, 3, 1, 1), nn.Tanh()) for _ in range(depth))
        self.leave = nn.Conv2d(width, 3, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = Forgetting.apply(self.enter(x), self.layers)
        return self.leave(hidden)


def _entry(output: Any, _targets: Any = None) -> Tensor:
    return output["loss"]


def _noisy(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 16, 16), torch.rand(batch) * 1000


def _picture(build: Callable[[], nn.Module], **more: Any) -> RealModel:
    return RealModel(family="generative", build=build, inputs=images(16), **more)


GENERATIVE: dict[str, RealModel] = {
    "Discriminator, spectral_norm": _picture(Discriminator),
    "Discriminator, spectral_norm parametrized": _picture(
        lambda: Discriminator(nn.utils.parametrizations.spectral_norm)
    ),
    "VQ-VAE, EMA codebook": _picture(VQVAE, loss=_entry),
    "VAE": _picture(VAE),
    "Diffusion U-Net": RealModel(family="generative", build=DiffusionUNet, inputs=_noisy),
    "Checkpoint by hand": _picture(Denoiser),
    "RealNVP": RealModel(family="generative", build=Flow, inputs=lambda batch: torch.randn(batch, 8), loss=_entry),
}
