"""Split backward beside the whole one: what the parts take, and what is held in between.

    python benchmarks/split.py > docs/measurements/split.md

Stages run by themselves, in one process: forward F, whole backward B, the input's backward I, the weights' backward W,
with the executor's own split and with that of `torch.distributed.pipelining`. All are measured in turn, in process time
of one thread, and of each the smallest of all rounds is taken. What is held is counted by the allocator: after F, and
between I and W, when the stage's output and its input's gradient are gone; parameters and their gradients do not count.
The peak is that of I or W, whichever is higher. With recomputation a stage is one checkpoint: the re-entrant one for
whole backwards and the executor's parts, as the executor runs it; the other kind for torch's, which cannot split the
first, in few rounds, because it takes many times as long.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from planner.device.machine import cpu_name, keep_freed_memory
from planner.device.meter import CpuMemoryMeter
from planner.model.split_backward import DeferredUses, SplitBackward
from sample_models.resnet import Bottleneck

ROUNDS, FEW_ROUNDS = 10, 2
MEBIBYTE = 2**20


class Blocks(nn.Module):
    """Blocks of GPT-2."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        config = GPT2Config(n_embd=width, n_head=width // 64, resid_pdrop=0.0, attn_pdrop=0.0)
        config._attn_implementation = "eager"
        self.blocks = nn.ModuleList(GPT2Block(config, layer_idx=n) for n in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            result = block(x)
            x = result[0] if isinstance(result, tuple) else result
        return x


def transformer() -> nn.Module:
    """Return layers of torch."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def perceptron() -> nn.Module:
    """Return layers with a ReLU after each."""
    return nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(1024, 1024), nn.ReLU())))


STAGES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "4 transformer blocks, d = 512": (transformer, (4, 128, 512)),
    "GPT-2, 4 blocks, d = 768": (lambda: Blocks(4, 768), (2, 128, 768)),
    "ResNet, 4 bottlenecks with BatchNorm": (
        lambda: nn.Sequential(*(Bottleneck(256, 64, 1) for _ in range(4))),
        (8, 256, 28, 28),
    ),
    "MLP, 6 layers of 1024": (perceptron, (256, 1024)),
}


class Times(NamedTuple):
    """Times in seconds."""

    forward: float
    first: float
    """B, or I."""
    second: float = 0.0
    """W."""

    @property
    def backward(self) -> float:
        """Time of the whole backward."""
        return self.first + self.second


class Bytes(NamedTuple):
    """Bytes of activations and their gradients."""

    after_forward: int
    after_first: int
    peak: int


@dataclass(kw_only=True)
class Stage:
    """One stage with whole backwards."""

    module: nn.Module
    shape: tuple[int, ...]
    recomputes: bool

    rounds: int = ROUNDS
    x: Tensor | None = None
    output: Tensor | None = None

    def release(self) -> None:
        """Release input and output; the input's gradient has been sent."""
        self.x = self.output = None

    def forward(self) -> None:
        """Run F; keep input and output."""
        torch.manual_seed(0)
        self.x = torch.randn(self.shape).requires_grad_()
        self.output = self.run(self.x)

    def gradient(self) -> Tensor:
        """Return the output's gradient, which the next stage sends."""
        assert self.output is not None
        return torch.full_like(self.output, 0.01)

    def run(self, x: Tensor) -> Any:
        """Return the output, for whole backwards."""
        again = {"use_reentrant": True, "preserve_rng_state": False}
        return checkpoint(self.module, x, **again) if self.recomputes else self.module(x)

    def first(self) -> None:
        """Run B."""
        assert self.output is not None
        torch.autograd.backward([self.output], [self.gradient()])
        self.release()

    def second(self) -> None:
        """Do nothing: B is complete."""

    def timed(self) -> Times:
        """Return the times of one run."""
        marks = [time.process_time()]
        for work in (self.forward, self.first, self.second):
            work()
            marks.append(time.process_time())
        return Times(*(end - begin for begin, end in pairwise(marks)))

    def held(self) -> Bytes:
        """Return the bytes that another run holds."""
        forward, first, second = (CpuMemoryMeter().measure(work) for work in (self.forward, self.first, self.second))
        between = forward.end_bytes + first.end_bytes
        peak = max(forward.end_bytes + first.peak_bytes, between + second.peak_bytes)
        return Bytes(forward.end_bytes, between, peak)


@dataclass(kw_only=True)
class Split(Stage):
    """A stage with the executor's split backward."""

    split: SplitBackward = field(default_factory=SplitBackward)
    put_off: DeferredUses = field(default_factory=list)

    def run(self, x: Tensor) -> Any:
        """Return the output, with the executor's recording of weights."""
        with self.split.splitting():
            return super().run(x)

    def first(self) -> None:
        """Run I."""
        assert self.output is not None
        self.put_off = self.split.backward_input([self.output], [self.gradient()])
        self.release()

    def second(self) -> None:
        """Run W."""
        self.split.backward_weight(self.put_off)


@dataclass(kw_only=True)
class TorchSplit(Stage):
    """A stage with the split backward of `torch.distributed.pipelining`."""

    groups: list[dict[str, Any]] = field(default_factory=list)

    def run(self, x: Tensor) -> Any:
        """Return the output, with a checkpoint that torch can split."""
        return checkpoint(self.module, x, use_reentrant=False) if self.recomputes else self.module(x)

    def first(self) -> None:
        """Run I."""
        assert self.output is not None
        weights = self.module.parameters()
        _, self.groups = stage_backward_input([self.output], [self.gradient()], [self.x], weights)
        self.release()

    def second(self) -> None:
        """Run W."""
        stage_backward_weight(self.module.parameters(), self.groups)
        self.groups = []


class Row(NamedTuple):
    """Times and bytes of one kind of run."""

    times: Times
    held: Bytes


def rows_of(build: Callable[[], nn.Module], shape: tuple[int, ...], *, recomputes: bool) -> list[Row]:
    """Return rows of whole backwards, the executor's split, and torch's."""
    torch.manual_seed(0)
    module, few = build(), FEW_ROUNDS if recomputes else ROUNDS
    stages = [
        Stage(module=module, shape=shape, recomputes=recomputes),
        Split(module=module, shape=shape, recomputes=recomputes),
        TorchSplit(module=module, shape=shape, recomputes=recomputes, rounds=few),
    ]
    times: list[list[Times]] = [[] for _ in stages]
    stages[0].timed()  # gradients are there from then on, and are added to
    for n in range(ROUNDS):
        for stage, of_stage in zip(stages, times, strict=True):
            if n < stage.rounds:
                of_stage.append(stage.timed())
    least = [Times(*map(min, zip(*of_stage, strict=True))) for of_stage in times]
    return [Row(*both) for both in zip(least, (stage.held() for stage in stages), strict=True)]


def lines(name: str, *, recomputes: bool, rows: Sequence[Row]) -> Iterator[str]:
    """Yield one line for each way to split."""
    whole, *others = rows
    for way, row in zip(("ours", "torch's"), others, strict=True):
        cells = (
            name,
            "always" if recomputes else "never",
            way,
            f"{row.times.forward / whole.times.forward:.2f}",
            f"{row.times.first / whole.times.forward:.2f}",
            f"{row.times.second / whole.times.forward:.2f}",
            f"{row.times.backward / whole.times.backward:.2f}",
            *(f"{number / MEBIBYTE:.1f}" for number in row.held),
            f"{whole.held.peak / MEBIBYTE:.1f}",
        )
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    keep_freed_memory()
    print("# Split backward\n")
    print(f"`python benchmarks/split.py` on {cpu_name()}, {os.cpu_count()} cores, ", end="")
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread, process time.")
    print(f"Load average at the start: {os.getloadavg()[0]:.1f}.\n")
    print("F and B are forward and backward times if the backward is not split, F', I and W the times if it is split.")
    print(
        "Memory is in MiB: after the forward, between the input-gradient pass and the weight-gradient pass, and at the"
    )
    print("peak.\n")
    print("| stage | recompute | split | F'/F | I/F | W/F | (I+W)/B | after F | between I and W | peak | peak of B |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    ratios: dict[bool, list[float]] = {False: [], True: []}
    for name, (build, shape) in STAGES.items():
        for recomputes in (False, True):
            rows = rows_of(build, shape, recomputes=recomputes)
            ratios[recomputes].append(rows[1].times.backward / rows[0].times.backward)
            for line in lines(name, recomputes=recomputes, rows=rows):
                print(line, flush=True)
    print(
        "\nTime of our split backward relative to an unsplit one, (I+W)/B: "
        f"{span(ratios[False])}; with recomputation {span(ratios[True])}."
    )


def span(ratios: Sequence[float]) -> str:
    """Return the smallest, largest and median ratio."""
    return f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"


if __name__ == "__main__":
    main()
