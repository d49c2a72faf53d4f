"""Profiles of TPUs that are not in this machine."""

import pickle
import traceback
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import planner
from benchmarks.tpu_composition import RUNS, compare, compiled_bytes, predicted_bytes
from planner.core.errors import MeasurementError, ModelError, UsageError
from planner.core.values.devices import accelerator
from planner.core.values.profile import Profile
from planner.model import LoadedModel, in_precision, load_model, load_module
from planner.model.optimizers import OPTIMIZERS, OptimizerBuilder
from planner.profile.profiler import profile_model
from planner.profile.structure import find_chain
from planner.profile.task import ProfilerOptions
from planner.profile.units import trace_layers
from planner.tpu import compiler as tpu
from planner.tpu.compiler import Compiler, OutOfMemoryError
from planner.tpu.optimizers import optimizer_rule
from planner.tpu.outcomes import CompiledOptimizerStep

pytestmark = pytest.mark.skipif(find_spec("torchax") is None, reason="needs the extra: pip install 'gpipe-plan[tpu]'")

V2 = ProfilerOptions(micro_batch_sizes=(8, 16), device="tpu:v2")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


PERCEPTRON = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, hidden):
        return hidden + self.down(self.up(hidden).relu())

def build_model():
    return nn.Sequential(*(Layer() for _ in range(4)))

def example_batch(size):
    return torch.randn(size, 256), torch.randn(size, 256)

loss_fn = nn.functional.mse_loss
"""


def perceptron(width: int = 128) -> LoadedModel:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    class Layer(nn.Module):  # no Sequential, whose children would be the layers
        def __init__(self) -> None:
            super().__init__()
            self.inner = layer()

        def forward(self, hidden: Tensor) -> Tensor:
            return hidden + self.inner(hidden)

    model = nn.Sequential(*(Layer() for _ in range(4)))
    return load_module(
        model,
        example_batch=lambda size: (torch.randn(size, width), torch.randn(size, width)),
        loss_fn=nn.functional.mse_loss,
        optimizer="adamw",
    )


def jobs_of(loaded: LoadedModel) -> list[Any]:
    """Return the distinct layers, each with its input of eight samples."""
    chain, lean = find_chain(loaded, torch.device("cpu"))
    units, inputs = trace_layers(chain, loaded, 8, torch.device("cpu"), ghosts=lean)
    return [(unit, inputs[unit.digest]) for unit in units]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list with an entry for each compiled program."""
    from planner.tpu import layer_programs

    calls: list[Any] = []
    compile_program = layer_programs.compile_program

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return compile_program(*args, **kwargs)

    monkeypatch.setattr(layer_programs, "compile_program", counted)
    monkeypatch.setattr(tpu, "_num_workers", lambda _: 1)
    return calls


@pytest.mark.slow
def test_compiled_layers_have_known_bytes_and_operations(composed: tuple[LoadedModel, Profile]) -> None:
    """256 columns and rows need no padding on a TPU."""
    profile = composed[1]
    assert (profile.device.kind, profile.device.how, profile.device.name) == ("tpu", "compiled", "TPU v2 core")
    assert profile.device.memory_bytes == 748 * 2**30 // 100
    assert profile.device.executor.link.bytes_per_s == accelerator("tpu:v2").link.bytes_per_s
    parameters = 4 * (2 * 256 * 1024 + 1024 + 256)
    for layer in profile.layers:
        assert (layer.parameter_bytes, layer.gradient_bytes) == (parameters, parameters)
        assert layer.optimizer_bytes == pytest.approx(2 * parameters, rel=1e-4)
        assert all(us > 0 for us in (*layer.forward_us, *layer.backward_us))
        assert layer.forward_flops[0] == pytest.approx(2 * 256 * 2 * 256 * 1024, rel=0.05)
    _, first, second, last = profile.layers
    assert first.digest == second.digest != last.digest
    # What the ReLU reads, and the output, which the next layer reads.
    # A result of several arrays has a table of its own, up to 1 KiB.
    (saved,) = first.saved_bytes
    assert 0 <= saved - 4 * 256 * (1024 + 256) <= 1024
    assert first.output_bytes == (4 * 256 * 256,)
    # AdamW reads parameter, gradient and two states, and writes all but the gradient.
    assert first.optimizer_us == pytest.approx(1e6 * 7 * parameters / accelerator("tpu:v2").bytes_per_s, rel=0.2)
    # With a step of the optimizer that takes four times as long it would not pay to take turns.
    assert planner.solve(profile, devices=3, mem="tpu:v2", batch=512).micro_batches == 2


@pytest.mark.slow
def test_optimizer_steps_are_compiled_once_and_cached(tmp_path: Path, compiled: list[Any]) -> None:
    """A norm's step costs next to nothing."""
    compiler = Compiler("v2", accelerator("tpu:v2"), tmp_path)
    norm = [torch.empty(192), torch.empty(192)]
    block = [*norm, *norm, *(torch.empty(n * 192, 192) for n in (1, 3, 4)), torch.empty(192, 4 * 192), torch.empty(768)]
    jobs = [norm, block, list(norm)]
    parameters = [nn.Parameter(torch.empty(3))]

    def steps_of(build: OptimizerBuilder) -> dict[int, CompiledOptimizerStep]:
        return dict(compiler.compile_steps("abc", jobs, optimizer_rule(build, parameters)))

    found = steps_of(OPTIMIZERS["adamw"])
    assert len(compiled) == 2
    norms, blocks, again = (found[n].step_us for n in range(3))
    # With a launch for each operator these were 54 and 352.
    assert norms == again < 0.5
    assert 30 < blocks < 60
    assert steps_of(OPTIMIZERS["adamw"]) == found
    assert len(compiled) == 2
    steps_of(lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.0))
    assert len(compiled) == 4


def test_unsupported_optimizers_are_refused_before_compilation() -> None:
    with pytest.raises(UsageError, match="does not support the optimizer Adafactor"):
        profile_model(replace(perceptron(), build_optimizer=OPTIMIZERS["adafactor"]), V2)


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> tuple[LoadedModel, Profile]:
    """Return a model from a file, and its profile at 256 samples."""
    folder = tmp_path_factory.mktemp("composed")
    (folder / "model.py").write_text(PERCEPTRON)
    loaded = load_model(str(folder / "model.py"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        return loaded, profile_model(loaded, replace(V2, micro_batch_sizes=(256,)))


@pytest.mark.slow
def test_memory_composed_of_layers_is_within_10_percent_of_the_program(composed: tuple[LoadedModel, Profile]) -> None:
    """Larger models: docs/measurements/tpu-composition.md."""
    loaded, profile = composed
    for recompute, micro_batches in RUNS[1:]:
        predicted = predicted_bytes(profile, recompute, micro_batches)
        compiled = compiled_bytes(loaded, 256, recompute, micro_batches)
        assert predicted == pytest.approx(compiled, rel=0.1), (recompute, micro_batches)


@pytest.mark.slow
def test_memory_of_a_program_of_several_stages_is_predicted(composed: tuple[LoadedModel, Profile]) -> None:
    """It takes more than its fullest stage."""
    found = compare(composed[1], stages=2, micro_batches=4, recompute="never")
    assert found.fullest < 0.95 * found.compiled
    assert 0.95 * found.compiled < found.predicted < 1.15 * found.compiled


@pytest.mark.slow
def test_recorded_arrays_add_up_to_the_layers_bytes(composed: tuple[LoadedModel, Profile]) -> None:
    for layer in composed[1].layers:
        (program,) = layer.program
        assert sum(array.count * array.plain_bytes for array in program.trained) == layer.parameter_bytes
        assert sum(array.count * array.bytes for array in program.kept) == layer.saved_bytes[0]
        # What a residual connection adds, too, is not narrow.
        assert [(array.plain_bytes, array.loop_bytes) for array in program.received] == [(256 * 256 * 4,) * 2]


@pytest.mark.slow
def test_bf16_halves_parameters_and_saved_bytes() -> None:
    """Autocast is a feature of torch, and is refused."""
    options = replace(V2, micro_batch_sizes=(16,))
    half = profile_model(in_precision(perceptron(), "bf16"), options).layers[1]
    assert half.parameter_bytes == 2 * (2 * 128 * 512 + 512 + 128)
    assert half.saved_bytes[0] == pytest.approx(2 * 16 * (512 + 128), rel=0.05)
    with pytest.raises(UsageError, match="autocast is a feature of torch"):
        profile_model(in_precision(perceptron(), "bf16-mixed"), options)


@pytest.mark.slow
def test_compiled_layers_are_cached(tmp_path: Path, compiled: list[Any]) -> None:
    """An interrupted profile does not compile again what it has compiled."""
    jobs = jobs_of(perceptron())[::2]
    remembering = Compiler("v2", accelerator("tpu:v2"), tmp_path)
    interrupted = remembering.compile_layers(jobs)
    begun = dict([next(interrupted)])
    interrupted.close()
    assert len(compiled) == 4
    finished = dict(remembering.compile_layers(jobs))
    assert len(compiled) == 8
    assert dict(remembering.compile_layers(jobs)) == finished
    assert len(compiled) == 8
    assert finished[0] == begun[0]
    # Another chip is another matter.
    dict(Compiler("v3", accelerator("tpu:v3"), tmp_path).compile_layers(jobs[:1]))
    assert len(compiled) == 12


@pytest.mark.slow
def test_layers_with_dropout_are_compiled() -> None:
    """Their programs take a random key, an array without dimensions."""
    loaded = load_module(
        nn.Sequential(nn.Linear(128, 128), nn.Dropout(0.1), nn.Linear(128, 128)),
        example_batch=lambda size: (torch.randn(size, 128), torch.randn(size, 128)),
        loss_fn=nn.functional.mse_loss,
        optimizer="sgd",
    )
    profile = profile_model(loaded, replace(V2, micro_batch_sizes=(8,)))
    assert [layer.output_bytes for layer in profile.layers[:2]] == [(4 * 8 * 128,)] * 2


def test_a_layer_that_fails_to_compile_keeps_the_traceback_of_its_process(monkeypatch, tmp_path):
    job = jobs_of(perceptron())[0]

    def fails_here(*_: Any) -> Any:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(tpu, "jax_function_of_layer", fails_here)
    monkeypatch.setattr(tpu, "_num_workers", lambda _: 1)
    compiler = Compiler("v2", accelerator("tpu:v2"), tmp_path)
    work = partial(compiler._compiled_unit, *job)
    ((_, problem),) = tpu._run_in_processes([work], num_workers=1)
    assert pickle.loads(pickle.dumps(problem)).args == problem.args
    with pytest.raises(ModelError, match="cannot be compiled for the TPU: IndexError: tuple index") as failed:
        dict(compiler.compile_layers([job]))
    assert "in fails_here" in "".join(traceback.format_exception(failed.value))


@pytest.mark.slow
def test_an_attached_device_is_timed(tmp_path: Path) -> None:
    """Here it is JAX's CPU."""
    compiler = Compiler("", accelerator("tpu:v2"), tmp_path, repeats=3)
    found = dict(compiler.compile_layers(jobs_of(perceptron())[:1]))
    assert all(layer.forward_us > 0 and layer.backward_us > 0 for layer in found.values())
    assert [array.bytes for array in found[0].made_kinds] == [4 * 8 * 512]


def test_without_a_tpu_the_device_is_refused() -> None:
    with pytest.raises(UsageError, match="no TPU on this machine") as refused:
        profile_model(perceptron(), replace(V2, device="tpu"))
    assert "--device tpu:v2" in refused.value.hint


def test_operators_that_torchax_lacks_are_named() -> None:
    def ctc(output: Tensor, target: Tensor) -> Tensor:
        lengths = torch.full((output.shape[0],), 4)
        return nn.functional.ctc_loss(output.log_softmax(2).transpose(0, 1), target, lengths, lengths // 2)

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    loaded = load_module(
        model, example_batch=lambda size: (torch.randn(size, 4, 8), torch.ones(size, 2, dtype=torch.int64)), loss_fn=ctc
    )
    with pytest.raises(ModelError, match=r'cannot translate operators of some layers for the TPU: "1": .*ctc'):
        profile_model(loaded, replace(V2, micro_batch_sizes=(2,)))


@pytest.mark.slow
def test_sizes_beyond_the_tpus_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A requested size is an error instead."""
    import jax

    from planner.tpu import layer_programs

    compile_program = layer_programs.compile_program

    def small_only(function: Any, shapes: Any, *args: Any, **kwargs: Any) -> Any:
        if any(shape.shape[:1] == (16,) for shape in jax.tree.leaves(shapes)):
            raise OutOfMemoryError("Ran out of memory on HBM")
        return compile_program(function, shapes, *args, **kwargs)

    monkeypatch.setattr(layer_programs, "compile_program", small_only)
    monkeypatch.setattr(tpu, "_num_workers", lambda _: 1)
    with pytest.raises(MeasurementError, match="out of memory at micro-batch size 16"):
        profile_model(perceptron(), V2)
    assert profile_model(perceptron(), replace(V2, skip_failing_sizes=True)).micro_batch_sizes == (8,)
