"""Random numbers that code between modules draws are sent to later stages, which would draw other ones."""

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import Tensor, nn

from planner.executor.equivalence.check import check_equivalence
from tests.support.measure import loaded_model

WIDTH = 8


def block() -> nn.Module:
    """Return a layer with parameters."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Denoiser(nn.Module):
    """Layers that get the time step of each sample as well."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.blocks = nn.Embedding(10, WIDTH), nn.ModuleList(block() for _ in range(3))

    def forward(self, value: Tensor, time: Tensor) -> Tensor:
        place = self.times(time)
        for layer in self.blocks:
            value = F.dropout(value + layer(value + place), 0.1, self.training)
        return value


class Diffusion(nn.Module):
    """Loss of a denoiser, as in many repositories: time steps and noise are drawn first, and read again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Denoiser()
        self.register_buffer("signal", torch.linspace(1, 0.1, 10))

    def forward(self, value: Tensor) -> Tensor:
        time = torch.randint(0, 10, (value.shape[0],))
        noise = torch.randn_like(value)
        signal = self.signal[time][:, None]
        found = self.model(signal * value + (1 - signal) * noise, time)
        return (signal * (found - noise).square()).mean(1)


class Wrapped(nn.Module):
    """Module around a model that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Diffusion()

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value)


class Variational(nn.Module):
    """Model that draws by `torch.empty(…).normal_()`, as `torch.distributions` does, and by a statement."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.spread, self.last = block(), block(), block(), block()

    def forward(self, value: Tensor) -> Tensor:
        shift = torch.zeros_like(value)
        shift.uniform_(-0.1, 0.1)
        value = self.first(value)
        mean, spread = self.mean(value), F.softplus(self.spread(value))
        result: Tensor = self.last(torch.distributions.Normal(mean, spread).rsample()) + shift
        return result


def test_draws_into_new_tensors_are_sent() -> None:
    """The cuts after `first`, `mean` and `spread` were refused, because each stage would have drawn its own numbers."""
    proof = check_equivalence(loaded_model(Variational, WIDTH), budget_s=60.0).proof
    assert (proof.cuts, proof.uncovered, proof.differs_recomputed) == (3, 0, "")


def test_a_diffusion_model_is_cut_between_its_blocks() -> None:
    loaded = loaded_model(Wrapped, WIDTH)
    proof = check_equivalence(loaded, budget_s=30.0).proof
    assert (proof.cuts, proof.uncovered, proof.differs_recomputed) == (2, 0, "")
