"""Gradients kept in files: the same training with less memory."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from planner.device.machine import release_freed_memory
from planner.executor.equivalence import subject
from planner.executor.equivalence.check import check_equivalence
from planner.executor.equivalence.isolation import return_freed_blocks_to_system
from planner.model import gradient_files
from planner.model.gradient_files import keep_gradients_in_files
from planner.profile.units import layer_digests
from tests.support.house import ROOT
from tests.support.measure import loaded_model

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, LAYERS = 1100, 6


def _stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _gradients(model: nn.Module) -> list[Tensor]:
    for seed in range(2):
        torch.manual_seed(seed)
        model(torch.randn(2, WIDTH)).square().mean().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_gradients_are_the_same_as_in_memory(tmp_path: Path) -> None:
    model = _stack()
    keep_gradients_in_files(model.parameters(), tmp_path)
    for gradient, expected in zip(_gradients(model), _gradients(_stack()), strict=True):
        assert torch.equal(gradient, expected)
    assert list(tmp_path.iterdir()) == []


def test_hooks_run_before_the_gradient_moves_to_its_file(tmp_path: Path) -> None:
    """They may change the gradient."""

    def halve(parameter: Tensor) -> None:
        parameter.grad.mul_(0.5)

    halved = []
    for in_files in (True, False):
        model = _stack()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(halve)
        if in_files:
            keep_gradients_in_files(model.parameters(), tmp_path)
        halved.append(_gradients(model))
    assert all(torch.equal(one, other) for one, other in zip(*halved, strict=True))


def test_values_written_into_a_file_mapped_parameter_are_kept(tmp_path: Path) -> None:
    """Only unchanged pages are released."""
    size = WIDTH * WIDTH
    (tmp_path / "values").write_bytes(bytes(4 * size))
    parameter = nn.Parameter(torch.from_file(str(tmp_path / "values"), shared=False, size=size))
    with torch.no_grad():
        parameter[::2] = 3.0
    keep_gradients_in_files([parameter], tmp_path)
    parameter.square().sum().backward()
    assert parameter.sum().item() == 3.0 * size / 2
    assert torch.equal(parameter.grad, 2 * parameter.detach())


def memory_growth(folder: str) -> int:
    """Return the peak growth of this process's memory in two backwards, with gradients in a folder if one is given."""
    return_freed_blocks_to_system()
    model = _stack()
    if folder:
        keep_gradients_in_files(model.parameters(), Path(folder))
    _gradients(model)  # the first backward also loads libraries
    model.zero_grad()
    release_freed_memory()
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forget the peak so far
    before = _status_bytes("VmRSS")
    _gradients(model)
    return _status_bytes("VmHWM") - before


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_gradients_in_files_take_a_fraction_of_the_memory(tmp_path: Path) -> None:
    """With files, about one gradient at a time is in memory, also while it is added to an earlier one.

    A new process measures both, because a fork of a long test process also copies pages of that process.
    """
    code = "from tests.unit.model.test_gradient_files import memory_growth as grown; print(grown({!r}), grown(''))"
    words = [sys.executable, "-c", code.format(str(tmp_path))]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    sizes = [*map(int, done.stdout.split())]
    gradient_bytes = 4 * WIDTH * WIDTH
    assert sizes[0] < 1.7 * gradient_bytes, sizes
    assert sizes[1] > LAYERS * gradient_bytes, sizes


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


@pytest.mark.slow
def test_a_check_without_an_optimizer_keeps_gradients_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference and all ranks do, and every cut is verified."""
    in_file = gradient_files._in_file
    moved = tmp_path / "moved"

    def noted(tensor: Tensor, folder: Path) -> Tensor:
        with moved.open("a", encoding="utf-8") as file:  # in processes of their own
            file.write(f"{os.getpid()}\n")
        return in_file(tensor, folder)

    monkeypatch.setattr(gradient_files, "_in_file", noted)
    monkeypatch.setattr(gradient_files, "_LEAST_BYTES", 0)
    monkeypatch.setattr(subject, "_MANY_PARAMETERS", 0)
    monkeypatch.setattr(subject, "_MOST_BYTES", 3_000)
    loaded = loaded_model(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))), 8)
    found = check_equivalence(loaded, budget_s=60.0, digests=layer_digests).proof
    assert (found.uncovered, found.covers_recompute, found.states) == (0, True, 0)
    lines: Sequence[str] = moved.read_text(encoding="utf-8").split("\n")
    assert len(set(filter(None, lines))) > 2  # one process of the reference, several of ranks
