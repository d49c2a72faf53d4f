"""Tests of a pipeline of one stage in one process."""

import gc
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.core.errors import ModelError, UsageError
from planner.core.values.balance import Balance, StageBalance
from planner.core.values.profile import Model
from planner.core.values.run_report import RunReport
from planner.device.meter import CpuMemoryMeter
from planner.executor import Pipeline, ScriptArguments, pipeline_script, progress
from planner.executor.run.placement import ProcessPlace
from planner.files import read_balance, read_run, write
from planner.model.chain import chain_digest, chain_of
from planner.model.load import load_model
from tests.support.cli import BUILD, EXAMPLE, HEAD, LOSS, MODEL, write_model
from tests.support.measure import profile_of_model

OPTIMIZER = "\ndef build_optimizer(parameters):\n    return torch.optim.SGD(parameters, lr=0.1)\n"
FINISHED = BUILD + "model = build_model()\ndel build_model\n"


pytestmark = pytest.mark.usefixtures("one_process")


def balance_of(folder: Path, text: str = MODEL + OPTIMIZER, *, entry: str = "build_model", num_stages: int = 1) -> Path:
    """Write a balance.yaml next to a model file with this text."""
    path = write_model(folder, text)
    names = chain_of(load_model(f"{path}:{entry}").build()).names
    sizes = [len(names) - num_stages + 1] + [1] * (num_stages - 1)
    stages, first = [], 0
    for index, size in enumerate(sizes):
        stages.append(StageBalance(index=index, recompute="never", layers=names[first : first + size]))
        first += size
    balance = Balance(
        plan_digest="sha256:plan",
        model=Model(source=f"model.py:{entry}"),
        schedule="gpipe",
        batch=8,
        micro_batches=4,
        balance=tuple(sizes),
        stages=tuple(stages),
    )
    write(str(folder / "balance.yaml"), balance)
    return folder / "balance.yaml"


def edit(path: Path, **changes: Any) -> None:
    """Change values of a balance file."""
    write(str(path), replace(read_balance(str(path)), **changes))


def train(path: Path, *, steps: int = 3, seed: int = 0) -> tuple[RunReport, dict[str, torch.Tensor]]:
    """Train; return the report and the final parameters."""
    pipeline = Pipeline(path, seed=seed)
    try:
        optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
        for inputs, targets in pipeline.batches(steps):
            with pipeline.step(inputs, targets):
                optimizer.step()
                optimizer.zero_grad()
        report = pipeline.report()
        assert report is not None
        return report, {name: p.detach().clone() for name, p in pipeline.named_parameters()}
    finally:
        pipeline.close()


def unpipelined(path: Path, *, steps: int, seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and parameters of the same training without a pipeline."""
    loaded = load_model(str(path))
    torch.manual_seed(seed)
    model = loaded.build()
    optimizer = loaded.build_optimizer(model.parameters())
    losses = []
    for step in range(steps):
        torch.manual_seed(seed * 1_000_003 + step)
        batch = loaded.example_batch(8)
        loss = loaded.loss_fn(model(batch.inputs), batch.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("seed", [0, 7])
def test_training_equals_that_of_the_seeded_model(tmp_path: Path, seed: int) -> None:
    report, parameters = train(balance_of(tmp_path), steps=4, seed=seed)
    losses, expected = unpipelined(tmp_path / "model.py", steps=4, seed=seed)
    assert report.losses == pytest.approx(losses, abs=1e-6)
    assert parameters.keys() == expected.keys()
    assert all(torch.allclose(parameters[name], value, atol=1e-6) for name, value in expected.items())
    assert report.losses[-1] != report.losses[0]


@pytest.mark.parametrize(
    ("text", "entry"), [(MODEL + OPTIMIZER, "build_model"), (HEAD + FINISHED + EXAMPLE + LOSS + OPTIMIZER, "model")]
)
def test_runs_with_the_same_seed_are_bit_for_bit_equal(tmp_path: Path, text: str, entry: str) -> None:
    path = balance_of(tmp_path, text, entry=entry)
    torch.manual_seed(100)
    one, parameters = train(path, seed=3)
    torch.manual_seed(200)
    two, again = train(path, seed=3)
    assert one.losses == two.losses
    assert all(torch.equal(again[name], value) for name, value in parameters.items())


def test_the_report_has_losses_times_memory_and_names(tmp_path: Path) -> None:
    path = balance_of(tmp_path)
    gc.collect()  # tensors of other tests in this process, freed while memory is recorded, would count as this run's
    report, parameters = train(path, steps=4, seed=5)
    assert (report.plan_digest, report.seed, len(report.losses), len(report.step_us)) == ("sha256:plan", 5, 4, 4)
    (stage,) = report.stages
    assert (stage.index, stage.first, stage.last) == (0, "0", "4")
    assert stage.parameter_bytes == sum(p.nbytes for p in parameters.values())
    assert stage.peak_bytes > 2 * stage.parameter_bytes  # parameters, gradients, something to compute on
    assert stage.forward_us > 0 < stage.backward_us
    write(str(tmp_path / "run.json"), report)
    assert len(read_run(str(tmp_path / "run.json")).losses) == 4


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(MODEL.replace("nn.ReLU()", "nn.ReLU(inplace=True)"), id="in place"),
        pytest.param(MODEL.replace("nn.ReLU()", "nn.Dropout(0.5)"), id="dropout"),
        pytest.param(MODEL.replace(".mean()", ".mean().reshape(1)"), id="loss of shape [1]"),
        pytest.param(
            MODEL.replace("nn.ReLU()", "Masked()", 1)
            + "class Masked(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            + "        self.mask = torch.ones(16).cumsum(0)\n    def forward(self, value): return value * self.mask\n",
            id="tensor that is no buffer",
        ),
        pytest.param(
            MODEL.replace(
                "return nn.Seq", "p = [r.item() for r in torch.linspace(0, 0.2, 3)]\n    return nn.Seq"
            ).replace("nn.ReLU()", "nn.Dropout(p[1])"),
            id="rates from a tensor",
        ),
    ],
)
def test_models_that_can_be_profiled_can_be_trained(tmp_path: Path, text: str) -> None:
    path = balance_of(tmp_path, text + OPTIMIZER)
    assert len(profile_of_model(load_model(str(tmp_path / "model.py"))).layers) == 5
    report, _ = train(path, steps=2)
    assert len(report.losses) == 2


def test_train_batches_is_called_again_when_exhausted(tmp_path: Path) -> None:
    """Endless batches are limited."""
    text = (
        MODEL
        + OPTIMIZER
        + "def train_batches(n): return [(torch.full((n, 8), k), torch.zeros(n, 4)) for k in (0.0, 1.0)]\n"
    )
    pipeline = Pipeline(balance_of(tmp_path, text))
    seen = [float(batch.inputs[0, 0]) for batch in pipeline.batches(5)]
    pipeline.close()
    assert seen == [0.0, 1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("batch", "told"),
    [({"x": 1, "labels": 2}, "dict"), (torch.ones(2, 8), "Tensor"), ((1, 2, 3), "tuple of 3"), (5, "int")],
)
def test_mini_batches_that_are_no_pair_are_refused(tmp_path: Path, batch: object, told: str) -> None:
    pipeline = Pipeline(balance_of(tmp_path))
    with pytest.raises(UsageError, match=rf"got a {told} as mini-batch, expected a pair \(inputs, targets\)"):
        next(iter(pipeline.batches(1, [batch])))
    pipeline.close()


def test_a_none_among_train_batches_does_not_end_the_run(tmp_path: Path) -> None:
    """The loop would end early, with exit code 0."""
    text = MODEL + OPTIMIZER + "def train_batches(n): return [(torch.zeros(n, 8), torch.zeros(n, 4)), None]\n"
    pipeline = Pipeline(balance_of(tmp_path, text))
    with pytest.raises(UsageError, match="got a NoneType as mini-batch"):
        list(pipeline.batches(3))
    pipeline.close()


def test_empty_train_batches_are_reported(tmp_path: Path) -> None:
    pipeline = Pipeline(balance_of(tmp_path, MODEL + OPTIMIZER + "def train_batches(n): return []\n"))
    with pytest.raises(ModelError, match="`train_batches` is empty"):
        list(pipeline.batches(1))
    pipeline.close()


def test_example_batches_do_not_change_the_random_state(tmp_path: Path) -> None:
    pipeline = Pipeline(balance_of(tmp_path), seed=2)
    state = torch.get_rng_state()
    one, two, other = (pipeline.example_batch(step) for step in (1, 1, 2))
    pipeline.close()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.inputs, two.inputs)
    assert not torch.equal(one.inputs, other.inputs)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (9, 9, "got a mini-batch of 9 samples, the plan is for 8"),
        (0, 0, "tensors hold 0 samples"),
        (8, 6, "tensors hold 6 and 8 samples"),
    ],
)
def test_invalid_batches_are_refused_before_running(tmp_path: Path, inputs: int, targets: int, message: str) -> None:
    pipeline = Pipeline(balance_of(tmp_path))
    with (
        pytest.raises(UsageError, match=message) as refused,
        pipeline.step(torch.randn(inputs, 8), torch.randn(targets, 4)),
    ):
        pytest.fail("ran")
    assert refused.value.hint
    pipeline.close()


def test_a_last_batch_too_small_for_a_layer_is_refused(tmp_path: Path) -> None:
    """Batch norm has no statistics of one sample. Refused before anything runs, and only in training."""
    text = MODEL.replace("nn.ReLU()", "nn.BatchNorm1d(16)", 1)
    pipeline = Pipeline(balance_of(tmp_path, text + OPTIMIZER))
    with pytest.raises(ModelError, match="the last 1 samples of a mini-batch") as refused:
        pipeline.step(torch.randn(5, 8), torch.randn(5, 4)).__enter__()
    assert "drop_last" in refused.value.hint
    assert pipeline.evaluate(torch.randn(5, 8), torch.randn(5, 4)) is not None
    pipeline.close()


def test_a_parameter_that_a_later_forward_replaces_is_refused(tmp_path: Path) -> None:
    """Another stage may have the new one, which would then be trained on one rank only."""
    pipeline = Pipeline(balance_of(tmp_path))
    for step in range(3):
        with pipeline.step(*pipeline.example_batch(step)):
            pass
    first = next(module for module in pipeline.modules[0].modules() if isinstance(module, nn.Linear))
    kept, first.weight = first.weight, nn.Parameter(first.weight.detach().clone())
    with pytest.raises(UsageError, match="has added the parameter"):
        pipeline.end_loop()
    first.weight = kept
    pipeline.close()


def test_evaluation_changes_no_state(tmp_path: Path) -> None:
    text = MODEL.replace("nn.ReLU()", "nn.Sequential(nn.BatchNorm1d(16), nn.BatchNorm1d(16).eval(), nn.Dropout(0.5))")
    path = balance_of(tmp_path, text + OPTIMIZER)
    pipeline = Pipeline(path, seed=1)
    loaded = pipeline.model
    torch.manual_seed(1)
    model = loaded.build()
    before = {name: value.clone() for name, value in pipeline.modules[0].state_dict().items()}
    state = torch.get_rng_state()
    for size in (19, 8, 1):
        inputs, targets = torch.randn(size, 8), torch.randn(size, 4)
        torch.set_rng_state(state)
        expected = float(loaded.loss_fn(model.eval()(inputs), targets).detach())
        assert pipeline.evaluate(inputs, targets) == pytest.approx(expected, rel=1e-6)
        assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in pipeline.modules[0].state_dict().items())
    assert [m.training for m in pipeline.modules[0].modules() if isinstance(m, nn.BatchNorm1d)] == 2 * [True, False]
    assert all(p.grad is None for _, p in pipeline.named_parameters())
    assert (pipeline.losses, pipeline.step_index) == ([], 0)
    pipeline.close()


def test_several_stages_of_one_device_are_evaluated(tmp_path: Path) -> None:
    """No process group sends messages within a process."""
    path = balance_of(tmp_path, num_stages=2)
    edit(path, schedule="interleaved", chunks=2)
    pipeline = Pipeline(path, seed=1)
    torch.manual_seed(1)
    model = pipeline.model.build().eval()
    inputs, targets = torch.randn(11, 8), torch.randn(11, 4)
    result = pipeline.evaluate(inputs, targets, outputs=True)
    assert torch.allclose(result.outputs, model(inputs).detach())
    assert result.loss == pytest.approx(float(pipeline.model.loss_fn(model(inputs), targets).detach()), rel=1e-6)
    pipeline.close()


def test_evaluation_gives_outputs_and_metrics(tmp_path: Path) -> None:
    """Means over samples, also with a smaller last micro-batch or without counted targets."""
    text = MODEL + OPTIMIZER + "\ndef loss_count(target):\n    return (target > 0).sum()\n"
    pipeline = Pipeline(balance_of(tmp_path, text), seed=1)
    torch.manual_seed(1)
    model = pipeline.model.build().eval()
    inputs, targets = torch.randn(11, 8), torch.randn(11, 4)
    targets[:2] = -1.0
    seen: list[int] = []

    def metrics(output: torch.Tensor, target: torch.Tensor) -> dict[str, Any]:
        seen.append(len(output))
        return {"error": (output - target).abs().mean(), "rows": len(output)}

    result = pipeline.evaluate(inputs, targets, metrics=metrics, outputs=True)
    expected = model(inputs).detach()
    assert torch.allclose(result.outputs, expected)
    assert not result.outputs.requires_grad
    assert seen == [2, 2, 2, 2, 2, 1]
    assert result.metrics["error"] == pytest.approx(float((expected - targets).abs().mean()), rel=1e-6)
    assert result.metrics["rows"] == pytest.approx((10 * 2 + 1) / 11)
    assert seen == [2, 2, 2, 2, 2, 1]
    plain = pipeline.evaluate(inputs, targets)
    assert plain == result.loss
    assert pipeline.evaluate(inputs, targets, metrics=metrics).outputs is None
    with pytest.raises(UsageError, match="expected a dict of numbers"):
        pipeline.evaluate(inputs, targets, metrics=lambda *pair: pair[0])
    names = iter(range(9))
    with pytest.raises(UsageError, match="for one micro-batch"):
        pipeline.evaluate(inputs, targets, metrics=lambda *_: {str(next(names)): 1})
    assert pipeline.evaluate(inputs, targets) == plain
    pipeline.close()


def test_an_overflow_skips_the_whole_step_of_an_optimizer(tmp_path: Path) -> None:
    """Also what `step()` does without gradients: counting, averaging weights, hooks."""
    path = balance_of(tmp_path, MODEL.replace("return ((", "return SCALE * ((") + OPTIMIZER + "SCALE = 1e30\n")
    edit(path, dtype="fp16-mixed")
    pipeline = Pipeline(path)
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(pipeline.step_index))
    for inputs, targets in pipeline.batches(3):
        sys.modules["gpipe_plan_model_model"].SCALE = 1e30 if pipeline.step_index == 1 else 1.0
        with pipeline.step(inputs, targets):
            optimizer.step()
            optimizer.zero_grad()
    pipeline.close()
    assert steps == [0, 2]


def test_step_index_determines_the_draws_of_a_step(tmp_path: Path) -> None:
    path = balance_of(tmp_path, MODEL.replace("nn.ReLU()", "nn.Dropout(0.5)") + OPTIMIZER)
    losses: list[list[float | None]] = []
    for first in (0, 1):
        pipeline = Pipeline(path, seed=1)
        pipeline.step_index = first
        batch = pipeline.example_batch(0)
        losses.append([])
        for _ in range(3 - first):
            with pipeline.step(*batch) as loss:
                losses[-1].append(loss)
            for _, parameter in pipeline.named_parameters():
                parameter.grad = None
        pipeline.close()
    assert losses[0][1:] == losses[1]
    assert len(set(losses[0])) == 3


HOLDING = """import torch, weakref
from torch import nn
class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 4))
        torch.built.append(weakref.ref(self))
        try:
            self.positive = bool(self[0].weight.sum() > 0)
        except Exception as error:
            kept = error  # as libraries do: it holds this frame, and this frame it
            raise kept
def build_model():
    return Model()
"""


def test_failed_builds_release_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[weakref.ref[nn.Module]] = []
    monkeypatch.setattr(torch, "built", built, raising=False)
    path = balance_of(tmp_path, HOLDING + EXAMPLE + LOSS + OPTIMIZER)
    gc.disable()
    try:
        pipeline = Pipeline(str(path))
        there = [model for model in (reference() for reference in built) if model is not None]
    finally:
        gc.enable()
    own = {id(parameter) for _, parameter in pipeline.named_parameters()}
    others = [p for model in there for p in model.parameters() if not p.is_meta and id(p) not in own]
    assert len(built) > len(there)
    assert others == []


def test_middle_ranks_get_shapes_without_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline(balance_of(tmp_path))
    for name in ("is_first", "is_last"):
        monkeypatch.setattr(ProcessPlace, name, False)
    ((inputs, targets),) = pipeline.batches(1)
    assert (inputs.device.type, targets.device.type) == ("meta", "meta")
    assert (len(inputs), len(targets)) == (8, 8)
    monkeypatch.undo()
    pipeline.close()


def test_no_graph_outlives_a_step(tmp_path: Path) -> None:
    """Neither the engine's list of losses nor anything else keeps what backward has used."""
    pipeline = Pipeline(balance_of(tmp_path))
    alive: list[weakref.ref[torch.Tensor]] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = (output - target).square().mean()
        alive.extend((weakref.ref(output), weakref.ref(loss)))
        return loss

    pipeline.modules[0]._loss_fn = loss_fn
    with pipeline.step(*pipeline.example_batch(0)):
        pass
    assert len(alive) == 8
    assert not any(reference() is not None for reference in alive)
    pipeline.close()


def test_frozen_parameters_keep_their_position(tmp_path: Path) -> None:
    """The optimizer gets them, but does not change them."""
    text = MODEL.replace("return nn.Sequential(", "model = nn.Sequential(") + OPTIMIZER
    text = text.replace(
        "\ndef example_batch", "    model[0].requires_grad_(False)\n    return model\n\ndef example_batch", 1
    )
    pipeline = Pipeline(balance_of(tmp_path, text))
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    before = {name: p.detach().clone() for name, p in pipeline.named_parameters()}
    with pipeline.step(*pipeline.example_batch(0)):
        optimizer.step()
    changed = [name for name, p in pipeline.named_parameters() if not torch.equal(p, before[name])]
    pipeline.close()
    assert [p.numel() for p in optimizer.param_groups[0]["params"]] == [128, 16, 256, 16, 64, 4]
    assert changed == ["2.weight", "2.bias", "4.weight", "4.bias"]


def test_a_model_without_parameters_gets_an_optimizer(tmp_path: Path) -> None:
    """Optimizers of torch refuse an empty list."""
    text = HEAD + "def build_model(): return nn.Sequential(nn.ReLU(), nn.Tanh())\n" + EXAMPLE + LOSS + OPTIMIZER
    text = text.replace("torch.randn(batch_size, 4)", "torch.randn(batch_size, 8)")
    pipeline = Pipeline(balance_of(tmp_path, text))
    optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
    pipeline.close()
    assert [group["params"] for group in optimizer.param_groups] == [[]]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("int = 16", "int = 24", "the model has changed since it was planned"),
        ("nn.Linear(8, width), nn.ReLU()", "nn.Linear(8, width)", "it has 4 layers, the plan has 5"),
    ],
)
def test_a_changed_model_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    """Other layers by name, other shapes by digest."""
    path = balance_of(tmp_path)
    loaded = load_model(str(tmp_path / "model.py"))
    digest = chain_digest(chain_of(loaded.build()), {})
    edit(path, model=Model(source="model.py:build_model", digest=digest))
    Pipeline(path).close()
    write_model(tmp_path, MODEL.replace(old, new) + OPTIMIZER)
    with pytest.raises(ModelError) as refused:
        Pipeline(path)
    assert message in str(refused.value)


def test_a_refusal_leaves_no_process_group_or_recording(tmp_path: Path) -> None:
    path = balance_of(tmp_path)
    edit(path, model=Model(source="model.py:build_model", digest="sha256:other"))
    with pytest.raises(ModelError) as refused:
        Pipeline(path)
    assert CpuMemoryMeter().measure(lambda: None).peak_bytes == 0
    assert not dist.is_initialized()
    assert refused.value.hint


def test_a_wrong_number_of_processes_is_refused_with_a_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"needs 2 processes \(2 stages\), but 1 process was started") as refused:
        Pipeline(balance_of(tmp_path, num_stages=2))
    assert "--nproc-per-node 2" in refused.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_gpu_is_reported_with_an_alternative(tmp_path: Path) -> None:
    path = balance_of(tmp_path)
    edit(path, device="cuda")
    with pytest.raises(UsageError, match="the plan is for CUDA") as refused:
        Pipeline(path)
    assert "--device cpu" in refused.value.hint
    pipeline = Pipeline(path, device="cpu")
    assert pipeline.device.type == "cpu"
    pipeline.close()


# The script's frame


def command_line(**changes: Any) -> ScriptArguments:
    return ScriptArguments(**{"steps": 2, "seed": 0, "report": None, "device": None, **changes})


def run_script(path: Path, arguments: ScriptArguments, body: Callable[[Pipeline], None] = lambda _: None) -> None:
    """Run an emitted script's code."""
    with pipeline_script(path, arguments) as pipeline:
        optimizer = pipeline.optimizer(pipeline.model.build_optimizer)
        for step, (inputs, targets) in enumerate(pipeline.batches(arguments.steps)):
            with pipeline.step(inputs, targets) as loss:
                optimizer.step()
                optimizer.zero_grad()
            progress(pipeline, step, loss)
        body(pipeline)


def test_scripts_print_steps_peaks_and_the_name_of_the_report(tmp_path, capsys):
    report = tmp_path / "run.json"
    run_script(balance_of(tmp_path), command_line(steps=3, report=str(report)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[:4]] == ["step 0", "step 1", "step 2", "stage 0"]
    assert lines[4] == f"wrote {report}"
    assert len(read_run(str(report)).losses) == 3


@pytest.mark.parametrize("option", ["report", "trace"])
def test_unwritable_outputs_end_a_script_before_training(tmp_path, capsys, option):
    with pytest.raises(SystemExit) as ended:
        run_script(balance_of(tmp_path), command_line(steps=3, **{option: str(tmp_path)}))
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert f"error: {tmp_path}: is a directory" in said.err
    assert "step 0" not in said.out


def test_speed_counts_the_samples_of_smaller_mini_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "run.json"
    epoch = "\ndef train_batches(size):\n    yield example_batch(size)\n    yield example_batch(3)\n"
    run_script(balance_of(tmp_path, MODEL + OPTIMIZER + epoch), command_line(steps=4, report=str(report)))
    run = read_run(str(report))
    for size, line, took_us, per_s in zip(
        (8, 3, 8, 3), capsys.readouterr().out.splitlines(), run.step_us, run.samples_per_s, strict=False
    ):
        assert per_s == pytest.approx(size / took_us * 1e6, rel=1e-3)
        speed = line.split()[-2].replace(",", "")
        assert float(speed) == pytest.approx(size / took_us * 1e6, rel=1e-2)


def test_own_errors_are_one_message_with_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run_script(balance_of(tmp_path, num_stages=2), command_line())
    err = capsys.readouterr().err
    assert left.value.code == 2
    assert err.startswith(
        "error: the plan needs 2 processes (2 stages), but 1 process was started\n\nhint: run `torchrun "
    )

    def broken(_pipeline: Pipeline) -> None:
        raise UsageError("something of ours")

    with pytest.raises(SystemExit):
        run_script(balance_of(tmp_path), command_line(), broken)
    assert "error: something of ours" in capsys.readouterr().err
    assert not dist.is_initialized()


def test_user_errors_show_lines_of_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:

    def broken(_pipeline: Pipeline) -> None:
        raise ZeroDivisionError("by nothing")

    with pytest.raises(SystemExit) as left:
        run_script(balance_of(tmp_path), command_line(), broken)
    err = capsys.readouterr().err
    assert left.value.code == 2
    assert err.startswith("error: stage 0 (layers 0 to 4) failed between steps: ZeroDivisionError: by nothing\n  File ")
    assert 'raise ZeroDivisionError("by nothing")' in err
    assert "planner/executor" not in err
    assert not dist.is_initialized()


def test_a_missing_second_gpu_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = balance_of(tmp_path, num_stages=2)
    edit(path, device="cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    with pytest.raises(UsageError, match="has 1 CUDA devices for rank 1"):
        Pipeline(path)


def test_parameter_names_are_those_of_the_model(tmp_path: Path) -> None:
    pipeline = Pipeline(balance_of(tmp_path))
    names = [name for name, _ in pipeline.named_parameters()]
    model: nn.Module = pipeline.model.build()
    pipeline.close()
    assert names == [name for name, _ in model.named_parameters()]
    assert pipeline.is_first
    assert pipeline.is_last
