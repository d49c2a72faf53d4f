"""Run commands in this process (fast), or in a new process (pipes, signals, imports)."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

import pytest

from planner import __version__
from planner.cli.main import run
from planner.core.values.cluster import ExecutorCost, Link
from planner.core.values.proof import Proof
from planner.device.machine import cpu_name

HEAD: Final = "import torch\nfrom torch import nn\n"
BUILD: Final = """
def build_model(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))
"""
EXAMPLE: Final = """
def example_batch(batch_size):
    return torch.randn(batch_size, 8), torch.randn(batch_size, 4)
"""
LOSS: Final = """
def loss_fn(output, target):
    return ((output - target) ** 2).mean()
"""
MODEL: Final = HEAD + BUILD + EXAMPLE + LOSS
"""A model.py of five layers, named 0 to 4."""

FAST: Final = ("--repeat", "2", "--time-budget", "0s", "--batch-sizes", "1,2,4")
"""Options of `profile` for tests that do not care how good its times are."""


@dataclass(frozen=True)
class Ran:
    """Result of a command."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Paragraph of stderr with the error."""
        paragraphs = [part for part in self.err.split("\n\n") if "error: " in part]
        assert len(paragraphs) == 1, self.err
        return paragraphs[0][paragraphs[0].rfind("\n", 0, paragraphs[0].index("error: ")) + 1 :]


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> Ran:
    """Run `gpipe-plan` with `arguments` in this process; earlier output is dropped."""
    capsys.readouterr()
    code = run(list(arguments))
    printed = capsys.readouterr()
    return Ran(code, printed.out, printed.err)


def known_executor(folder: Path) -> str:
    """Return a cache folder with a calibration of the executor, which other tests would otherwise measure."""
    machine = {"cpu": cpu_name(), "torch": version("torch"), "gpipe-plan": __version__}
    link = {"latency_us": 20.0, "bytes_per_s": 2e9, "blocking": True}
    (folder / "gpipe-plan").mkdir(parents=True, exist_ok=True)
    text = json.dumps({"machine": machine, "overhead_us": 300.0, "link": link})
    (folder / "gpipe-plan" / "executor.json").write_text(text, encoding="utf-8")
    return str(folder)


def no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the equivalence check, which trains each model in a dozen processes, find that all cuts are right."""
    from planner.executor.build.building import build_structure
    from planner.executor.equivalence import check, new_process

    def verified(loaded, *_, **__):
        layers = len(build_structure(loaded).layers)
        proof = Proof(layers=layers, cuts=layers - 1, gradients=1, states=1)
        return check.EquivalenceResult(loaded=loaded, proof=proof, warnings=())

    monkeypatch.setattr(new_process, "check_equivalence_on_cpu", verified)


def no_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the two processes with which `profile` measures the executor's cost."""
    from planner.executor.measure import calibrate  # it imports torch, which some tests of this module's users must not

    free = ExecutorCost(overhead_us=0.0, link=Link())
    monkeypatch.setattr(calibrate, "executor_cost", lambda *_, **__: free, raising=False)


def write_model(folder: Path, text: str = MODEL, name: str = "model.py") -> Path:
    """Write a model file and return its path."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def command(*arguments: str) -> list[str]:
    """Return the words that start `gpipe-plan` with `arguments` in a new process."""
    return [sys.executable, "-m", "planner", *arguments]


def environment(**extra: str) -> dict[str, str]:
    """Return this process's environment, with the checkout importable from any folder."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **extra}


def spawn(arguments: Sequence[str], folder: Path, **extra: str) -> Ran:
    """Run `gpipe-plan` in a new process in `folder`; `extra` is added to its environment."""
    done = subprocess.run(
        command(*arguments),
        cwd=folder,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)
