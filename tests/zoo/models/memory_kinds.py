"""Small models of kinds whose memory was once predicted wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.prune import identity

WORDS, TOKENS, WIDTH = 1000, 16, 128


class Recurrent(nn.Module):
    """LSTM and GRU layers with most of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        kinds = (nn.LSTM, nn.GRU) * 2
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH, batch_first=True) for kind in kinds)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        value = self.words(words)
        for layer in self.layers:
            value, _ = layer(value)
        return self.head(value)


class _Adapter(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        return torch.tanh(self.frozen(value) + self.up(self.down(value)))


class Adapted(nn.Module):
    """A frozen language model with small trained matrices."""

    def __init__(self, rank: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(_Adapter(rank) for _ in range(6))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        value = self.words(words)
        for block in self.blocks:
            value = block(value)
        return self.head(value)


class Dense(nn.Module):
    """Many batch norms of many channels, as in a DenseNet."""

    def __init__(self, growth: int = 32, layers: int = 24) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        channels = [64 + growth * n for n in range(layers + 1)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in channels)
        self.convolutions = nn.ModuleList(nn.Conv2d(c, growth, 1) for c in channels[:-1])
        self.head = nn.Linear(channels[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        value = self.first(images)
        for norm, convolution in zip(self.norms, self.convolutions, strict=False):
            value = torch.cat([value, convolution(functional.relu(norm(value)))], 1)
        return self.head(self.norms[-1](value).mean((2, 3)))


class Table(nn.Module):
    """An embedding table with most of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20 * WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        value = self.words(words)
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return value.mean(1)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.narrow(functional.gelu(self.wide(self.norm(value))))


class Towers(nn.Module):
    """One encoder for two inputs, and blocks that are called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(_Block() for _ in range(3))
        self.head = nn.Linear(2 * WIDTH, 10)

    def forward(self, words: Tensor) -> Tensor:
        towers = []
        for part in words.chunk(2, 1):
            value = self.words(part)
            for block in self.encoder:
                value = block(value)
            towers.append(value.mean(1))
        return self.head(torch.cat(towers, 1))


class Residual(nn.Module):
    """`x = x + block(x)` in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, words: Tensor) -> Tensor:
        value = self.words(words)
        for block in self.blocks:
            value = value + block(value)
        return self.head(value.mean(1))


class _Experts(nn.Module):
    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(_Block() for _ in range(experts))

    def forward(self, value: Tensor) -> Tensor:
        flat = value.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        result = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            place, rank = (chosen == n).nonzero(as_tuple=True)
            result = result.index_add(0, place, expert(flat[place]) * weights[place, rank, None])
        return value + result.view_as(value)


class Mixture(nn.Module):
    """Routes tokens to experts by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(_Experts() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        value = self.words(words)
        for layer in self.layers:
            value = layer(value)
        return self.head(value)


class Repeated(nn.Module):
    """One block that is called six times."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 512)

    def forward(self, words: Tensor) -> Tensor:
        value = self.words(words)
        for _ in range(6):
            value = self.block(value)
        return self.head(value)


class Pruned(nn.Module):
    """Layers that compute their weight before each forward, and keep it until the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(identity(nn.Linear(WIDTH, WIDTH), "weight") for _ in range(6))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, words: Tensor) -> Tensor:
        value = self.words(words)
        for layer in self.layers:
            value = value + torch.tanh(layer(value))
        return self.head(value)


class _Cell(nn.Module):
    """Keeps its hidden state as a buffer, a tensor or a tuple."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind
        if kind == "buffer":
            self.register_buffer("hidden", torch.zeros(1, 1, WIDTH))
        else:
            self.hidden: Any = None

    def forward(self, value: Tensor) -> Tensor:
        value = self.linear(value)
        new = value.detach().clone()
        old = self.hidden
        self.hidden = (new, 2 * new) if self.kind == "tuple" else new
        if isinstance(old, tuple):
            old = old[1] - old[0]
        return torch.tanh(value if old is None else value + old)


class Carried(nn.Module):
    """Cells with state, between blocks."""

    def __init__(self) -> None:
        super().__init__()
        kinds = ("buffer", "tensor", "tuple", "tuple", "tensor", "buffer")
        self.words = nn.Embedding(WORDS, WIDTH)
        self.cells = nn.ModuleList(map(_Cell, kinds))

    def forward(self, words: Tensor) -> Tensor:
        value = self.words(words)
        for cell in self.cells:
            value = cell(value)
        return value


def carried_in_a_row() -> nn.Sequential:
    """Return the layers of `Carried` in a Sequential."""
    model = Carried()
    return nn.Sequential(model.words, *model.cells)


class Compared(nn.Module):
    """An autoencoder whose last layer compares its input and output."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        code = value
        for layer in self.encoder:
            code = torch.relu(layer(code))
        for layer in self.decoder:
            code = layer(torch.relu(code))
        return functional.mse_loss(code, value)


def pruned_in_a_row() -> nn.Sequential:
    """Return the layers of `Pruned` in a Sequential."""
    model = Pruned()
    return nn.Sequential(model.words, *model.layers, model.head)


class _WithUnusedHead(_Block):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, 4 * WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        self.unused(value)
        return value + super().forward(value)


class Unused(nn.Module):
    """Blocks that compute an unused head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(_WithUnusedHead() for _ in range(4))

    def forward(self, words: Tensor) -> Tensor:
        value: Tensor = self.words(words)
        for block in self.blocks:
            value = block(value)
        return value


class SharedTable(nn.Module):
    """An embedding, used once or twice, and a linear layer with the same matrix; half of the layers follow later."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.uses = uses
        self.words = nn.Embedding(WORDS, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.linear = nn.Linear(WIDTH, WORDS, bias=False)
        self.linear.weight = self.words.weight
        self.narrow = nn.Linear(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(uses + 2))

    def forward(self, words: Tensor) -> Tensor:
        value = self.words(words)
        value = torch.tanh(self.block(value))
        if self.uses == 2:
            value = value + self.words(words)
        value = self.narrow(self.linear(value))
        for block in self.blocks:
            value = torch.tanh(block(value))
        return value


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = torch.tanh(layer(value))
        return value


KINDS: dict[str, Callable[[], nn.Module]] = {
    "recurrent": Recurrent,
    "adapted": Adapted,
    "dense": Dense,
    "table": Table,
    "towers": Towers,
    "residual": Residual,
    "mixture": Mixture,
    "tiny": Tiny,
    "shared table": partial(SharedTable, 1),
    "shared table, two lookups": partial(SharedTable, 2),
    "repeated": Repeated,
    "compared": Compared,
    "unused": Unused,
    "carried": Carried,
    "carried in a row": carried_in_a_row,
    "pruned": Pruned,
    "pruned in a row": pruned_in_a_row,
}


def build_model(kind: str = "recurrent") -> nn.Module:
    return KINDS[kind]()


def example_batch(batch_size: int, kind: str = "recurrent") -> tuple[Tensor, Tensor]:
    inputs = {
        "dense": lambda: torch.randn(batch_size, 3, 4, 4),
        "table": lambda: torch.randint(20 * WORDS, (batch_size, TOKENS)),
        "tiny": lambda: torch.randn(batch_size, 8),
        "compared": lambda: torch.randn(batch_size, 4 * TOKENS, WIDTH),
    }
    words: Callable[[], Tensor] = lambda: torch.randint(WORDS, (batch_size, TOKENS))  # noqa: E731
    return inputs.get(kind, words)(), torch.zeros(batch_size)


def loss_fn(output: Tensor, _target: Any) -> Tensor:
    return output.square().mean()


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD without state."""
    return torch.optim.SGD(parameters, lr=0.01)
