"""A small model in which one layer does harm, once: what, in which forward, and where is said by the environment.

MISCHIEF="kill 7 2 mark" kills the process in the 8th forward of layer 2; afterwards the file `mark` exists, and nothing
is done any more. Other harm: `hang`, `raise`, `memory`, `nan`, `full` (files can grow to 1 kB from now on), `term`
(SIGTERM to the launcher), `lose` (kills the launcher, too, as where a machine is lost), `exit` and `leave` (`sys.exit`
with 3 and with 0).
`loss` and `data` in place of a layer: the loss function, the batches.
"""

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
    """Does it, if it is time."""
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
    """Whether no process was here before: every rank reads the batches, and two may come at one moment."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _stop_launcher() -> None:
    """Goes on when the launcher has passed the signal on, which takes it longer than ten steps on a busy machine."""
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
    """Linear, normalised, with dropout; counts its forwards on values."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.5)
        self.dropout = float(os.environ.get("DROPOUT", "0.1"))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        """As above."""
        if not x.is_meta:
            x = mischief(str(self.number), self.count, x)
            self.count += 1
        return nn.functional.dropout(torch.relu(self.norm(self.linear(x))), self.dropout)

    def extra_repr(self) -> str:
        """Nothing that changes."""
        return ""


def build_model() -> nn.Sequential:
    """Five layers; the last shares its weight with the first."""
    layers = [Layer(number) for number in range(5)]
    layers[4].linear.weight = layers[0].linear.weight
    return nn.Sequential(*layers)


def example_batch(size: int) -> tuple[Tensor, Tensor]:
    """Noise."""
    return torch.randn(size, WIDTH), torch.randn(size, WIDTH)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Squared error."""
    calls["loss"] += not output.is_meta
    return mischief("loss", calls["loss"] - 1, (output - target).square().mean())


def train_batches(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches in a new order each time: an epoch of four."""
    data = torch.arange(4.0 * size * WIDTH).reshape(4 * size, WIDTH).sin()
    for rows in torch.randperm(4 * size).reshape(4, size):
        calls["data"] += 1
        yield mischief("data", calls["data"] - 1, data[rows]), data[rows].flip(1)


def build_optimizer(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """Adam, whose state matters."""
    return torch.optim.Adam(parameters, lr=0.01)
