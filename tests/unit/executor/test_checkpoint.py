"""Tests of checkpoints of one stage in one process."""

# ruff: noqa: NPY002 - the global generator is what a script draws from

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from planner.core.errors import FileError, UsageError
from planner.executor import Pipeline
from planner.executor.checkpoints import Checkpoints
from planner.executor.keep.json_state import to_json
from planner.executor.keep.saved import latest_checkpoint
from planner.executor.keep.unsaved import UnsavedState
from planner.executor.run.loader import seeded_batches
from tests.support.cli import MODEL
from tests.unit.executor.test_pipeline import balance_of, edit

GROUPS = """
def build_optimizer(parameters):
    parameters = list(parameters)
    matrices = [p for p in parameters if p.ndim > 1]
    vectors = [p for p in parameters if p.ndim <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)
"""


pytestmark = pytest.mark.usefixtures("one_process")


Schedule = Callable[[torch.optim.Optimizer], LRScheduler]


def halved(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """Halve the learning rate every two steps."""
    return StepLR(optimizer, 2, gamma=0.5)


def train(
    path: Path, steps: int, *, schedule: Schedule | None = halved, is_async: bool = False, **options: Any
) -> dict[str, Any]:
    """Train until step `steps`; return parameters, losses, learning rates and options."""
    pipeline = Pipeline(path)
    try:
        optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
        others = {"schedule": schedule(optimizer)} if schedule else {}
        saved = Checkpoints(pipeline, optimizer, steps=steps, **options, **others)
        saved._is_async = is_async
        begun = pipeline.step_index
        for inputs, targets in pipeline.batches(steps):
            with pipeline.step(inputs, targets):
                optimizer.step()
                optimizer.zero_grad()
            for other in others.values():
                other.step()
            saved.step_done()
        return {
            "begun": begun,
            "parameters": {name: p.detach().clone() for name, p in pipeline.named_parameters()},
            "losses": pipeline.losses,
            "state": [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]],
            "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
            "loss_scale": pipeline.state_dict()["loss_scale"],
        }
    finally:
        pipeline.close()


@pytest.mark.parametrize("dtype", ["", "fp16-mixed"])
def test_a_resumed_run_equals_an_undisturbed_one(tmp_path: Path, dtype: str) -> None:
    """Compare parameter groups, schedule and loss scale. Only the newest checkpoints are kept."""
    path, folder = balance_of(tmp_path, MODEL + GROUPS), str(tmp_path / "saved")
    edit(path, dtype=dtype)
    whole = train(path, 7)
    first = train(path, 4, folder=folder, every=1, keep=2, resume="auto")
    assert first["begun"] == 0
    assert sorted(entry.name for entry in (tmp_path / "saved").iterdir()) == ["step-00000003", "step-00000004"]
    second = train(path, 7, folder=folder, every=5, resume="auto")
    assert second["begun"] == 4
    assert first["losses"] + second["losses"] == whole["losses"]
    assert second["groups"] == whole["groups"]
    assert second["groups"][1]["weight_decay"] == 0.0
    assert second["loss_scale"] == whole["loss_scale"]
    assert all(torch.equal(second["parameters"][name], p) for name, p in whole["parameters"].items())
    described = json.loads((tmp_path / "saved/step-00000007/checkpoint.json").read_text())
    assert (described["step"], len(described["files"]), described["balance"]) == (7, 1, [5])


ODD = """
class Odd(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["odd"] = {1: (0.1, None), "best": -float("inf"), "$tensor": [True], "sum": group["params"][0].sum()}
            for p in group["params"]:
                held = self.state[p].get("held", {0: ()})
                self.state[p]["held"] = {**held, len(held): (p.detach().clone(), len(held) / 3)}
"""


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        ("torch.optim.NAdam", lambda o: MultiStepLR(o, [1, 3])),
        ("torch.optim.Adamax", lambda o: OneCycleLR(o, 0.1, total_steps=9)),
        ("torch.optim.Adafactor", lambda o: CosineAnnealingWarmRestarts(o, 2)),
        ("Odd", lambda o: SequentialLR(o, [ConstantLR(o), ExponentialLR(o, 0.9)], [2])),
    ],
)
def test_any_optimizer_and_scheduler_state_is_resumed_exactly(optimizer, schedule, tmp_path):
    build = f"\ndef build_optimizer(parameters):\n    return {optimizer}(parameters, lr=0.01)\n"
    path, folder = balance_of(tmp_path, MODEL + ODD + build), str(tmp_path / "saved")
    whole = train(path, 5, schedule=schedule)
    train(path, 2, schedule=schedule, folder=folder)
    again = train(path, 5, schedule=schedule, folder=folder, resume="auto")
    tensors: tuple[dict[str, Tensor], ...] = ({}, {})
    first, second = (
        to_json({part: run[part] for part in ("parameters", "state", "groups")}, "", held)
        for run, held in zip((whole, again), tensors, strict=True)
    )
    assert first == second
    assert all(torch.equal(tensors[1][name], tensor) for name, tensor in tensors[0].items())


def test_resuming_from_an_earlier_step_replaces_later_checkpoints(tmp_path: Path) -> None:
    path, folder = balance_of(tmp_path, MODEL + GROUPS), str(tmp_path / "saved")
    train(path, 4, folder=folder, every=2)
    before = (tmp_path / "saved/step-00000004/checkpoint.json").stat().st_ino
    assert train(path, 4, folder=folder, resume=f"{folder}/step-00000002")["begun"] == 2
    assert (tmp_path / "saved/step-00000004/checkpoint.json").stat().st_ino != before
    assert train(path, 5, resume=folder)["begun"] == 4
    assert latest_checkpoint(folder) == tmp_path / "saved/step-00000004"


def test_checkpoints_are_written_during_training(tmp_path: Path) -> None:
    """The saved state is that of its step, and the run waits for the last file."""
    path, folder = balance_of(tmp_path, MODEL + GROUPS), str(tmp_path / "saved")
    whole = train(path, 5)
    train(path, 3, folder=folder, every=2, is_async=True)
    assert sorted(entry.name for entry in (tmp_path / "saved").iterdir()) == ["step-00000002", "step-00000003"]
    resumed = train(path, 5, resume=f"{folder}/step-00000002")
    assert resumed["losses"] == whole["losses"][2:]


def test_missing_or_different_checkpoints_are_refused(tmp_path: Path) -> None:
    path, folder = balance_of(tmp_path, MODEL + GROUPS), str(tmp_path / "saved")
    with pytest.raises(UsageError, match="`--resume auto` needs a checkpoint folder"):
        train(path, 2, resume="auto")
    with pytest.raises(FileError, match="the folder has no checkpoint"):
        train(path, 2, resume=str(tmp_path))
    train(path, 2, folder=folder)
    with pytest.raises(UsageError, match=r"the checkpoint has the state of \['schedule'\], but the script"):
        train(path, 3, schedule=None, resume=folder)
    (tmp_path / "saved/step-00000002/checkpoint.json").write_text("{")
    with pytest.raises(FileError, match=r"checkpoint\.json cannot be read"):
        train(path, 3, resume=f"{folder}/step-00000002")
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be created"):
        train(path, 2, folder=str(tmp_path / "file/saved"))
    with pytest.raises(FileError, match="is a file, a folder for checkpoints is needed"):
        train(path, 2, folder=str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("** 2).mean()", "** 4).mean()", "the loss function has changed since"),
        ("nn.ReLU()", "nn.GELU()", "what the layers compute .* has changed since"),
    ],
)
def test_checkpoints_of_another_loss_or_activation_are_refused(tmp_path: Path, old: str, new: str, what: str) -> None:
    """Only weights may be loaded. Edits without effect are accepted."""
    text, folder = MODEL + GROUPS, str(tmp_path / "saved")
    train(balance_of(tmp_path, text), 2, folder=folder)
    path = balance_of(tmp_path, text.replace(old, new))
    with pytest.raises(UsageError, match=what) as refused:
        train(path, 3, folder=folder, resume="auto")
    assert f"--weights {folder}/step-00000002" in refused.value.hint
    assert train(path, 1, weights=f"{folder}/step-00000002")["begun"] == 0
    path = balance_of(tmp_path, text + "\n# a comment\n")
    assert train(path, 3, folder=folder, resume="auto")["begun"] == 2


def test_casts_of_weights_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run in another dtype loads the weights of a checkpoint, and prints their former dtype."""
    path, folder = balance_of(tmp_path, MODEL + GROUPS), tmp_path / "saved"
    train(path, 1, folder=str(folder))
    edit(path, dtype="bf16")
    capsys.readouterr()
    train(path, 1, weights=str(folder / "step-00000001"))
    assert f"cast on loading {folder}/step-00000001: float32 to bfloat16\n" in capsys.readouterr().out


def test_weights_replace_the_initial_values(tmp_path: Path) -> None:
    """A resumed checkpoint takes precedence."""
    path = balance_of(tmp_path, MODEL + GROUPS)
    weights = {name: p + 1.0 for name, p in train(path, 1)["parameters"].items()}
    torch.save(weights, tmp_path / "weights.pt")
    options = {"weights": str(tmp_path / "weights.pt"), "folder": str(tmp_path / "saved"), "resume": "auto"}
    started = train(path, 1, **options)
    assert all(bool((p - weights[name]).abs().max() < 0.1) for name, p in started["parameters"].items())
    assert train(path, 2, **options)["begun"] == 1


RENAMED = """
build_plain = build_model
def rename(state, old, new):
    for name in [name for name in state if name.startswith(old)]:
        state[new + name.removeprefix(old)] = state.pop(name)
def build_model():
    model = build_plain()
    model.register_state_dict_post_hook(lambda _module, state, *_: rename(state, "0.", "stem."))
    return model
"""

HOOKED = (
    RENAMED
    + """
build_renamed = build_model
def build_model():
    model = build_renamed()
    model.register_load_state_dict_pre_hook(lambda _module, state, *_: rename(state, "stem.", "0."))
    return model
"""
)


def test_weights_are_loaded_through_the_hooks_of_the_model(tmp_path: Path) -> None:
    path = balance_of(tmp_path, MODEL + GROUPS + HOOKED)
    weights = {name: p + 1.0 for name, p in train(path, 1)["parameters"].items()}
    torch.save({name.replace("0.", "stem.", 1): p for name, p in weights.items()}, tmp_path / "weights.pt")
    started = train(path, 1, weights=str(tmp_path / "weights.pt"))
    assert all(bool((p - weights[name]).abs().max() < 0.1) for name, p in started["parameters"].items())


def test_weights_that_only_a_hook_for_saving_renames_are_refused(tmp_path: Path) -> None:
    path = balance_of(tmp_path, MODEL + GROUPS + RENAMED)
    weights = train(path, 1)["parameters"]
    torch.save({name.replace("0.", "stem.", 1): p for name, p in weights.items()}, tmp_path / "weights.pt")
    with pytest.raises(UsageError, match=r"it lacks .* and holds") as refused:
        train(path, 1, weights=str(tmp_path / "weights.pt"))
    assert "`register_load_state_dict_pre_hook`" in refused.value.hint


def test_states_of_all_random_generators_are_resumed(tmp_path: Path) -> None:

    def drawn(steps: int, **options: Any) -> list[list[float]]:
        pipeline = Pipeline(path, seed=3)
        optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
        saved = Checkpoints(pipeline, optimizer, steps=steps, **options)
        got = []
        for inputs, targets in pipeline.batches(steps):
            got.append([float(torch.rand(())), random.random(), random.gauss(0, 1), float(np.random.standard_normal())])
            with pipeline.step(inputs, targets):
                optimizer.step()
            saved.step_done()
        pipeline.close()
        return got

    path, folder = balance_of(tmp_path, MODEL + GROUPS), str(tmp_path / "saved")
    whole = drawn(6)
    assert drawn(3, folder=folder) + drawn(6, folder=folder, resume="auto") == whole


def test_shuffled_batches_are_resumed_with_any_generator(tmp_path: Path) -> None:
    shuffling = """
def train_batches(size):
    import random
    import numpy as np
    data = torch.arange(8.0 * 4 * 8).reshape(32, 8).sin()
    rows = np.random.permutation(32).tolist()
    random.shuffle(rows)
    for n in range(4):
        part = data[rows[n * size : n * size + size]]
        yield part, part[:, :4]
"""
    path, folder = balance_of(tmp_path, MODEL + GROUPS + shuffling), str(tmp_path / "saved")
    whole = train(path, 7)
    first = train(path, 3, folder=folder)
    assert first["losses"] + train(path, 7, folder=folder, resume="auto")["losses"] == whole["losses"]


def test_batch_order_is_independent_of_other_draws() -> None:

    def loader() -> Iterator[Tensor]:
        for _ in range(3):
            yield torch.randperm(5)

    torch.manual_seed(1)
    expected = [batch.tolist() for batch in seeded_batches(loader(), 7)]
    torch.manual_seed(2)
    before = torch.rand(1)
    got = []
    torch.manual_seed(2)
    for batch in seeded_batches(loader(), 7):
        got.append(batch.tolist())
        nn.functional.dropout(torch.ones(3))
    assert got == expected
    torch.manual_seed(2)
    next(seeded_batches(loader(), 7))
    assert torch.equal(torch.rand(1), before)


STORED = """
class Stored(nn.Linear):
    def get_extra_state(self):
        return {}

    def set_extra_state(self, state):
        pass

def build_model():
    model = nn.Sequential(nn.Linear(8, 8), Stored(8, 4))
    model[0].register_buffer("empty", None)
    return model
"""


def test_tensors_that_layers_register_in_training_are_named(tmp_path: Path) -> None:
    """An empty buffer, a tensor of a new module, and one of a module with extra state."""
    pipeline = Pipeline(balance_of(tmp_path, MODEL + STORED + GROUPS))
    unsaved = UnsavedState(pipeline.modules, pipeline.optimizer(pipeline.model.build_optimizer))
    assert unsaved.late_tensors() == []
    layers = pipeline.modules[0].finished_modules()
    layers["0"].empty = torch.zeros(1)
    layers["0"].more = nn.PReLU()
    layers["1"].register_buffer("late", torch.zeros(1))
    pipeline.close()
    assert unsaved.late_tensors() == ["0.empty", "0.more.weight", "1.late"]
    assert unsaved.late_tensors() == []
