"""How often layers are timed, which of equal ones, up to which size, and what is left of an interrupted run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import MeasurementError, ModelError
from planner.core.values.partial import PartialProfile
from planner.core.values.profile import Profile
from planner.device.clock import CpuClock, typical_us
from planner.model.load import LoadedModel
from planner.profile import InterruptedProfileError, ProfilerOptions, passes, profile_model, records, timing
from planner.profile.backends import measured
from planner.profile.task import Measurements
from planner.profile.timing import measure_times, time_uncertainty
from planner.profile.units import Unit, UnitInput
from tests.support.measure import loaded_model, profile_of_model

OPTIONS = ProfilerOptions(micro_batch_sizes=(1, 2), repeats=3, time_budget_s=0.0)


def small() -> LoadedModel:
    """Two layers."""
    return loaded_model(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)))


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """By micro-batch size: how many repeats there were at each look at the doubt."""
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


def test_a_model_that_sends_more_than_it_need_is_told_so() -> None:
    """Once, when it is profiled."""

    class Concatenated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear((n + 1) * 8, 8) for n in range(6))

        def forward(self, value: Tensor) -> Tensor:
            for block in self.blocks:
                value = torch.cat([value, block(value)], -1)
            return value

    said: list[str] = []
    profile_model(loaded_model(Concatenated()), OPTIONS, warn=said.append)
    assert len(said) == 1
    assert 'cross the boundary after "blocks.4"' in said[0]


# How often


def test_repeats_go_on_while_in_doubt(repeats: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at least; then five more at a time, until the time of the chain is known well enough."""
    doubts = iter([0.5, 0.03, 0.009])
    monkeypatch.setattr(measured, "time_uncertainty", lambda *_: next(doubts))
    said: list[str] = []
    profile_model(small(), replace(OPTIONS, time_budget_s=60.0), warn=said.append)
    assert repeats == {1: [3, 8, 13], 2: [3, 8, 13]}
    assert said == []


def test_a_noisy_machine_ends_with_a_warning(repeats: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the time is up, and not before the least number of repeats; it names the doubt and what to do."""
    monkeypatch.setattr(measured, "time_uncertainty", lambda *_: 0.123)
    said: list[str] = []
    profile_model(small(), replace(OPTIONS, time_budget_s=1e-6), warn=said.append)
    assert repeats == {1: [3], 2: [3]}
    assert len(said) == 1
    assert "12.3%" in said[0]
    assert "--time-budget 1e-06s" in said[0]


def test_without_a_time_budget_nothing_is_judged(repeats: dict[int, list[int]]) -> None:
    """As many repeats as were asked for, whatever they are worth."""
    said: list[str] = []
    profile_model(small(), OPTIONS, warn=said.append)
    assert (repeats, said) == ({}, [])


def scattered(us: float, share: float, repeats: int) -> list[tuple[float, float]]:
    """Repeats that are by turns longer and shorter by a share."""
    return [(us * (1 + share * (-1) ** n), 0.0) for n in range(repeats)]


def test_doubt_falls_with_repeats_and_with_the_share_of_what_scatters() -> None:
    """Equal layers scatter together, different ones apart, and what takes no time at all does not matter."""
    few, many = (time_uncertainty(["a"], {("a", 1): scattered(1e6, 0.1, n)}) for n in (10, 40))
    assert few == pytest.approx(1.96 * 0.1 * (10 / 9) ** 0.5 / 10**0.5, rel=1e-3)
    assert 1.9 < few / many < 2.2
    assert time_uncertainty(["a"] * 4, {("a", 1): scattered(1e6, 0.1, 10)}) == pytest.approx(few)
    two = {("a", 1): scattered(1e6, 0.1, 10), ("b", 1): scattered(1e6, 0.1, 10)}
    assert time_uncertainty(["a", "b"], two) == pytest.approx(few / 2**0.5)
    worst = {("a", 1): scattered(1e6, 0.1, 10), ("a", 2): scattered(1e6, 0.0, 10)}
    assert time_uncertainty(["a"], worst) == few
    assert time_uncertainty(["a"], {("a", 1): scattered(1.0, 0.5, 10)}) < 0.01


def test_large_layers_have_no_gradients_when_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others accumulate into what is there; what that would take is timed apart, a piece no cache holds at a time."""
    had: list[list[bool]] = []
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4))
    run = Unit.run

    def noted(self: Unit, values: Sequence[Any], given: UnitInput) -> list[Any]:
        if self.digest:  # else it is the layer that does nothing
            had.append([model[n].weight.grad is not None for n in range(2)])
        return run(self, values, given)

    def times(*arguments: Any, **options: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Unit, "run", noted)
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
    assert had == [[False, True], [False, True]] * 10  # five times whole, five times in halves
    assert pieces == [375, 137, 64] * 10  # 8 x 64 weights and 64 biases, in pieces of 1,500 bytes at most


def test_equal_layers_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the one that is measured would find its parameters in the cache; what was there before is put back."""
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


class Block(nn.Module):
    """A layer of several operators."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        """(b, 8) to (b, 8)."""
        return torch.relu(self.linear(value))


# Up to which size


def out_of_memory_at(size: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes measuring micro-batches of `size` fail."""
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
def test_sizes_end_where_memory_does(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `auto` sizes: what fits is measured, and a warning says so."""
    out_of_memory_at(4, error, monkeypatch)
    said: list[str] = []
    options = replace(OPTIONS, micro_batch_sizes=(1, 2, 4, 8), until_memory_ends=True)
    profile = profile_model(small(), options, warn=said.append)
    assert profile.micro_batch_sizes == (1, 2)
    assert all(len(layer.forward_us) == len(layer.detail) == 2 for layer in profile.layers)
    assert "out of memory at micro-batch size 4: sizes up to 2 are measured" in said


def test_a_size_that_was_asked_for_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint names those that do."""
    out_of_memory_at(4, ERRORS[0], monkeypatch)
    with pytest.raises(MeasurementError, match="out of memory at micro-batch size 4") as refused:
        profile_model(small(), replace(OPTIONS, micro_batch_sizes=(1, 2, 4)))
    assert refused.value.hint == "use `--batch-sizes 1,2`"


def test_a_model_that_does_not_fit_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where larger sizes would be left out."""
    out_of_memory_at(1, ERRORS[1], monkeypatch)
    with pytest.raises(MeasurementError, match="micro-batch size 1, the smallest"):
        profile_model(small(), replace(OPTIONS, until_memory_ends=True))


def test_memory_may_end_in_the_users_forward() -> None:
    """Where it becomes an error of the model, with the allocator's as its cause; any other error stays what it is."""

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
        return profile_model(loaded, replace(OPTIONS, until_memory_ends=True))

    assert profiled(ERRORS[0]).micro_batch_sizes == (1,)
    with pytest.raises(ModelError, match="ValueError"):
        profiled(ValueError("no"))


# Interrupted


def interrupted(loaded: LoadedModel, calls: int, earlier: PartialProfile | None = None) -> PartialProfile:
    """What is left of a run that is interrupted before its measurement of that number."""
    left = iter(range(calls))

    def progress(*_: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(InterruptedProfileError) as stopped:
        profile_model(loaded, OPTIONS, progress, earlier=earlier)
    return stopped.value.partial


def test_an_interrupted_run_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it stops, nothing is measured twice: neither memory nor times, twice in a row.

    But what was timed of the row of layers that it stopped in.
    """
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = loaded_model(model)
    recorded: list[str] = []
    measure = records.measure_memory
    monkeypatch.setattr(records, "measure_memory", lambda u, *rest: (recorded.append(u.name), measure(u, *rest))[1])
    monkeypatch.setattr(timing, "typical_us", min)  # which shows whether a repeat was kept
    first = interrupted(loaded, 3)
    assert len(first.measurements) == 3
    second = interrupted(loaded, 10, first)
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
def test_measurements_of_something_else_are_not_used(
    change: Callable[[PartialProfile], PartialProfile], named: str
) -> None:
    """It says so, and starts over."""
    loaded = small()
    partial = change(interrupted(loaded, 6))
    said: list[str] = []
    kept = Measurements(header=interrupted(loaded, 0))
    kept.take_over(partial, said.append)
    assert kept.memory == {}
    assert len(said) == 1
    assert f"({named} changed): starting over" in said[0]


# How true


@pytest.mark.nightly
def test_the_layers_take_as_long_as_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 5 %: forward, backward and optimizer of all layers, beside a step of the whole model.

    The model takes its turn in the loop that times the layers, so a busy machine slows both alike. Typical times of
    either are compared: the smallest of a dozen short works are reached sooner than the smallest of one long one. With
    256 samples a step takes 20 ms and more, beside which what an idle layer leaves unexplained hardly counts.
    """
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(768, 768), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(768, 8))
    loaded = loaded_model(model, 768)
    clock, batch = CpuClock(1), loaded.example_batch(256)
    optimizer = loaded.build_optimizer(model.parameters())
    steps: list[tuple[float, float]] = []

    def compute() -> None:
        loaded.loss_fn(model(batch.inputs), batch.targets).backward()

    def timed(*args: Any, progress: Callable[[Any], Iterator[Any]], **options: Any) -> None:
        def in_turn(keys: Any) -> Iterator[Any]:
            steps.append((clock.time_us(compute), clock.time_us(lambda: optimizer.step() and None)))
            yield from progress(keys)

        measure_times(*args, progress=in_turn, **options)

    monkeypatch.setattr(measured, "measure_times", timed)
    profile = profile_of_model(loaded, sizes=(256,), repeats=40)
    summed_us = sum(layer.forward_us[0] + layer.backward_us[0] + layer.optimizer_us for layer in profile.layers)
    whole_us = sum(typical_us(times_us) for times_us in zip(*steps, strict=True))
    assert len(steps) == 80  # backwards whole, and in halves
    assert summed_us == pytest.approx(whole_us, rel=0.05)


def times(profile: Profile) -> Sequence[float]:
    """Forward + backward of every layer."""
    return [layer.forward_us[0] + layer.backward_us[0] for layer in profile.layers]


@pytest.mark.nightly
def test_two_profiles_lead_to_plans_as_good_as_each_other() -> None:
    """The plan of one is slower by less than 1 % than the best under the other; the best of a few tries."""
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
