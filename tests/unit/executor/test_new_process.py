"""Tests of the equivalence check on machines with a GPU, where it runs in a new process."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from planner.core.errors import ModelError
from planner.executor.equivalence import new_process
from planner.executor.equivalence.check import check_equivalence
from planner.executor.equivalence.isolation import ChildProcess
from planner.executor.equivalence.new_process import check_equivalence_on_cpu
from planner.model import load_model, load_module
from planner.model.load import LoadedModel
from planner.model.seeding import preserve_torch_generators
from tests.support.measure import loaded_model, mean_loss

MODEL = """
import os

import torch
from torch import nn


def build_model():
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == "", "a GPU is visible"
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def example_batch(batch_size):
    return torch.randn(batch_size, 4), torch.randn(batch_size, 4)


def loss_fn(output, target):
    return nn.functional.mse_loss(output, target)
"""


class ForkedCheck(new_process._NewProcess):
    """Process that starts faster than a new one."""

    def __init__(self) -> None:
        ChildProcess.__init__(self, new_process._check, limit_s=60.0)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the process of the check."""
    monkeypatch.setattr(new_process, "_NewProcess", ForkedCheck)


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(has_own_memory=True, device_count=lambda: 1)
    monkeypatch.setattr(new_process, "DEVICE_KINDS", {"cuda": gpu})


@pytest.fixture
def path(tmp_path: Path) -> str:
    """Write a model file that can be built only where no GPU is visible."""
    (tmp_path / "model.py").write_text(MODEL)
    return str(tmp_path / "model.py")


@pytest.mark.slow
def test_no_gpu_is_visible_to_the_check(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    found = check_equivalence_on_cpu(load_model(path), partial(load_model, path), texts.append, budget_s=30.0)
    assert (found.proof.cuts, found.proof.reason) == (2, "")
    assert "training the reference" in texts

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    here = check_equivalence(load_model(path), budget_s=30.0)
    assert replace(here.proof, worst=found.proof.worst) == found.proof


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_errors_of_the_model_keep_message_and_hint(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    Path(path).write_text(MODEL.replace("mse_loss(output, target)", "mse_loss(output, target).item()"))
    with pytest.raises(ModelError) as inside:
        check_equivalence(load_model(path), budget_s=30.0).raise_if_failed()
    with pytest.raises(ModelError) as outside:
        check_equivalence_on_cpu(load_model(path), partial(load_model, path), budget_s=30.0).raise_if_failed()
    assert (str(outside.value), outside.value.hint) == (str(inside.value), inside.value.hint)


def test_a_model_object_that_cannot_be_sent_is_refused() -> None:
    loaded = loaded_model(lambda: nn.Linear(4, 4), 4)

    def load() -> LoadedModel:
        return loaded

    with pytest.raises(ModelError, match="cannot be sent to another process") as refused:
        check_equivalence_on_cpu(loaded, load, budget_s=30.0)
    assert "give the path of a model file" in str(refused.value.hint)


def test_saving_random_states_does_not_start_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has started CUDA cannot fork the processes of the check."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: pytest.fail("CUDA was started"))
    before = torch.get_rng_state()
    with preserve_torch_generators():
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_model_object_is_sent_with_its_values() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    load = partial(load_module, model, loss_fn=mean_loss, inputs=("4",))
    assert check_equivalence_on_cpu(load(), load, budget_s=30.0).proof.cuts == 1
