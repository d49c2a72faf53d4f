"""Tests of edits of a training script that would not have their usual effect in a pipeline: they are refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import end_ranks, run_ranks
from tests.support.training import Case, write_balance

pytestmark = pytest.mark.slow

MODEL = """
import torch
from torch import nn

FACTOR = 1.0

def build_model(tied: int = 0):
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    if tied:
        model[tied].weight = model[0].weight
    return model

def example_batch(n):
    return torch.randn(n, 4), torch.randn(n, 4)

def loss_fn(output, target):
    return FACTOR * nn.functional.mse_loss(output, target)
"""

WORKER = """
import os

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

import model
from gpipe_plan.executor import arguments, checkpoints, pipeline_script

def clip(optimizer, *_):
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    total = float(torch.cat([gradient.flatten() for gradient in gradients]).norm())
    [gradient.mul_(min(1.0, 0.05 / total)) for gradient in gradients]
    return total

def clamp(parameter):
    parameter.grad.clamp_(-0.1, 0.1)

def in_pairs(batches):
    for pair in zip(batches, batches):
        yield pair

what, given = os.environ["WHAT"], arguments("", steps=2, seed=0)
if what == "too early":
    model.FACTOR = 2.0
with pipeline_script(os.environ["BALANCE"], given) as pipeline:
    if what == "added":
        list(pipeline.modules[0].children())[-1].extra = torch.nn.Parameter(torch.zeros(4))
    optimizer = pipeline.optimizer(lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))
    saved = checkpoints(pipeline, given, optimizer)
    parameters = [parameter for _, parameter in pipeline.named_parameters()]
    if what == "freeze by name":
        [parameter.requires_grad_(name != "0.weight") for name, parameter in pipeline.named_parameters()]
        before = [parameter.clone() for parameter in parameters]
    if what == "hook":
        optimizer.register_step_pre_hook(clip)
    if what == "global hook":
        register_optimizer_step_pre_hook(clip)
    if what == "gradient hook":
        [parameter.register_post_accumulate_grad_hook(clamp) for parameter in parameters]
    if what == "added late":
        next(pipeline.modules[0].children()).extra = torch.nn.Parameter(torch.zeros(4))
    batches = in_pairs(pipeline.batches(given.steps)) if what == "pairs" else pipeline.batches(given.steps)
    for step, batch in enumerate(batches):
        if what == "replaced":
            model.loss_fn = lambda output, target: output.mean()
        if what == "noise":
            with torch.no_grad():
                [parameter.add_(0.01 * torch.randn_like(parameter)) for parameter in parameters]
        if what == "closure":
            optimizer.step(lambda: pipeline.step(*batch).__enter__())
        with pipeline.accumulate(batch if what == "pairs" else [batch]) as loss:
            if what == "own momentum":
                optimizer.param_groups[0]["momentum"] = min(0.9, clip(optimizer))
            if what != "after the block":
                optimizer.step()
                optimizer.zero_grad()
        if what == "after the block":
            clip(optimizer)
            optimizer.step()
            optimizer.zero_grad()
        print(f"rank {pipeline.rank}, step {step}: loss {loss:.6f}", flush=True)
        saved.step_done()
    if what == "freeze by name":
        moved = [not torch.equal(*pair) for pair in zip(before, parameters)]
        print(f"rank {pipeline.rank} moved {moved}", flush=True)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a model, a plan of two stages, and a script."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "worker.py").write_text(WORKER)
    write_balance(Case(model=tmp_path / "model.py", balance=(2, 2)), tmp_path / "two.yaml")
    return tmp_path


def train(folder: Path, what: str, steps: int, *options: str) -> str:
    """Run the script; return its output."""
    return run_ranks(2, ["worker.py", f"--steps={steps}", *options], folder, WHAT=what, BALANCE="two.yaml")


def refusal(folder: Path, what: str, plan: str = "two") -> str:
    """Run the script, which every rank must end with an error before the last step; return the output."""
    ended = end_ranks(2, ["worker.py", "--steps=4"], folder, WHAT=what, BALANCE=f"{plan}.yaml")
    assert ended.codes == (2, 2)
    assert "step 3: loss" not in ended.output
    return ended.output


def losses(output: str) -> list[str]:
    """Return the losses that rank 0 printed."""
    return [line.rpartition(" ")[2] for line in output.splitlines() if line.startswith("rank 0, step")]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        pytest.param(
            "hook",
            "the script has added a hook to the SGD that `pipeline.optimizer` returned",
            marks=pytest.mark.nightly,
        ),
        ("global hook", "the script has added a hook to the SGD that `pipeline.optimizer` returned"),
        ("added", '.extra" to a stage'),
        pytest.param("added late", '.extra" to a stage', marks=pytest.mark.nightly),
        ("closure", "the script calls a method of the pipeline within `optimizer.step()`"),
        ("replaced", "the script has replaced `loss_fn` of model.py"),
        ("too early", "the script has changed `FACTOR` of model.py before `with pipeline_script(…)`"),
        ("noise", "the script draws random numbers while it changes weights"),
        pytest.param(
            "after the block",
            "multiplied the gradients of its parameters by another number than on rank 0",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "own momentum",
            "learning rates or other options of the optimizer differ between ranks 0 and 1",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_edits_without_their_usual_effect_are_refused(folder: Path, what: str, says: str) -> None:
    assert says in refusal(folder, what)


@pytest.mark.parametrize(
    "change",
    [{}, {"micro_batches": 1, "settings": (("tied", 3),)}, {"micro_batches": 1, "balance": (4,), "replicas": 2}],
)
def test_hooks_must_get_whole_gradients(folder: Path, change: dict[str, Any]) -> None:
    """They do with one micro-batch, unless other stages or replicas share the parameter."""
    case = Case(model=folder / "model.py", balance=(2, 2))
    write_balance(replace(case, **change), folder / "other.yaml")
    assert "gets only a part of the gradient" in refusal(folder, "gradient hook", "other")
    write_balance(replace(case, micro_batches=1, settings=(("tied", 1),)), folder / "two.yaml")
    assert len(losses(train(folder, "gradient hook", 2))) == 2


def test_a_tied_weight_has_its_first_name_on_every_rank(folder: Path) -> None:
    """Otherwise, the rank of the last layer would train the weight that the script freezes by name."""
    write_balance(Case(model=folder / "model.py", balance=(2, 2), settings=(("tied", 3),)), folder / "two.yaml")
    output = train(folder, "freeze by name", 2)
    assert "rank 0 moved [False, True, True, True]" in output
    assert "rank 1 moved [True, True, False, True]" in output


@pytest.mark.nightly
def test_a_run_resumes_whose_steps_take_several_mini_batches(folder: Path) -> None:
    whole = train(folder, "pairs", 8)
    options = "--checkpoint=checkpoints", "--resume=auto"
    train(folder, "pairs", 4, *options)
    assert losses(train(folder, "pairs", 8, *options)) == losses(whole)[2:]
