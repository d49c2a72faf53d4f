"""Tests of `check --model`, which compares the structure of the current model with the profile."""

import json
import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from planner.cli.main import run
from planner.core.errors import ModelError
from planner.executor import Pipeline
from tests.support.cli import no_proof, write_model

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 16)) for _ in range(3)
        )

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return x

def build_model(width: int = 32):
    return Net(width)

def example_batch(n):
    return torch.randn(n, 8), torch.randn(n, 16)

def loss_fn(output, target):
    return ((output - target) ** 2).mean()
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the model, its profile and a plan."""
    folder = tmp_path_factory.mktemp("finished")
    write_model(folder, MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        no_proof(patch)
        assert run(["profile", "model.py", "--batch-sizes", "2", "--time-budget", "0s", "--repeat", "2", "-q"]) == 0
        assert run(["solve", "--devices", "1", "--mem", "1GB", "-q"]) == 0
    return folder


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path) -> Path:
    """Change to a copy of `finished`."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_same_model_passes_with_other_weights(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert run(["check", "--model", "model.py"]) == 0
    assert "GP301" not in capsys.readouterr().out


@pytest.mark.slow
def test_wider_blocks_are_named_with_old_and_new_bytes(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(planned, MODEL.replace("width: int = 32", "width: int = 48"))
    capsys.readouterr()
    assert run(["check", "--model", "model.py", "--format", "json"]) == 1
    findings = [found for found in json.loads(capsys.readouterr().out)["findings"] if found["code"] == "GP301"]
    assert len(findings) == 3
    assert findings[0]["message"] == 'layer "blocks.0" has 6.25 KiB of parameters, 4.19 KiB when profiled'


@pytest.mark.slow
def test_a_changed_model_is_not_reported_as_too_large(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`train.py` names the command that finds the changed layers."""
    assert run(["emit", "-q"]) == 0
    write_model(planned, MODEL.replace("width: int = 32", "width: int = 48"))
    with pytest.raises(ModelError, match="the model has changed since it was planned") as refused:
        Pipeline(planned / "balance.yaml")
    command = refused.value.hint.partition("`gpipe-plan ")[2].partition("`")[0]
    capsys.readouterr()
    assert run(command.split()) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "refused: the model is no longer the profiled one (3 errors)"
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_model_that_cannot_be_built_gives_exit_code_2(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(
        planned, "def build_model():\n    raise ValueError('no')\n\ndef example_batch(n):\n    return None, None\n"
    )
    capsys.readouterr()
    assert run(["check", "--model", "model.py"]) == 2
    assert "build_model" in capsys.readouterr().err
