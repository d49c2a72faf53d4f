"""Costs at one micro-batch size: interpolation, additive and exact records, storages, tied parameters."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import CostsAtSize, CostTable, costs_at, covers_size
from planner.core.cost.memory import stage_memory
from planner.core.errors import UsageError
from planner.core.values.plan import StageMemory
from planner.core.values.profile import TiedGroup
from planner.solve import Request, solve
from tests.support.chains import chain, layer, random_profile, record, tensor
from tests.support.peak_points import peak_points_with
from tests.support.profiles import inputs_of


def numbers_of(record: Any) -> dict[str, Any]:
    """Return the numbers of a record by name, including nested records."""
    found = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        value = value() if callable(value) else value  # what is composed when it is asked for
        nested = numbers_of(value) if dataclasses.is_dataclass(value) else {"": value}
        found |= {f"{field.name}.{name}": number for name, number in nested.items()}
    return found


def whole(costs: ChainCosts, first: int, end: int) -> StageMemory:
    """Return the memory of a stage with one micro-batch."""
    return stage_memory(costs, first, end, peak_points_with(1), recompute="never")


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_costs_are_interpolated_between_profiled_sizes(size: int, *, exact: bool) -> None:
    """Affine costs are exact at every size between, in any order of sizes."""
    costs = costs_at(random_profile(4, 6, exact=exact, sizes=(8, 1, 2)), size)
    truth = costs_at(random_profile(4, 6, exact=exact, sizes=(size,)), size)
    assert costs.micro_batch_size == size
    assert costs.exact is truth.exact is exact
    found, expected = numbers_of(costs), numbers_of(truth)
    assert found.keys() == expected.keys()
    for name in found.keys() - {"names.", "ties.", "memory_model."}:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, atol=1e-9, err_msg=name)
    assert costs.forward_us.sum() > 0
    assert costs.memory.saved.sum() > 0


def test_profiled_sizes_are_not_interpolated() -> None:
    profile = chain(
        layer(forward_us=(0.1, 7.3, 5.9), backward_us=(0.2, 0.3, 0.4), output_bytes=(1, 2, 3), saved_bytes=(5, 6, 9)),
        sizes=(1, 2, 4),
    )
    for size, forward, saved in ((1, 0.1, 5), (2, 7.3, 6), (4, 5.9, 9)):
        costs = costs_at(profile, size)
        assert costs.forward_us.tolist() == [forward]
        assert costs.memory.saved.tolist() == [saved]


def test_interpolation_uses_the_two_nearest_sizes() -> None:
    profile = chain(
        layer(
            forward_us=(100.0, 6.0, 10.0, 900.0), backward_us=(0.0,) * 4, output_bytes=(0,) * 4, saved_bytes=(0,) * 4
        ),
        sizes=(1, 2, 4, 8),
    )
    assert costs_at(profile, 3).forward_us.tolist() == [8.0]


@pytest.mark.parametrize("size", [1, 9, 100])
def test_sizes_outside_the_profile_are_refused(size: int) -> None:
    profile = random_profile(1, 2, sizes=(2, 8))
    assert not covers_size(profile, size, extrapolate=False)
    with pytest.raises(UsageError, match=f"micro-batch size {size} is outside the profiled range 2 to 8") as refused:
        costs_at(profile, size)
    assert "--batch-sizes" in refused.value.hint
    assert "--extrapolate" in refused.value.hint


@pytest.mark.parametrize("size", [1, 12, 64])
def test_extrapolation_continues_the_line_of_the_nearest_two_sizes(size: int) -> None:
    profile = chain(
        layer(
            forward_us=(7.0, 11.0, 27.0), backward_us=(4.0, 8.0, 16.0), output_bytes=(2, 4, 8), saved_bytes=(0, 10, 30)
        ),
        sizes=(2, 4, 8),
    )
    assert covers_size(profile, size, extrapolate=True)
    costs = costs_at(profile, size, extrapolate=True)
    slope = 2.0 if size < 2 else 4.0
    assert costs.forward_us.tolist() == [11 + slope * (size - 4)]
    assert costs.backward_us.tolist() == [2.0 * size]
    assert costs.memory.saved.tolist() == [max(0.0, 10 + 5.0 * (size - 4))]


def test_extrapolation_is_never_negative() -> None:
    profile = chain(
        layer(forward_us=(1.0, 5.0), backward_us=(0.0, 9.0), output_bytes=(0, 8), saved_bytes=(0, 0)), sizes=(2, 4)
    )
    costs = costs_at(profile, 1, extrapolate=True)
    assert costs.forward_us.tolist() == [0.0]
    assert costs.backward_us.tolist() == [0.0]
    assert costs.boundaries.output.tolist() == [0.0]


@pytest.mark.parametrize("extrapolate", [False, True])
def test_single_profiled_size_covers_no_other(*, extrapolate: bool) -> None:
    profile = random_profile(2, 3, sizes=(4,))
    assert covers_size(profile, 4, extrapolate=extrapolate)
    assert costs_at(profile, 4, extrapolate=extrapolate).num_layers == 3
    assert not covers_size(profile, 5, extrapolate=extrapolate)
    with pytest.raises(UsageError, match="micro-batch size 5 is outside the profiled range 4 to 4"):
        costs_at(profile, 5, extrapolate=extrapolate)


def test_hint_omits_extrapolate_if_already_allowed() -> None:
    with pytest.raises(UsageError) as refused:
        costs_at(random_profile(2, 3, sizes=(4,)), 5, extrapolate=True)
    assert "--batch-sizes" in refused.value.hint
    assert "--extrapolate" not in refused.value.hint


def test_micro_batches_have_at_least_one_sample() -> None:
    assert not covers_size(random_profile(2, 2, sizes=(2, 4)), 0, extrapolate=True)


def test_missing_fields_default_to_zero_and_gradients_to_the_parameters() -> None:
    """Profiles written by hand from published numbers have only the required fields."""
    costs = costs_at(chain(layer(parameter_bytes=40, forward_us=1.0, saved_bytes=9, output_bytes=9)), 1)
    assert (costs.gradients.tolist(), costs.state.parameters.tolist()) == ([40.0], [40.0])
    state, levels = costs.state, costs.memory
    nothing = (
        state.optimizer,
        state.optimizer_peak,
        state.buffers,
        costs.optimizer_us,
        levels.forward,
        levels.backward,
    )
    for sizes in (*nothing, costs.boundaries.input):
        assert sizes.tolist() == [0.0]
    assert (costs.target, costs.ties, costs.exact) == (0.0, (), False)


def test_zero_gradient_bytes_differ_from_missing_ones() -> None:
    assert costs_at(chain(layer(parameter_bytes=40, gradient_bytes=0)), 1).gradients.tolist() == [0.0]


def test_additive_records_use_peaks_as_transients() -> None:
    profile = chain(
        layer("a", output_bytes=30, saved_bytes=50, forward_peak_bytes=7, backward_peak_bytes=9),
        layer("b", output_bytes=40, saved_bytes=25, forward_peak_bytes=3, backward_peak_bytes=1),
    )
    costs = costs_at(profile, 1)
    assert not costs.exact
    assert costs.boundaries.input.tolist() == [0, 30]
    assert costs.boundaries.output.tolist() == [30, 40]
    assert costs.memory.saved.tolist() == [50, 25]
    assert costs.memory.forward.tolist() == [7, 3]
    assert costs.memory.backward.tolist() == [9, 1]
    # b saves 25 bytes, so at least 15 of its 40 bytes of output are not among them.
    assert costs.boundaries.unsaved_output.tolist() == [0, 15]


def test_exact_records_are_used_only_if_every_layer_has_them() -> None:
    exact = random_profile(8, 4, exact=True)
    mixed = dataclasses.replace(exact, layers=(*exact.layers[:3], dataclasses.replace(exact.layers[3], detail=())))
    plain = dataclasses.replace(exact, layers=tuple(dataclasses.replace(x, detail=()) for x in exact.layers))
    assert costs_at(exact, 1).exact
    assert not costs_at(mixed, 1).exact
    found, expected = numbers_of(costs_at(mixed, 1)), numbers_of(costs_at(plain, 1))
    for name, numbers in expected.items():
        assert np.array_equal(found[name], numbers), name


def test_saved_storage_counts_at_the_layer_that_makes_it() -> None:
    profile = chain(
        layer("a", detail=record(internal=7, given=[tensor(5)], made=[tensor(100)])),
        layer("b", detail=record(internal=3, given=[tensor(100, kept=True)], made=[tensor(20)])),
    )
    costs = costs_at(profile, 1)
    assert costs.memory.saved.tolist() == [107, 3]
    assert costs.boundaries.unsaved_output.tolist() == [0, 20]
    assert (costs.boundaries.input.tolist(), costs.boundaries.output.tolist()) == ([5, 100], [100, 20])


@pytest.mark.parametrize(("kept", "saved", "unsaved"), [(True, 107, [0, 0, 4]), (False, 7, [100, 100, 4])])
def test_storage_that_crosses_two_boundaries_counts_once(kept, saved, unsaved):
    """An in-place layer returns its input's storage. If no layer saves it, it is unsaved at each boundary."""
    profile = chain(
        layer("a", detail=record(internal=7, given=[tensor(5)], made=[tensor(100)])),
        layer("in place", detail=record(internal=3, given=[tensor(100)], made=[tensor(100, alias=0)])),
        layer("c", detail=record(internal=1, given=[tensor(100, kept=kept)], made=[tensor(4)])),
    )
    costs = costs_at(profile, 1)
    assert costs.memory.saved.tolist() == [saved, 3, 1]
    assert costs.boundaries.unsaved_output.tolist() == unsaved
    assert costs.boundaries.output.tolist() == [100, 100, 4]


def test_views_of_one_storage_are_sent_separately() -> None:
    """The received tensors share no storage."""
    given = [tensor(64), tensor(64)]
    profile = chain(
        layer("a", detail=record(given=[tensor(5)], made=[tensor(64), tensor(10)])),
        layer("views", detail=record(given=[tensor(64), tensor(10)], made=[tensor(64, alias=0), tensor(64, alias=0)])),
        layer("c", detail=record(given=given, made=[tensor(1)])),
    )
    assert costs_at(profile, 1).boundaries.output.tolist() == [74, 64 + 64, 1]


def test_input_of_the_model_is_not_saved_by_layers() -> None:
    """The caller holds it for the whole step; it counts as data of the first stage."""
    profile = chain(
        layer("a", detail=record(internal=7, given=[tensor(500, kept=True)], made=[tensor(500, alias=0, kept=True)]))
    )
    costs = costs_at(profile, 1)
    assert costs.memory.saved.tolist() == [7]
    assert costs.boundaries.input.tolist() == [500]


def test_target_bytes_are_interpolated() -> None:
    details = (record(target=10), record(target=30))
    profile = chain(
        layer(
            "a", forward_us=(0.0, 0.0), backward_us=(0.0, 0.0), output_bytes=(0, 0), saved_bytes=(0, 0), detail=details
        ),
        sizes=(1, 3),
    )
    assert costs_at(profile, 2).target == 20.0


def test_tied_parameters_count_once_in_a_stage_with_both_layers() -> None:
    """Gradients and optimizer state count once as well."""
    profile = chain(
        layer("wte", parameter_bytes=100, optimizer_bytes=200, tied=("lm_head.weight",), tied_bytes=100),
        layer("h.0", parameter_bytes=7, optimizer_bytes=14),
        layer("lm_head", parameter_bytes=130, optimizer_bytes=260, tied=("wte.weight",), tied_bytes=100),
    )
    costs = costs_at(profile, 1)
    assert [(tie.first, tie.second) for tie in costs.ties] == [(0, 2)]

    def held(first: int, end: int) -> tuple[int, int, int]:
        memory = whole(costs, first, end)
        return memory.parameters, memory.gradients, memory.optimizer

    assert held(0, 3) == (137, 137, 274)
    assert held(0, 2) == (107, 107, 214)
    assert held(2, 3) == (130, 130, 260)
    assert held(1, 3) == (137, 137, 274)


def test_frozen_tied_parameters_share_no_gradients() -> None:
    tie = {"optimizer_bytes": 60, "tied_bytes": 100}

    def gradients(of_trained: int) -> tuple[int, int]:
        profile = chain(
            layer("wte", parameter_bytes=100, gradient_bytes=min(of_trained, 100), tied=("head.weight",), **tie),
            layer("head", parameter_bytes=130, gradient_bytes=of_trained, tied=("wte.weight",), **tie),
        )
        memory = whole(costs_at(profile, 1), 0, 2)
        assert memory.parameters == 130
        return memory.gradients, memory.optimizer

    assert gradients(30) == (60, 120)
    assert gradients(130) == (130, 74)


def test_parameters_tied_by_three_layers_count_once_per_stage() -> None:
    holders = ("a", "b", "c")
    layers = [
        layer(name, parameter_bytes=50, tied=tuple(f"{x}.weight" for x in holders if x != name), tied_bytes=50)
        for name in holders
    ]
    costs = costs_at(chain(*layers), 1)
    assert [whole(costs, first, end).parameters for first, end in ((0, 3), (0, 2), (1, 3), (1, 2))] == [50] * 4


def test_layer_tied_to_two_others_keeps_the_copy_of_the_absent_one() -> None:
    """Layer c shares 100 bytes with a and 50 with b, so a stage of b and c holds 150."""
    profile = chain(
        layer("a", parameter_bytes=100, tied=("c.first",), tied_bytes=100),
        layer("b", parameter_bytes=50, tied=("c.second",), tied_bytes=50),
        layer("c", parameter_bytes=150, tied=("a.weight", "b.weight"), tied_bytes=150),
    )
    costs = costs_at(profile, 1)
    assert whole(costs, 1, 3).parameters >= 150
    assert whole(costs, 0, 3).parameters >= 150


def test_tied_groups_separate_shared_parameters() -> None:
    """Layer c shares 50 bytes with a and b, and 100 only with a."""
    groups = (TiedGroup(layers=("a", "b"), bytes=50), TiedGroup(layers=("a",), bytes=100))
    profile = chain(
        layer("a", parameter_bytes=150, tied=("b", "c"), tied_bytes=150),
        layer("b", parameter_bytes=60, tied=("a", "c"), tied_bytes=50),
        layer("c", parameter_bytes=170, tied=("a", "b"), tied_bytes=150, tied_groups=groups),
    )
    costs = costs_at(profile, 1)
    assert [whole(costs, *stage).parameters for stage in ((1, 3), (0, 3), (0, 2))] == [180, 180, 160]


def test_tied_names_match_whole_layer_names() -> None:
    profile = chain(
        layer("h.10", parameter_bytes=100, tied=("head.weight",), tied_bytes=100),
        layer("h.1", parameter_bytes=20),
        layer("head", parameter_bytes=100, tied=("h.10.weight",), tied_bytes=100),
    )
    assert [(tie.first, tie.second) for tie in costs_at(profile, 1).ties] == [(0, 2)]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("size", [1, 3, 4, 6])
def test_times_equal_those_of_the_composed_costs(size: int, *, exact: bool) -> None:
    table = CostTable(random_profile(3, 7, exact=exact, sizes=(1, 4)))
    costs = CostsAtSize(table, size, extrapolate=True, replicas=2)
    assert costs.forward_us.tolist() == costs.costs.forward_us.tolist()
    assert costs.backward_us.tolist() == costs.costs.backward_us.tolist()
    assert costs.costs.bucket_bytes > 0


def test_sizes_excluded_by_times_are_not_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    compose = CostTable.at

    def at(self: CostTable, micro_batch_size: int, *, extrapolate: bool = False) -> ChainCosts:
        read.append(micro_batch_size)
        return compose(self, micro_batch_size, extrapolate=extrapolate)

    monkeypatch.setattr(CostTable, "at", at)
    profile = random_profile(3, 12, sizes=(1, 64))
    plan = solve(profile, Request(inputs=inputs_of(4, 64)))
    assert plan.micro_batch_size in read
    assert len(read) < 7  # divisors of the batch
