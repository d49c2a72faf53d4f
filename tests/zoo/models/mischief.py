"""A small model in which one layer fails once; the environment says how, in which forward, and on which rank."""

import os
import resource
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn

WIDTH = 16
calls = {"loss": 0, "data": 0}


def mischief(where: str, count: int, value: Tensor) -> Tensor:
    """Fail if it is time."""
    what, when, place, mark = os.environ.get("MISCHIEF", "no 0 - -").split()
    if (place, int(when)) != (where, count) or not _is_first(Path(mark)):
        return value
    if what == "lose":
        os.kill(os.getppid(), signal.SIGKILL)
    if what in {"kill", "lose"}:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "term":
        _stop_launcher()
    if what == "full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    if what == "hang":
        time.sleep(600)
    if what in {"exit", "leave"}:
        sys.exit(3 if what == "exit" else 0)
    if what == "raise":
        raise ValueError("something is wrong here")
    if what == "memory":
        torch.empty(2**50)
    return value * float("nan") if what == "nan" else value


def _is_first(mark: Path) -> bool:
    """Return True in the first process; every rank reads the batches, maybe at the same time."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _stop_launcher() -> None:
    """Stop the launcher, and return when it has passed the signal on."""
    here: list[int] = []
    handler = signal.getsignal(signal.SIGTERM)

    def note(number: int, frame: FrameType | None) -> None:
        here.append(number)
        if callable(handler):
            handler(number, frame)

    signal.signal(signal.SIGTERM, note)
    os.kill(os.getppid(), signal.SIGTERM)
    while not here:
        time.sleep(0.01)
    signal.signal(signal.SIGTERM, handler)


class Layer(nn.Module):
    """Linear layer with norm and dropout that counts its forwards."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.5)
        self.dropout = float(os.environ.get("DROPOUT", "0.1"))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            x = mischief(str(self.number), self.count, x)
            self.count += 1
        return nn.functional.dropout(torch.relu(self.norm(self.linear(x))), self.dropout)

    def extra_repr(self) -> str:
        """Return a text that does not change."""
        return ""


def build_model() -> nn.Sequential:
    """Return five layers; the last shares its weight with the first."""
    layers = [Layer(number) for number in range(5)]
    layers[4].linear.weight = layers[0].linear.weight
    return nn.Sequential(*layers)


def example_batch(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    calls["loss"] += not output.is_meta
    return mischief("loss", calls["loss"] - 1, (output - target).square().mean())


def train_batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Return an epoch of four batches, in a new order each time."""
    data = torch.arange(4.0 * size * WIDTH).reshape(4 * size, WIDTH).sin()
    for rows in torch.randperm(4 * size).reshape(4, size):
        calls["data"] += 1
        yield mischief("data", calls["data"] - 1, data[rows]), data[rows].flip(1)


def build_optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)
