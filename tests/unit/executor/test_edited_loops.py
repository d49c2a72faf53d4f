"""Tests of training loops that a user has edited: what trains as in a plain loop, and what is refused with a remedy."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.ranks import end_ranks, run_ranks
from tests.support.training import Case, write_balance

pytestmark = pytest.mark.slow

MODEL = """
import torch
from torch import nn

FACTOR = 1.0

class Counts(nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)

class Remembers(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("mean", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().abs().mean()
        return super().forward(x) / (1 + self.mean)

class Caches(nn.Linear):
    # Keeps what it has computed for the next forward, and a value that no forward reads.
    cache = None

    def forward(self, x):
        before = x if self.cache is None or len(self.cache[0]) != len(x) else self.cache[0]
        self.cache = (x.detach(),)
        self.seen = x.detach()
        return super().forward(x + before)

class Registers(nn.Linear):
    # Registers a buffer at its 13th call, after the first checkpoint.
    calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 13:
            self.register_buffer("late", torch.zeros(()))
        return super().forward(x)

class Stored(Counts):
    def get_extra_state(self):
        return {"calls": self.calls}

    def set_extra_state(self, state):
        self.calls = state["calls"]

    def forward(self, x):
        return super().forward(x) / self.calls

class Shared(torch.optim.SGD):
    # Has state that all parameters share, and adds to its state dict.
    scale = 1.0

    def step(self, closure=None):
        count = self.state["shared"].get("count", 0)
        self.state["shared"]["count"] = count + 1
        self.scale *= 0.5
        for group in self.param_groups:
            group["lr"] = 0.1 * self.scale / (count + 1)
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state.pop("scale")
        super().load_state_dict(state)

class Inner(torch.optim.SGD):
    # Steps another optimizer, whose state nothing saves.
    def __init__(self, parameters, **options):
        parameters = list(parameters)
        super().__init__(parameters, **options)
        self.inner = [torch.optim.SGD(parameters, **options)]

    def step(self, closure=None):
        self.inner[0].step()

class Early(torch.optim.SGD):
    # Steps without gradients when it is built, as some optimizers do to create their state.
    def __init__(self, parameters, **options):
        super().__init__(parameters, **options)
        self.step()

def build_model(frozen: int = 0, counts: int = 0, tied: int = 0):
    model = nn.Sequential(*[(nn.Linear, Counts, Stored, Remembers, Caches, Registers)[counts](4, 4) for _ in range(4)])
    if tied:
        model[3].weight = model[0].weight
    model[:frozen].requires_grad_(False)
    return model

def example_batch(n):
    return torch.randn(n, 4), torch.randn(n, 4)

def loss_fn(output, target):
    return FACTOR * nn.functional.mse_loss(output, target)
"""

WORKER = """
import os
import torch
from torch.nn.utils import clip_grad_norm_, prune
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
import model
from gpipe_plan.executor import arguments, checkpoints, pipeline_script

def own_batches(pipeline):
    samples = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(samples, samples), batch_size=8, shuffle=True)
    while True:
        for pair in loader:
            yield pipeline.own_part(*pair)
        if what == "draws" and pipeline.is_last:
            torch.rand(1)

what, given = os.environ["WHAT"], arguments("", steps=2, seed=0)
with pipeline_script(os.environ["BALANCE"], given) as pipeline:
    build = {"shared": model.Shared, "inner": model.Inner, "early": model.Early}.get(what, torch.optim.SGD)
    optimizer = pipeline.optimizer(lambda ps: build(ps, lr=0.1, momentum=0.9))
    more = {"second": pipeline.optimizer(lambda ps: torch.optim.Adam(ps, lr=0.1))} if what == "second" else {}
    unnamed = [pipeline.optimizer(lambda ps: torch.optim.Adam(ps, lr=0.1))] if what == "unnamed" else []
    saved = checkpoints(pipeline, given, optimizer, **more)
    parameters = [parameter for _, parameter in pipeline.named_parameters()]
    if what == "freeze":
        [parameter.requires_grad_(pipeline.is_last) for parameter in parameters]
    if what == "not made":
        optimizer = torch.optim.SGD(parameters, lr=0.1)
    if what == "copy":
        AveragedModel(pipeline.modules[0])
    averaged = torch.nn.ParameterList(parameters)
    average = AveragedModel(averaged)
    batches = own_batches(pipeline) if what in ("loader", "draws") else pipeline.batches(given.steps)
    for step, (inputs, targets) in zip(range(given.steps - pipeline.step_index), batches):
        if what == "group" and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5})
        if what in ("freeze", "unfreeze") and step == 1:
            [parameter.requires_grad_(True) for parameter in parameters]
        model.FACTOR = {"factor": 2.0, "ramp": 1.0 + pipeline.step_index}.get(what, 1.0)
        before = [parameter.detach().clone() for parameter in parameters]
        shuffled = torch.randperm(8) if what == "by name" else None
        with pipeline.step(inputs, targets) as loss:
            if what == "clip":
                clip_grad_norm_(parameters, 0.1)
            if what == "clip each":
                [clip_grad_norm_(parameter, 0.1) for parameter in parameters]
                [clip_grad_norm_(layer.parameters(), 0.1) for layer in pipeline.modules[0].children()]
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            total = float(torch.cat([torch.zeros(1), *[gradient.flatten() for gradient in gradients]]).norm())
            if what == "own norm":
                [gradient.mul_(min(1.0, 0.05 / total)) for gradient in gradients]
            if what == "own rate":
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + total)
            if what == "sharpness":
                with torch.no_grad():
                    [parameter.add_(parameter.grad, alpha=0.05 / total) for parameter in parameters]
            if what == "gradient noise":
                [gradient.add_(torch.randn_like(gradient)) for gradient in gradients]
            if what == "own skip" and step == 1 and pipeline.is_last:
                continue
            if what == "by name":
                [p.grad.mul_(0.1) for name, p in pipeline.named_parameters() if name < "2"]
                [gradient.mul_(0.5**step) for gradient in gradients]
                [gradient.clamp_(-0.5, 0.5) for gradient in gradients]
            for each in (*more.values(), *unnamed, optimizer):
                each.step()
            optimizer.zero_grad()
        average.update_parameters(averaged)
        if what == "noise":
            with torch.no_grad():
                [parameter.add_(0.01 * torch.randn_like(parameter)) for parameter in parameters]
        if what == "own projection":
            with torch.no_grad():
                norm = torch.cat([parameter.flatten() for parameter in parameters]).norm()
                [parameter.div_(norm) for parameter in parameters]
        if what == "tied noise":
            generator = torch.Generator().manual_seed(pipeline.rank)
            with torch.no_grad():
                [parameter.add_(torch.randn(parameter.shape, generator=generator)) for parameter in parameters]
        if what == "rename" and step == 0:
            prune.identity(next(pipeline.modules[0].children()), "weight")
        moved = sum(not torch.equal(old, new) for old, new in zip(before, parameters))
        print(f"rank {pipeline.rank}, step {step}: loss {loss:.6f}, moved {moved}", flush=True)
        saved.step_done()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a model, plans of two and four stages, and a script."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "worker.py").write_text(WORKER)
    for name, balance in (("two", (2, 2)), ("four", (1, 1, 1, 1))):
        write_balance(Case(model=tmp_path / "model.py", balance=balance), tmp_path / f"{name}.yaml")
    return tmp_path


def train(folder: Path, what: str, plan: str = "two", steps: int = 2, *options: str) -> str:
    """Run the script; return its output."""
    count = 4 if plan == "four" else 2
    return run_ranks(count, ["worker.py", f"--steps={steps}", *options], folder, WHAT=what, BALANCE=f"{plan}.yaml")


def refusal(folder: Path, what: str, plan: str = "two", steps: int = 2, *options: str) -> str:
    """Run the script, which every rank must end with an error; return the output."""
    count = 4 if plan == "four" else 2
    ended = end_ranks(count, ["worker.py", f"--steps={steps}", *options], folder, WHAT=what, BALANCE=f"{plan}.yaml")
    assert ended.codes == (2,) * count
    return ended.output


def loss_of(output: str, step: int) -> float:
    """Return the loss that rank 0 printed for a step, counted from the start or the resume."""
    return float(output.partition(f"step {step}: loss ")[2].partition(",")[0])


def test_unfreezing_a_planned_frozen_layer_is_refused(folder: Path) -> None:
    """With recomputation, stages would not send the gradients, and the layer would silently not be trained."""
    case = Case(model=folder / "model.py", balance=(2, 2), recompute="always", settings=(("frozen", 2),))
    write_balance(case, folder / "frozen.yaml")
    output = refusal(folder, "unfreeze", "frozen")
    assert 'the script unfreezes "0.weight", which `build_model` freezes' in output
    assert "step 0: loss" in output
    assert "step 1: loss" not in output


def test_scripts_may_freeze_and_unfreeze_layers_that_the_plan_trains(folder: Path) -> None:
    lines = train(folder, "freeze").splitlines()
    moved = {line.partition(":")[0]: line.rpartition(" ")[2] for line in lines if "moved" in line}
    assert moved == {
        "rank 0, step 0": "0",
        "rank 1, step 0": "4",
        "rank 0, step 1": "4",
        "rank 1, step 1": "4",
    }


def test_optimizers_must_be_made_by_the_pipeline(folder: Path) -> None:
    """Other ranks' parameters would be missing in a clip or a learning rate that `step()` computes from all of them."""
    output = refusal(folder, "not made")
    assert "`pipeline.optimizer` has not made this SGD" in output
    assert "step 0" not in output


def test_an_optimizer_may_step_when_it_is_built(folder: Path) -> None:
    assert "step 1: loss" in train(folder, "early")


def test_clipping_by_the_norm_of_one_rank_is_refused(folder: Path) -> None:
    output = refusal(folder, "clip")
    assert "`clip_grad_norm_` gets 4 gradients of this rank" in output
    assert "pipeline.clip_gradients(max_norm)" in output


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("own norm", "multiplied the gradients of its parameters by another number than on rank 0"),
        ("sharpness", "added another multiple of the gradients to its parameters than on rank 0"),
        ("own projection", "multiplied its parameters by another number than on rank 0"),
        ("own rate", "learning rates or other options of the optimizer differ between ranks 0 and 1"),
        ("own skip", "rank 1 has called `optimizer.step()` 1 times, and rank 0 2 times"),
    ],
)
def test_decisions_by_values_of_one_rank_are_refused(folder: Path, what: str, says: str) -> None:
    """Each rank would scale or skip by another norm, so the result would not be that of a plain loop."""
    output = refusal(folder, what, "two", 4)
    assert says in output
    assert "step 3: loss" not in output


@pytest.mark.parametrize("what", ["noise", "gradient noise"])
def test_noise_in_the_order_of_the_parameters_is_refused(folder: Path, what: str) -> None:
    """The two ranks have as many parameters, so the states of their generators remain equal."""
    assert "the script draws random numbers while it changes weights or gradients" in refusal(folder, what)


def test_scripts_may_scale_gradients_by_name_and_step(folder: Path) -> None:
    """The script also clamps them by value, and draws random numbers in another step than it changes weights."""
    assert "step 3: loss" in train(folder, "by name", "two", 4)


def test_single_gradients_and_single_layers_may_be_clipped(folder: Path) -> None:
    assert "step 1: loss" in train(folder, "clip each")


def test_variables_of_the_imported_model_file_affect_training(folder: Path) -> None:
    """`import model` in the script returns the module whose functions the pipeline calls."""
    plain, doubled = (loss_of(train(folder, what), 0) for what in ("plain", "factor"))
    assert doubled == pytest.approx(2 * plain, rel=1e-4)


def test_copying_a_stage_is_refused(folder: Path) -> None:
    """The script averages weights in a `ParameterList`, as the hint says."""
    output = refusal(folder, "copy")
    assert "a stage cannot be copied" in output
    assert "AveragedModel(torch.nn.ParameterList(" in output


def test_objects_with_other_state_on_each_rank_resume_only_under_their_plan(folder: Path) -> None:
    """Ranks of another plan would otherwise restore the state of the first rank."""
    options = "--checkpoint=checkpoints", "--resume=auto"
    train(folder, "second", "two", 2, *options)
    assert 'the state of "second" differs between ranks 0 and 1' in refusal(folder, "second", "four", 3, *options)
    assert "step 0: loss" in train(folder, "second", "two", 3, *options)


def test_a_resumed_optimizer_must_have_as_many_groups(folder: Path) -> None:
    """Without this, options and state of the group that a script adds in a later step would be lost."""
    options = "--checkpoint=checkpoints", "--resume=auto"
    train(folder, "group", "two", 2, *options)
    output = refusal(folder, "group", "two", 3, *options)
    assert "has the state of an optimizer with 2 parameter groups, but the script's has 1" in output
    assert "make the same groups before `checkpoints`" in output


def test_a_run_resumes_whose_script_changes_variables_between_steps(folder: Path) -> None:
    """The digest of the code contains variables that the loss reads, as they are before the first step."""
    options = "--checkpoint=checkpoints", "--resume=auto"
    train(folder, "ramp", "two", 2, *options)
    train(folder, "ramp", "two", 3, *options)


def test_a_warning_names_state_that_checkpoints_do_not_contain(folder: Path) -> None:
    case = Case(model=folder / "model.py", balance=(2, 2), settings=(("counts", 1),))
    write_balance(case, folder / "counts.yaml")
    assert "Inner.inner" in train(folder, "inner", "two", 3, "--checkpoint=inner")
    assert "Adam.state" in train(folder, "unnamed", "two", 3, "--checkpoint=unnamed")
    assert "Adam.state" not in train(folder, "second", "two", 3, "--checkpoint=second")
    write_balance(replace(case, settings=(("counts", 3),)), folder / "buffers.yaml")
    assert "1.mean" in train(folder, "plain", "buffers", 3, "--checkpoint=buffers")
    write_balance(replace(case, settings=(("counts", 4),)), folder / "caches.yaml")
    output = train(folder, "plain", "caches", 3, "--checkpoint=caches")
    assert "0.cache.0, 1.cache.0" in output
    assert ".seen" not in output
    write_balance(replace(case, settings=(("counts", 5),)), folder / "late.yaml")
    assert "0.late, 1.late" in train(folder, "plain", "late", 8, "--checkpoint=late", "--checkpoint-every=2")
    output = train(folder, "plain", "counts", 3, "--checkpoint=checkpoints")
    assert "state that changes in training: 0.calls, 1.calls, 2.calls, 3.calls; a resumed run begins" in output
    assert "warning: checkpoints" not in train(folder, "plain", "two", 3, "--checkpoint=others")


def test_checkpoints_name_a_tensor_that_the_script_has_renamed(folder: Path) -> None:
    output = refusal(folder, "rename", "two", 2, "--checkpoint=checkpoints")
    assert 'the script has removed or renamed "0.weight", which `build_model` returns' in output


def test_scripts_must_change_copies_of_a_tied_parameter_alike(folder: Path) -> None:
    """Each rank draws noise for its own parameters, so two ranks draw other numbers for the tied one."""
    case = Case(model=folder / "model.py", balance=(2, 2), settings=(("tied", 1),))
    write_balance(case, folder / "tied.yaml")
    train(folder, "plain", "tied")
    assert 'the copies of "0.weight", which layers on several ranks share, differ' in refusal(
        folder, "tied noise", "tied"
    )


@pytest.mark.parametrize(
    ("what", "counts", "balance"), [("shared", 0, (2, 2)), ("plain", 2, (2, 2)), ("plain", 2, (1, 3))]
)
def test_checkpoints_contain_what_state_dicts_contain(
    folder: Path, what: str, counts: int, balance: tuple[int, int]
) -> None:
    """An optimizer may share state between parameters or add to `state_dict`; modules may have an extra state.

    Extra states are restored by the names of their modules, so the plan may change.
    """
    case = Case(model=folder / "model.py", balance=(2, 2), settings=(("counts", counts),))
    write_balance(case, folder / "plan.yaml")
    write_balance(replace(case, balance=balance), folder / "resumed.yaml")
    whole = train(folder, what, "plan", 4, "--checkpoint=checkpoints", "--checkpoint-every=2")
    rest = train(folder, what, "resumed", 4, "--checkpoint=resumed", "--resume=checkpoints/step-00000002")
    assert "warning: checkpoints" not in rest
    assert [loss_of(rest, step) for step in (0, 1)] == [loss_of(whole, step) for step in (2, 3)]


def test_every_mini_batch_of_an_own_loop_must_be_equal_on_all_ranks(folder: Path) -> None:
    """A rank that draws a random number by itself shuffles the next epoch in another order."""
    train(folder, "loader", "two", 4)
    output = refusal(folder, "draws", "two", 4)
    assert "has another mini-batch at step 2 than a rank before it" in output
    assert "step 1: loss" in output
