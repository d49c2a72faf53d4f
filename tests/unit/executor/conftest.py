"""Fixtures of processes without torchrun."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from planner.executor.measure.recorder import RunRecorder


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove variables of torchrun before, and a recording or process group after the test."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    recorders: list[RunRecorder] = []

    def remembered(device: torch.device) -> RunRecorder:
        recorders.append(RunRecorder(device))
        return recorders[-1]

    monkeypatch.setattr("planner.executor.pipeline.RunRecorder", remembered)
    yield
    for recorder in recorders:
        recorder.close()
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Make a process group of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()
