"""Profiles of models: times, costs, one measurement per distinct layer, and the untouched model."""

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from planner.core.cost.workload import workload_of
from planner.core.errors import ModelError, UsageError
from planner.core.values.profile import Profile, TiedGroup
from planner.device.clock import CpuClock, median_us
from planner.device.meter import CpuMemoryMeter
from planner.model.chain import chain_digest, chain_of
from planner.model.load import Batch, LoadedModel
from planner.model.optimizers import WholeModelOptimizer
from planner.profile import records
from planner.profile.optimizer import measure_optimizer
from planner.profile.profiler import check_optimizer_of, profile_model
from planner.profile.task import ProfilerOptions
from planner.profile.units import trace_layers
from tests.support.measure import loaded_model, profile_of_model


class Attention(nn.Module):
    """Fused attention with its projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        parts = self.query_key_value(value).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return scaled_dot_product_attention(*parts.unbind(0), is_causal=True).transpose(1, 2).flatten(2)


def deep(layers: int = 6, width: int = 16) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 4))


# One measurement per distinct layer


def test_equal_layers_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """14 layers of 4 kinds at two sizes need 8 measurements."""
    measured: list[tuple[str, int]] = []
    measure = records.measure_memory

    def counted(unit: Any, given: Any, *rest: Any) -> Any:
        measured.append((unit.name, given.values[0].shape[0]))
        return measure(unit, given, *rest)

    monkeypatch.setattr(records, "measure_memory", counted)
    profile = profile_of_model(loaded_model(deep()), sizes=(1, 2))
    assert len(profile.layers) == 14
    assert len(measured) == len(set(measured)) == 8
    assert sorted(size for _, size in measured) == [1] * 4 + [2] * 4
    digests = [layer.digest for layer in profile.layers]
    assert len(set(digests)) == 4
    for n in range(3, 13):
        assert replace(profile.layers[n], name="") == replace(profile.layers[n - 2], name="")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(lambda: nn.Linear(16, 16), lambda: nn.Linear(16, 16, bias=False), id="bias"),
        pytest.param(nn.ReLU, nn.Tanh, id="operator"),
        pytest.param(nn.ReLU, lambda: nn.ReLU(inplace=True), id="in place"),
        pytest.param(lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2), id="number"),
        pytest.param(lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.1).eval(), id="mode"),
        pytest.param(lambda: nn.Linear(16, 16), lambda: nn.Linear(16, 16).requires_grad_(False), id="frozen"),
        pytest.param(lambda: Block(recomputes=False), lambda: Block(recomputes=True), id="checkpointed by the user"),
    ],
)
def test_different_layers_have_different_digests(one: Callable[[], nn.Module], other: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), one(), other(), one(), nn.Linear(16, 4))
    digests = [layer.digest for layer in profile_of_model(loaded_model(model)).layers]
    assert digests[1] == digests[3] != digests[2]


class Block(nn.Module):
    """Recomputes itself if `recomputes` is set."""

    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, value: Tensor) -> Tensor:
        if not self.recomputes:
            return self.layers(value)
        return checkpoint(self.layers, value, use_reentrant=False)


class Scaling(nn.Module):
    """Scales the first input of some blocks by a parameter of the model."""

    class Pair(nn.Linear):
        def forward(self, value: Tensor, other: Tensor) -> Tensor:
            return super().forward(value) + other

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(self.Pair(16, 16) for _ in range(5))

    def forward(self, value: Tensor) -> Tensor:
        value = first = self.first(value)
        scaled = first * self.scale
        for n, block in enumerate(self.blocks):
            value = block(value, scaled if n < 3 else first)
        return self.last(value)


def test_a_parameter_read_by_code_before_a_layer_belongs_to_the_layer() -> None:
    layers = {layer.name: layer for layer in profile_of_model(loaded_model(Scaling())).layers}
    scaled, plain = layers["blocks.1"], layers["blocks.3"]
    assert scaled.parameter_bytes == plain.parameter_bytes + 16 * 4
    assert scaled.digest == layers["blocks.2"].digest != plain.digest == layers["blocks.4"].digest


def test_the_same_layer_on_another_shape_has_another_digest() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.ReLU(), nn.Linear(4, 4))
    digests = [layer.digest for layer in profile_of_model(loaded_model(model)).layers]
    assert digests[1] != digests[3]


def test_profiles_of_one_model_differ_in_times_only() -> None:
    def timeless(profile: Profile) -> Profile:
        layers = tuple(
            replace(
                layer,
                forward_us=(),
                backward_us=(),
                backward_input_us=(),
                backward_weight_us=(),
                spread=(),
                optimizer_us=0.0,
            )
            for layer in profile.layers
        )
        return replace(profile, layers=layers, fast_round_ratio=1.0, slow_round_ratio=1.0)

    one, two = (profile_of_model(loaded_model(deep), sizes=(1, 3)) for _ in range(2))
    assert timeless(one) == timeless(two)
    assert len({layer.digest for layer in one.layers}) == 4


# The model is left as it was


class Counting(nn.Module):
    """Writes a buffer in place, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, value: Tensor) -> Tensor:
        self.calls += 1
        return value + torch.rand(16)


class Averaging(nn.Module):
    """Replaces a buffer by a new tensor in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(16))

    def forward(self, value: Tensor) -> Tensor:
        self.average = self.average * 0.9 + value.detach().mean(0) * 0.1
        return value


def stateful() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.BatchNorm1d(16),
        Counting(),
        nn.Dropout(0.5),
        nn.BatchNorm1d(16).eval(),
        nn.Linear(16, 16).requires_grad_(False),
        nn.ReLU(inplace=True),
        nn.Linear(16, 4),
    )


def test_profiling_leaves_the_model_untouched() -> None:
    model = stateful()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    objects = {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    flags = {name: module.training for name, module in model.named_modules()}
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    torch_state, python_state = torch.get_rng_state(), random.getstate()

    profile_of_model(loaded_model(model), sizes=(2, 3))

    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained
    assert not any(module._forward_hooks or module._backward_hooks for module in model.modules())
    after = model.state_dict()
    assert [name for name, value in state.items() if not torch.equal(after[name], value)] == []
    assert {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())} == objects
    assert all(parameter.grad is None for parameter in model.parameters())


def test_existing_gradients_are_untouched() -> None:
    model = stateful()
    model(torch.randn(4, 8)).sum().backward()
    gradients = {name: (p.grad, None if p.grad is None else p.grad.clone()) for name, p in model.named_parameters()}
    assert {grad is None for grad, _ in gradients.values()} == {True, False}

    profile_of_model(loaded_model(model), sizes=(2,))

    now = {name: p.grad for name, p in model.named_parameters()}
    assert [name for name, (grad, _) in gradients.items() if now[name] is not grad] == []
    assert [n for n, (_, value) in gradients.items() if value is not None and not torch.equal(now[n], value)] == []


def test_buffers_that_forward_replaces_are_restored() -> None:
    model = nn.Sequential(nn.Linear(8, 16), Averaging())
    before = model[1].average
    profile_of_model(loaded_model(model), sizes=(2,))
    assert torch.equal(model[1].average, torch.zeros(16))
    assert model[1].average is before


def test_a_failing_profile_leaves_the_model_untouched() -> None:
    model = stateful()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    calls = 0

    def failing(_output: Any, _target: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ValueError
        return _output.mean()

    with pytest.raises((ValueError, ModelError)):
        profile_of_model(loaded_model(model, loss_fn=failing), sizes=(2,))
    assert calls == 5
    after = model.state_dict()
    assert [name for name, value in state.items() if not torch.equal(after[name], value)] == []


# Times


@pytest.mark.nightly
def test_layer_times_add_up_to_the_models_time() -> None:
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(512, 512), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(512, 8))
    loaded = loaded_model(model, 512)
    clock = CpuClock(1)
    ratios = []
    for _ in range(4):  # another process may be in the way of any one try
        profile = profile_of_model(loaded, sizes=(64,), repeats=6)
        summed = sum(layer.forward_us[0] + layer.backward_us[0] for layer in profile.layers)
        inputs = loaded.example_batch(64).inputs
        whole = min(clock.time_us(lambda x=inputs: loaded.loss_fn(model(x), None).backward()) for _ in range(8))
        ratios.append(summed / whole)
        if 0.7 < ratios[-1] < 1.3:
            return
    pytest.fail(f"sum of layers over whole model: {ratios}")


@pytest.mark.nightly
def test_times_and_spreads_are_finite_and_grow_with_work() -> None:
    model = nn.Sequential(nn.Linear(8, 1024), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 4))
    profile = profile_of_model(loaded_model(model), sizes=(1, 64), repeats=4)
    for layer in profile.layers:
        assert len(layer.forward_us) == len(layer.backward_us) == len(layer.spread) == 2
        assert all(time > 0 and math.isfinite(time) for time in (*layer.forward_us, *layer.backward_us))
        assert all(spread >= 0 and math.isfinite(spread) for spread in layer.spread)
    big, relu = profile.layers[1], profile.layers[2]
    assert big.forward_us[1] > relu.forward_us[1]
    assert big.forward_us[1] > big.forward_us[0]


def test_a_frozen_backbone_has_no_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 4))
    for layer in list(model)[:3]:
        layer.requires_grad_(False)
    loaded = loaded_model(model, build_optimizer=lambda p: torch.optim.Adam(p, lr=0.1))
    layers = profile_of_model(loaded).layers
    assert [layer.backward_us[0] > 0 for layer in layers] == [False, False, False, True]
    assert [layer.saved_bytes[0] for layer in layers[:2]] == [0, 0]
    assert [layer.gradient_bytes for layer in layers] == [0, 0, 0, 4 * (16 * 4 + 4)]
    assert [layer.optimizer_bytes > 0 for layer in layers] == [False, False, False, True]
    assert layers[0].parameter_bytes == 4 * (8 * 16 + 16)


def test_one_thread_is_timed_by_process_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes cannot lengthen it. Several threads are timed by wall time."""
    for name, step_ns in (("process_time_ns", 1000), ("perf_counter_ns", 5000)):
        monkeypatch.setattr(time, name, partial(next, count(step=step_ns)))
    assert [CpuClock(threads).time_us(lambda: None) for threads in (1, 2)] == [1.0, 5.0]
    assert median_us([3.0, 1.0, 2.0]) == 2.0


# Costs by formula


def test_bytes_and_flops_of_linear_layers() -> None:
    profile = profile_of_model(loaded_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))), sizes=(3, 5))
    first, relu, last = profile.layers
    assert (first.parameter_bytes, first.gradient_bytes) == (4 * (8 * 16 + 16), 4 * (8 * 16 + 16))
    assert first.forward_flops == (2 * 3 * 8 * 16, 2 * 5 * 8 * 16)
    assert last.forward_flops == (2 * 3 * 16 * 4, 2 * 5 * 16 * 4)
    assert relu.forward_flops == (0, 0)
    assert first.output_bytes == relu.output_bytes == (4 * 3 * 16, 4 * 5 * 16)
    assert relu.parameter_bytes == relu.buffer_bytes == 0
    assert profile.model.parameters == 8 * 16 + 16 + 16 * 4 + 4


def test_flops_of_attention() -> None:
    """Projections 2·b·t·d·3d, scores and weighted sum 2·2·b·t·t·d."""
    batch, tokens, width = 2, 12, 32
    loaded = loaded_model(
        nn.Sequential(Attention(width, 4), nn.Linear(width, 4)), lambda b: torch.randn(b, tokens, width)
    )
    attention = profile_of_model(loaded, sizes=(batch,)).layers[0]
    assert attention.forward_flops == (2 * batch * tokens * width * 3 * width + 4 * batch * tokens * tokens * width,)


def test_a_layer_that_cannot_be_traced_has_no_flops() -> None:
    """Planning does not need them."""

    class Dict(nn.Module):
        def forward(self, value: Tensor) -> dict[str, Any]:
            return {"value": value * 2, "number": 3}

    class Undict(nn.Module):
        def forward(self, value: dict[str, Any]) -> Tensor:
            return value["value"] * value["number"]

    layers = profile_of_model(loaded_model(nn.Sequential(nn.Linear(8, 8), Dict(), Undict()))).layers
    assert layers[0].forward_flops[0] > 0
    assert layers[1].forward_flops == (0,)


def test_buffers_tied_bytes_and_tokens_are_recorded() -> None:
    embedding, head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.BatchNorm1d(6), nn.Flatten(0, 1), head)
    profile = profile_of_model(loaded_model(model, lambda b: torch.randint(50, (b, 6))))
    layers = profile.layers
    assert profile.model.sample_tokens == workload_of(profile).tokens == 6
    assert layers[1].buffer_bytes == 2 * 4 * 6 + 8 + 24 * 6
    assert (layers[0].tied, layers[0].tied_bytes) == (("3.weight",), 4 * 50 * 8)
    assert (layers[3].tied, layers[3].tied_bytes) == (("0.weight",), 4 * 50 * 8)
    assert layers[1].tied == ()
    assert layers[3].tied_groups == ()  # all of it with one layer
    assert [layer.tied_view_bytes for layer in layers] == [0, 0, 0, 4 * 50 * 8]


def test_tied_bytes_are_grouped_by_the_other_layers() -> None:
    layers = [nn.Linear(8, 8) for _ in range(3)]
    layers[2].weight, layers[2].bias = layers[0].weight, layers[1].bias
    last = profile_of_model(loaded_model(nn.Sequential(*layers))).layers[2]
    assert last.tied_groups == (TiedGroup(layers=("0",), bytes=256), TiedGroup(layers=("1",), bytes=32))


def test_running_statistics_have_an_update_time() -> None:
    norm = nn.BatchNorm1d(16, affine=False)
    layers = profile_of_model(loaded_model(nn.Sequential(nn.Linear(8, 16), norm, nn.ReLU()))).layers
    assert layers[1].parameter_bytes == 0
    assert layers[1].optimizer_us > 0
    assert layers[2].optimizer_us == 0
    assert "forward" not in vars(norm)


# Optimizers

Build = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@pytest.mark.parametrize(
    ("build", "numbers", "peak"),
    [
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1), 0, 0, id="sgd"),
        pytest.param(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1, 0, id="momentum"),
        pytest.param(lambda p: torch.optim.Adam(p, lr=0.1, foreach=False), 2, 2, id="adam"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True), 2, 2, id="adamw foreach"),
        pytest.param(lambda p: torch.optim.AdamW(p, lr=0.1, fused=True), 2, 0, id="adamw fused"),
        pytest.param(lambda p: torch.optim.RMSprop(p, lr=0.1), 1, 2, id="rmsprop"),
    ],
)
def test_optimizer_state_and_peak_per_parameter(build: Build, numbers: int, peak: int) -> None:
    module = nn.Linear(256, 256, bias=False)
    cost = measure_optimizer(
        module, WholeModelOptimizer(build, module.parameters()), meter=CpuMemoryMeter(), clock=CpuClock(1), repeats=2
    )
    size = 4 * 256 * 256
    assert numbers * size <= cost.state_bytes <= numbers * size + 64
    assert cost.peak_bytes <= peak * size + 1024
    assert cost.step_us > 0
    assert all(p.grad is None for p in module.parameters())


def test_frozen_layers_have_no_optimizer_cost() -> None:
    for module in (nn.ReLU(), nn.Linear(8, 8).requires_grad_(False)):
        cost = measure_optimizer(
            module,
            WholeModelOptimizer(torch.optim.Adam, module.parameters()),
            meter=CpuMemoryMeter(),
            clock=CpuClock(1),
            repeats=2,
        )
        assert (cost.state_bytes, cost.peak_bytes, cost.step_us) == (0, 0, 0.0)


def test_a_parameter_without_elements_has_a_state_of_no_size() -> None:
    module = nn.ParameterList([torch.empty(0, 8)])
    whole = WholeModelOptimizer(torch.optim.SGD, module.parameters())
    adam = WholeModelOptimizer(lambda p: torch.optim.Adam(p, lr=0.1), module.parameters())
    costs = [measure_optimizer(module, w, meter=CpuMemoryMeter(), clock=CpuClock(1), repeats=2) for w in (whole, adam)]
    assert [cost.state_bytes for cost in costs] == [0, 4]  # the number of steps


def test_measuring_the_optimizer_does_not_train_the_model() -> None:
    module = nn.Linear(8, 8)
    before = module.weight.detach().clone()
    whole = WholeModelOptimizer(lambda p: torch.optim.SGD(p, lr=1.0), module.parameters())
    measure_optimizer(module, whole, meter=CpuMemoryMeter(), clock=CpuClock(1), repeats=2)
    assert torch.equal(module.weight, before)


def test_optimizer_state_depends_on_a_parameters_position() -> None:
    """Builders may choose parameters by position, so equal layers can differ."""

    def last(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adam(list(parameters)[-2:], lr=0.1)

    def by_number(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        given = list(parameters)
        return torch.optim.SGD([{"params": given[:4]}, {"params": [given[4], given[7]], "momentum": 0.9}], lr=0.1)

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    for build, expected in ((last, (0, 0, 0, 2 * 4 * 72 + 8)), (by_number, (0, 0, 4 * 64, 4 * 8))):
        profile = profile_of_model(loaded_model(model, 8, build_optimizer=build))
        assert tuple(layer.optimizer_bytes for layer in profile.layers) == expected
        assert profile.layers[1].digest == profile.layers[2].digest


@pytest.mark.parametrize("device", ["cpu", "estimate:h100"])
def test_optimizer_builders_see_attributes_of_parameters(device: str) -> None:
    def model() -> nn.Module:
        module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        for layer in module:
            vars(layer.bias)["no_decay"] = True
        return module

    def build(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        given = list(parameters)
        marked = [p for p in given if hasattr(p, "no_decay")]
        assert (len(given), len(marked)) == (4, 2)
        return torch.optim.SGD(marked, lr=0.1, momentum=0.9)

    options = ProfilerOptions(micro_batch_sizes=(2,), repeats=2, time_budget_s=0.0, device=device)
    profile = profile_model(loaded_model(model, 8, build_optimizer=build), options)
    assert [layer.optimizer_bytes for layer in profile.layers] == [32, 32]


# What the profile says of itself, and refusals


def test_the_profile_describes_model_and_machine() -> None:
    loaded = loaded_model(deep(), settings={"depth": 6})
    profile = profile_of_model(loaded, sizes=(1, 2))
    assert profile.model.digest == chain_digest(chain_of(deep()), {"depth": 6})
    assert profile.model.settings == {"depth": 6}
    assert profile.environment.torch == torch.__version__
    assert (profile.environment.threads, profile.environment.dtype) == (1, "float32")
    assert (profile.device.kind, profile.device.how) == ("cpu", "measured")
    assert [layer.name for layer in profile.layers] == list(chain_of(deep()).names)
    assert profile.micro_batch_sizes == (1, 2)
    assert (
        profile_of_model(loaded_model(deep().double(), lambda b: torch.randn(b, 8).double())).environment.dtype
        == "float64"
    )


def test_progress_grows_and_stays_below_the_total() -> None:
    calls: list[tuple[str, int, int]] = []
    options = ProfilerOptions(micro_batch_sizes=(1, 2), repeats=3, time_budget_s=0.0)
    profile_model(loaded_model(deep()), options, lambda *call: calls.append(call))
    done, total = [call[1] for call in calls], [call[2] for call in calls]
    assert done[0] == 0
    assert all(before < after for before, after in pairwise(done))
    assert total == sorted(total)
    assert all(one < most for one, most in zip(done, total, strict=True))
    assert {"0", "7"} < {name for name, *_ in calls} <= set(chain_of(deep()).names)


needs_tpu = pytest.mark.skipif(find_spec("torchax") is None, reason="needs the extra: pip install 'gpipe-plan[tpu]'")


@pytest.mark.slow
@pytest.mark.parametrize("device", [pytest.param("tpu", marks=needs_tpu), "banana", "", "cpu:banana", "cuda:x"])
def test_an_unknown_device_is_a_usage_error(device: str) -> None:
    def never() -> nn.Module:
        pytest.fail("built")

    with pytest.raises(UsageError):
        profile_model(loaded_model(never), ProfilerOptions(device=device))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_missing_gpu_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no CUDA device here"):
        profile_model(loaded_model(deep()), ProfilerOptions(device="cuda"))


@pytest.mark.parametrize("loss", [lambda out, _: out, lambda _out, _: 1.0, lambda _out, _: None])
def test_a_loss_must_be_a_scalar(loss: Callable[[Any, Any], Any]) -> None:
    with pytest.raises(ModelError, match="expected a scalar tensor"):
        profile_of_model(loaded_model(deep(), loss_fn=loss))


def test_a_failing_layer_is_named_with_its_input() -> None:
    with pytest.raises(ModelError) as refused:
        profile_of_model(loaded_model(nn.Sequential(nn.Linear(8, 16), nn.Linear(8, 4))), sizes=(3,))
    message = str(refused.value)
    assert 'layer "1" (Linear) raised RuntimeError on float32[3, 16]' in message
    assert "micro-batch size 3" in message


class Remembering(nn.Module):
    """Runs again the code between modules, which reads what a hook has stored, as BYOL does."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.net[0].register_forward_hook(lambda _module, _inputs, output: self.hidden.update(out=output))
        self.hidden: dict[str, Tensor] = {}

    def forward(self, value: Tensor) -> Tensor:
        self.hidden.clear()
        self.net(value)
        result: Tensor = self.last(self.head(self.hidden.pop("out")))
        return result


def test_a_stage_that_fails_where_the_model_runs_gets_a_hint_of_its_own() -> None:
    """The hint was to check `example_batch`, with which the whole model runs."""
    with pytest.raises(ModelError, match=r'layer "last" \(ModelStage\) raised KeyError') as refused:
        profile_model(loaded_model(Remembering), ProfilerOptions(micro_batch_sizes=(1,), repeats=2, time_budget_s=0.0))
    assert "`--proof-budget`" in refused.value.hint


def test_units_get_the_inputs_and_targets_of_the_model() -> None:
    loaded: LoadedModel = replace(
        loaded_model(deep(2)), example_batch=lambda b: Batch(torch.randn(b, 8), torch.arange(b))
    )
    units, inputs = trace_layers(chain_of(loaded.build()), loaded, 2, torch.device("cpu"))
    first, last = inputs[units[0].digest], inputs[units[-1].digest]
    assert (first.values[0].requires_grad, last.values[0].requires_grad) == (False, True)
    assert last.values[0].is_leaf
    assert first.targets is None
    assert last.targets.tolist() == [0, 1]
    assert [unit.loss_fn is not None for unit in units] == [False] * 5 + [True]
    fresh = last.new_leaf_copies()[0]
    assert fresh.data_ptr() != last.values[0].data_ptr()
    assert fresh.requires_grad


def test_a_loss_may_remove_items_of_its_targets() -> None:
    """Layers are measured many times with the same targets."""
    loaded: LoadedModel = replace(
        loaded_model(deep(2)),
        example_batch=lambda b: Batch(torch.randn(b, 8), {"y": torch.zeros(b, 4), "weight": torch.ones(b, 1)}),
        loss_fn=lambda output, target: (target.pop("weight") * (output - target["y"]) ** 2).mean(),
    )
    units, inputs = trace_layers(chain_of(loaded.build()), loaded, 2, torch.device("cpu"))
    last = inputs[units[-1].digest]
    losses = [units[-1].run(last.new_leaf_copies(), last) for _ in range(2)]
    assert torch.equal(losses[0][0], losses[1][0])


def test_a_layer_that_fails_later_is_named_with_its_line() -> None:
    calls: list[None] = []

    class Fails(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            calls.append(None)
            if len(calls) > 12:
                raise RuntimeError("the queue is full")
            return super().forward(value)

    with pytest.raises(ModelError, match=r"test_profiler.py:\d+ raised RuntimeError while layers") as refused:
        profile_of_model(loaded_model(lambda: nn.Sequential(Fails(8, 8), nn.Linear(8, 4)), 8))
    assert "--batch-sizes" in refused.value.hint


def test_numbers_that_a_forward_changes_do_not_change_the_digest() -> None:
    """Every rank finds the digest of a model that has not run."""

    class Anneals(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.drop = nn.Linear(8, 8), nn.Linear(8, 4), nn.Dropout(0.5)

        def forward(self, value: Tensor) -> Tensor:
            self.drop.p *= 0.9
            return self.second(self.drop(self.first(value)))

    loaded = loaded_model(Anneals, 8)
    assert profile_of_model(loaded).model.digest == chain_digest(loaded.chain(Anneals()), {})


def test_hooks_on_tied_weights_are_refused_before_the_check() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        model[2].weight = model[0].weight
        model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return model

    with pytest.raises(ModelError, match=r"a parameter of the layers .* has a hook"):
        check_optimizer_of(loaded_model(build, 8), "cpu")
