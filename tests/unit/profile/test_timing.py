"""Repeats of timings, turns of equal layers, the largest size, and interrupted profiles."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import MeasurementError, ModelError
from planner.core.values.partial import PartialProfile
from planner.core.values.profile import Profile
from planner.device import clock
from planner.device.clock import CpuClock, median_us
from planner.device.kinds import kind_of
from planner.model.chain import chain_of, run_layers
from planner.model.load import LoadedModel
from planner.profile import passes, records, timing
from planner.profile.backends import measured
from planner.profile.profiler import InterruptedProfileError, profile_model
from planner.profile.task import Measurements, ProfilerOptions
from planner.profile.timing import layer_entry_times_us, measure_times, round_ratios, time_uncertainty
from planner.profile.units import LayerToMeasure, MeasurementInput
from tests.support.measure import loaded_model, profile_of_model

OPTIONS = ProfilerOptions(micro_batch_sizes=(1, 2), repeats=3, time_budget_s=0.0)


def small() -> LoadedModel:
    return loaded_model(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Return the numbers of repeats by micro-batch size, at each check of the uncertainty."""
    seen: dict[int, list[int]] = {}
    look = measured._doubt

    def looked(task: Any, known: Any) -> float:
        for size in known.sizes:
            seen.setdefault(size, []).append(
                min(len(s) for (_, b), s in task.measurements.samples.items() if b == size)
            )
        return look(task, known)

    monkeypatch.setattr(measured, "_doubt", looked)
    return seen


class CodeBetween(nn.Module):
    """Runs code before each block; the blocks are equal."""

    def __init__(self, ticks: list[float]) -> None:
        super().__init__()
        self.ticks = ticks
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 4)

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        for block in self.blocks:
            self.ticks[0] += 100e3
            value = block(value)
        return self.last(value)


def test_code_between_earlier_layers_is_entry_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code before a stage's first module belongs to its first layer. Entry times of equal layers are measured once."""
    ticks = [0.0]
    monkeypatch.setattr(clock.time, "process_time_ns", lambda: int(ticks[0]))
    layers = profile_of_model(loaded_model(lambda: CodeBetween(ticks))).layers
    assert [layer.forward_us for layer in layers] == [(0.0,), (100.0,), (100.0,), (100.0,), (0.0,)]
    assert [layer.entry_us for layer in layers] == [(0.0,), (0.0,), (100.0,), (200.0,), (300.0,)]


def test_a_sequential_has_no_entry_times() -> None:
    assert [layer.entry_us for layer in profile_of_model(small()).layers] == [(), ()]


def test_entry_times_are_interpolated_between_measured_layers() -> None:
    """The median of each layer's repeats counts; another size does not."""
    measured_us = {("b", 2): [1.0, 5.0, 100.0], ("d", 2): [15.0], ("c", 1): [70.0]}
    assert layer_entry_times_us("abcdef", 2, measured_us) == [5, 5, 10, 15, 15, 15]


def test_concatenations_sent_in_parts_are_warned_about_once() -> None:
    class Concatenated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear((n + 1) * 8, 8) for n in range(6))

        def forward(self, value: Tensor) -> Tensor:
            for block in self.blocks:
                value = torch.cat([value, block(value)], -1)
            return value

    warnings: list[str] = []
    profile_model(loaded_model(Concatenated()), OPTIONS, warn=warnings.append)
    assert len(warnings) == 1
    assert 'cross the boundary after "blocks.4"' in warnings[0]


# How often


def test_layers_are_timed_again_while_uncertain(repeats: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three repeats at least, then five more at a time."""
    doubts = iter([0.5, 0.03, 0.009])
    monkeypatch.setattr(measured, "time_uncertainty", lambda *_: next(doubts))
    warnings: list[str] = []
    profile_model(small(), replace(OPTIONS, time_budget_s=60.0), warn=warnings.append)
    assert repeats == {1: [3, 8, 13], 2: [3, 8, 13]}
    assert warnings == []


def test_a_spent_time_budget_ends_with_a_warning(repeats, monkeypatch):
    """After the least number of repeats; the warning states the uncertainty."""
    monkeypatch.setattr(measured, "time_uncertainty", lambda *_: 0.123)
    warnings: list[str] = []
    profile_model(small(), replace(OPTIONS, time_budget_s=1e-6), warn=warnings.append)
    assert repeats == {1: [3], 2: [3]}
    assert len(warnings) == 1
    assert "12.3%" in warnings[0]
    assert "--time-budget 1e-06s" in warnings[0]


def test_without_a_time_budget_the_uncertainty_is_not_checked(repeats: dict[int, list[int]]) -> None:
    warnings: list[str] = []
    profile_model(small(), OPTIONS, warn=warnings.append)
    assert (repeats, warnings) == ({}, [])


def scattered(us: float, share: float, repeats: int) -> list[tuple[float, float]]:
    """Return repeats that are alternately longer and shorter by a share."""
    return [(us * (1 + share * (-1) ** n), 0.0) for n in range(repeats)]


def test_uncertainty_falls_with_repeats_and_with_independent_layers() -> None:
    few, many = (time_uncertainty(["a"], {("a", 1): scattered(1e6, 0.1, n)}) for n in (10, 40))
    assert few == pytest.approx(1.96 * 0.1 * (10 / 9) ** 0.5 / 10**0.5, rel=1e-3)
    assert 1.9 < few / many < 2.2
    assert time_uncertainty(["a"] * 4, {("a", 1): scattered(1e6, 0.1, 10)}) == pytest.approx(few)
    two = {("a", 1): scattered(1e6, 0.1, 10), ("b", 1): scattered(1e6, 0.1, 10)}
    assert time_uncertainty(["a", "b"], two) == pytest.approx(few / 2**0.5)
    worst = {("a", 1): scattered(1e6, 0.1, 10), ("a", 2): scattered(1e6, 0.0, 10)}
    assert time_uncertainty(["a"], worst) == few
    assert time_uncertainty(["a"], {("a", 1): scattered(1.0, 0.5, 10)}) < 0.01


def test_rounds_show_slow_seconds_of_the_machine() -> None:
    """Repeats of one layer that vary while others do not, change a round only by their share of it."""
    speeds = [1.0] * 12 + [1.5] * 8
    samples = {key: [(us * each, 2 * us * each) for each in speeds] for key, us in (("a", 1e3), ("b", 9e3))}
    assert round_ratios(samples.values()) == (1.0, 1.5)
    samples["b"] = [(9e3, 18e3)] * 20
    assert round_ratios(samples.values()) == (1.0, pytest.approx(1.05))
    assert round_ratios([[(0.0, 0.0)] * 3]) == (1.0, 1.0)


def test_large_layers_are_timed_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adding to gradients is timed separately, in pieces that exceed no cache."""
    had: list[list[bool]] = []
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4))
    run = LayerToMeasure.run

    def noted(self: LayerToMeasure, values: Sequence[Any], given: MeasurementInput) -> list[Any]:
        if self.digest:  # else it is the layer that does nothing
            had.append([model[n].weight.grad is not None for n in range(2)])
        return run(self, values, given)

    def times(*arguments: Any, **options: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(LayerToMeasure, "run", noted)
            measure_times(*arguments, **options)

    add = passes._add

    def added(there: Tensor, gradient: Tensor) -> None:
        pieces.append(gradient.numel())
        add(there, gradient)

    pieces: list[int] = []
    monkeypatch.setattr(measured, "measure_times", times)
    monkeypatch.setattr(passes, "CACHE_BYTES", 1500)
    monkeypatch.setattr(passes, "_add", added)
    profile_model(loaded_model(model), replace(OPTIONS, micro_batch_sizes=(2,)))
    assert had == [[False, True], [False, True]] * 10  # five times whole, five times split
    assert pieces == [375, 137, 64] * 10  # 8 x 64 weights and 64 biases, in pieces of 1,500 bytes at most


def test_equal_layers_take_turns_in_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the measured layer would find its parameters in the cache."""
    ran: list[int] = []
    forward = Block.forward

    def noted(self: Block, value: Tensor) -> Tensor:
        ran.append(id(self))
        return forward(self, value)

    monkeypatch.setattr(Block, "forward", noted)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.ReLU())
    seen: list[int] = []
    measure = measured.measure_times

    def timed(*args: Any, **options: Any) -> None:
        ran.clear()
        measure(*args, **options)
        seen.extend(ran)

    monkeypatch.setattr(measured, "measure_times", timed)
    profile_of_model(loaded_model(model), sizes=(2,), repeats=6)
    blocks = [id(layer) for layer in model[:4]]
    assert len({block: seen.count(block) for block in blocks}) == 4
    assert all(parameter.grad is None for parameter in model.parameters())


def test_short_equal_layers_in_a_row_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block takes a millisecond of a clock that does not run otherwise, so a pass of 20 ms could have 20."""
    now_ns = [0]
    forward, together = Block.forward, timing.group_equal_layers
    groups: list[list[tuple[str, int]]] = []

    def taking_time(self: Block, value: Tensor) -> Tensor:
        now_ns[0] += 1_000_000
        return forward(self, value)

    def noted(*arguments: Any) -> list[LayerToMeasure]:
        units = together(*arguments)
        groups.append([(unit.name, unit.repeats) for unit in units])
        return units

    monkeypatch.setattr(Block, "forward", taking_time)
    monkeypatch.setattr(clock.time, "process_time_ns", lambda: now_ns[0])
    monkeypatch.setattr(timing, "group_equal_layers", noted)
    model = nn.Sequential(*(Block() for _ in range(20)), nn.Hardtanh(), Block())
    profile = profile_of_model(loaded_model(model), sizes=(2,), repeats=3)
    # The first layer's input needs no gradient, and the last layer includes the loss.
    assert groups == [[], [("1", 8), ("9", 8)], [], []]
    assert [layer.forward_us[0] for layer in profile.layers] == [1000.0] * 20 + [0.0, 1000.0]


def test_a_disturbed_single_layer_does_not_make_a_group_free() -> None:
    one = LayerToMeasure("one", nn.Identity(), None, "")
    assert timing._times_of_one((replace(one, repeats=4), one), [(400.0, 800.0), (130.0, 900.0)]) == (90.0, 100.0)


@pytest.mark.parametrize(
    ("layer_us", "kept_bytes", "number"), [(5_000.0, 2**20, 4), (100.0, 2**27, 2), (21_000.0, 0, 0), (0.0, 0, 20_000)]
)
def test_groups_take_20_ms_and_256_mib_on_a_cpu(layer_us: float, kept_bytes: int, number: int) -> None:
    assert timing._number_together(kind_of(torch.device("cpu")), layer_us, kept_bytes) == number


@pytest.mark.parametrize(("number", "firsts"), [(0, []), (2, []), (3, [1, 4]), (4, [1]), (99, [1])])
def test_layers_of_a_group_are_consecutive(number: int, firsts: list[int]) -> None:
    chain = chain_of(nn.Sequential(*(nn.Linear(8, 8) for _ in range(9))))
    units = [LayerToMeasure(layer.name, layer.module, None, "") for layer in chain.layers]
    groups = timing.group_equal_layers(chain, units, [1, 2, 3, 4, 5, 6, 8], number)
    assert [int(unit.name) for unit in groups] == firsts
    value = torch.randn(2, 8)
    for unit in groups:
        first = int(unit.name)
        assert unit.repeats == min(number, 6)
        assert torch.equal(unit.module(value), run_layers(list(chain.model)[first : first + unit.repeats], value))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        return torch.relu(self.linear(value))


# Up to which size


def out_of_memory_at(size: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make measurements of micro-batches of `size` or more fail."""
    measure = records.measure_memory

    def failing(unit: Any, given: Any, *rest: Any) -> Any:
        if given.values[0].shape[0] >= size:
            raise error
        return measure(unit, given, *rest)

    monkeypatch.setattr(records, "measure_memory", failing)


ERRORS = (
    torch.OutOfMemoryError("CUDA out of memory"),
    MemoryError(),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 10 bytes"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_automatic_sizes_end_at_the_largest_that_fits(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_memory_at(4, error, monkeypatch)
    warnings: list[str] = []
    options = replace(OPTIONS, micro_batch_sizes=(1, 2, 4, 8), skip_failing_sizes=True)
    profile = profile_model(small(), options, warn=warnings.append)
    assert profile.micro_batch_sizes == (1, 2)
    assert all(len(layer.forward_us) == len(layer.detail) == 2 for layer in profile.layers)
    assert "out of memory at micro-batch size 4: sizes up to 2 are measured" in warnings


def test_a_requested_size_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_memory_at(4, ERRORS[0], monkeypatch)
    with pytest.raises(MeasurementError, match="out of memory at micro-batch size 4") as refused:
        profile_model(small(), replace(OPTIONS, micro_batch_sizes=(1, 2, 4)))
    assert refused.value.hint == "use `--batch-sizes 1,2`"


def test_the_smallest_size_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    out_of_memory_at(1, ERRORS[1], monkeypatch)
    with pytest.raises(MeasurementError, match="micro-batch size 1, the smallest"):
        profile_model(small(), replace(OPTIONS, skip_failing_sizes=True))


def test_out_of_memory_in_a_users_forward_ends_the_sizes() -> None:
    """Other errors of the model stay errors."""

    class Greedy(nn.Module):
        def __init__(self, error: Exception) -> None:
            super().__init__()
            self.error = error

        def forward(self, value: Tensor) -> Tensor:
            if value.shape[0] > 1:
                raise self.error
            return value

    def profiled(error: Exception) -> Profile:
        loaded = loaded_model(nn.Sequential(nn.Linear(8, 8), Greedy(error)))
        return profile_model(loaded, replace(OPTIONS, skip_failing_sizes=True))

    assert profiled(ERRORS[0]).micro_batch_sizes == (1,)
    with pytest.raises(ModelError, match="ValueError"):
        profiled(ValueError("no"))


# Interrupted


def interrupt_profile(loaded: LoadedModel, calls: int, earlier: PartialProfile | None = None) -> PartialProfile:
    """Return the partial profile of a run that is interrupted after `calls` measurements."""
    left = iter(range(calls))

    def progress(*_: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedProfileError) as stopped:
        profile_model(loaded, OPTIONS, progress, earlier=earlier)
    return stopped.value.partial


def test_an_interrupted_profile_continues_without_measuring_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the pass of layers that was interrupted is timed again."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = loaded_model(model)
    recorded: list[str] = []
    measure = records.measure_memory
    monkeypatch.setattr(records, "measure_memory", lambda u, *rest: (recorded.append(u.name), measure(u, *rest))[1])
    monkeypatch.setattr(timing, "median_us", min)  # which shows whether a repeat was kept
    first = interrupt_profile(loaded, 3)
    assert len(first.measurements) == 3
    second = interrupt_profile(loaded, 10, first)
    assert [one.memory for one in second.measurements[:3]] == [one.memory for one in first.measurements]
    assert sum(len(one.forward_us) + len(one.backward_input_us) for one in second.measurements) == 6
    profile = profile_model(loaded, OPTIONS, earlier=second)
    assert len(recorded) == 4
    kept = {(one.digest, one.micro_batch_size): one for one in second.measurements}
    for layer in profile.layers:
        for n, size in enumerate(profile.micro_batch_sizes):
            assert layer.detail[n] == kept[layer.digest, size].memory
            assert layer.split[n] == kept[layer.digest, size].split
            assert layer.forward_us[n] <= min(kept[layer.digest, size].forward_us, default=1e9) + 0.1
            assert layer.backward_weight_us[n] <= min(kept[layer.digest, size].backward_weight_us, default=1e9) + 0.1
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda p: replace(p, model=replace(p.model, digest="sha256:0")), "model"),
        (lambda p: replace(p, model=replace(p.model, settings={"width": 1})), "model"),
        (lambda p: replace(p, device=replace(p.device, name="another")), "device"),
        (lambda p: replace(p, environment=replace(p.environment, torch="1.0")), "environment"),
        (lambda p: replace(p, environment=replace(p.environment, dtype="bfloat16")), "environment"),
        (lambda p: replace(p, optimizer="adamw"), "optimizer"),
        (lambda p: replace(p, generator=replace(p.generator, version="0")), "generator"),
    ],
)
def test_partial_profiles_of_something_else_are_not_used(change, named):
    loaded = small()
    partial = change(interrupt_profile(loaded, 6))
    warnings: list[str] = []
    kept = Measurements(header=interrupt_profile(loaded, 0))
    kept.add_earlier(partial, warnings.append)
    assert kept.memory == {}
    assert len(warnings) == 1
    assert f"({named} changed): starting over" in warnings[0]


# How true


class Residual(nn.Module):
    """Twelve operators that take less time than Python's work."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, value: Tensor) -> Tensor:
        for _ in range(3):
            value = value + self.down(torch.relu(self.up(self.norm(value))))
        return value


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(12))

    def forward(self, value: Tensor) -> Tensor:
        for block in self.blocks:
            value = block(value)
        return value


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("model", "width", "tolerance"),
    [
        (
            nn.Sequential(*(nn.Sequential(nn.Linear(768, 768), nn.GELU()) for _ in range(4)), nn.Linear(768, 8)),
            768,
            0.05,
        ),
        (Looped(), 32, 0.2),
    ],
    ids=["long layers", "short layers"],
)
def test_times_of_layers_add_up_to_the_time_of_the_model(
    model: nn.Module, width: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is timed in the loop that times the layers, so a busy machine slows both alike.

    If short layers were timed one at a time, their sum would be a quarter longer.
    """
    torch.manual_seed(0)
    loaded = loaded_model(model, width)
    stopwatch, batch = CpuClock(1), loaded.example_batch(256 if width > 32 else 4)
    optimizer = loaded.build_optimizer(model.parameters())
    steps: list[float] = []

    def compute() -> None:
        loaded.loss_fn(model(batch.inputs), batch.targets).backward()

    def timed(*args: Any, progress: Callable[[Any], Iterator[Any]], **options: Any) -> None:
        def in_turn(keys: Any) -> Iterator[Any]:
            steps.append(stopwatch.time_us(compute))
            optimizer.step()
            yield from progress(keys)

        measure_times(*args, progress=in_turn, **options)

    monkeypatch.setattr(measured, "measure_times", timed)
    profile = profile_of_model(loaded, sizes=(len(batch.inputs),), repeats=40)
    computed_us = median_us(steps)
    summed_us = sum(layer.forward_us[0] + layer.backward_us[0] for layer in profile.layers)
    assert len(steps) == 80  # whole and split backwards
    assert summed_us == pytest.approx(computed_us, rel=tolerance)


def times(profile: Profile) -> Sequence[float]:
    """Return forward + backward of every layer."""
    return [layer.forward_us[0] + layer.backward_us[0] for layer in profile.layers]


@pytest.mark.nightly
def test_plans_of_two_profiles_are_equally_good() -> None:
    """The plan of one profile is at most 1 % slower than the best under the other, in the best of four tries."""
    from planner.solve import Request, solve
    from tests.support.profiles import inputs_of

    torch.manual_seed(0)
    widths = (512, 512, 1024, 512, 768, 512)
    layers = [nn.Linear(a, b) for a, b in zip((512, *widths), widths, strict=False)]
    loaded = loaded_model(nn.Sequential(*layers), 512)
    found = []
    for _ in range(4):
        one, other = (profile_of_model(loaded, sizes=(64,), repeats=10) for _ in range(2))
        inputs = inputs_of(3, 64 * 8)
        plans = [solve(profile, Request(inputs=inputs)) for profile in (one, other)]
        crossed = [
            solve(profile, Request(inputs=inputs, balance=plan.balance)).predicted.step_us / best.predicted.step_us - 1
            for profile, plan, best in ((one, plans[1], plans[0]), (other, plans[0], plans[1]))
        ]
        found.append(max(crossed))
        if found[-1] < 0.01:
            return
    pytest.fail(f"regrets of {found}")
