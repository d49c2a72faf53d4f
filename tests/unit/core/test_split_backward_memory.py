"""Memory of stages with split backwards, worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from planner.core.cost.costs import CostTable, costs_at
from planner.core.cost.device_memory import SharedBytes, chunk_memory, shared_bytes
from planner.core.cost.peak_points import ALLOCATIONS, allocation_counts
from planner.core.cost.stages import SplitBackwardMemory, stage_memory_table
from planner.core.schedule import SCHEDULES
from planner.core.values.profile import BoundaryTensor, Device, LayerProfile, MemoryDetail, Profile, SplitMemory

OUT = 1000
"""Bytes of a boundary tensor."""
GRADIENT = 400
"""Bytes of a layer's gradients, all made in W."""

CASTS = ALLOCATIONS.index("casts")


def layer(number: int, **split: int) -> LayerProfile:
    """Return a layer that saves its input and 5000 bytes, and 3000 between I and W."""
    tensor = BoundaryTensor(bytes=OUT, kept=True)
    record = {
        "held_bytes": 3000,
        "weight_gradient_bytes": GRADIENT,
        "first_input_peak_bytes": 8000,
        "input_peak_bytes": 8000,
        "first_weight_peak_bytes": 3500,
        "weight_peak_bytes": 3600,
    }
    return LayerProfile(
        name=f"layers.{number}",
        parameter_bytes=GRADIENT,
        forward_us=(1.0,),
        backward_us=(2.0,),
        backward_input_us=(1.0,),
        backward_weight_us=(1.0,),
        output_bytes=(OUT,),
        saved_bytes=(5000,),
        weight_held_bytes=(3000,),
        detail=(
            MemoryDetail(
                internal_bytes=5000,
                inputs=(tensor,),
                outputs=(replace(tensor, kept=False),),
                forward_peak_bytes=7000,
                no_grad_peak_bytes=3000,
                first_backward_peak_bytes=8000 + GRADIENT,
                backward_peak_bytes=8000,
            ),
        ),
        split=(SplitMemory(**{**record, **split}),),
    )


def profile_of_layers(*layers: LayerProfile) -> Profile:
    """Return a profile of these layers."""
    return Profile(device=Device(kind="cpu"), micro_batch_sizes=(1,), layers=layers)


def split_backward_of(profile: Profile, first: int, end: int) -> SplitBackwardMemory:
    """Return the split backward of the stage of layers `first` to `end - 1`."""
    columns = slice(first, end)
    memory = stage_memory_table(
        costs_at(profile, 1), np.array([first]), columns, micro_batches=4, splits_backward=True
    ).split_backward
    assert memory is not None
    return memory


def last(sizes: np.ndarray) -> float:
    """Return the bytes of the longest stage."""
    return float(np.broadcast_to(sizes, (1, np.size(sizes)))[0, -1])


def test_weight_gradients_run_from_the_last_layer_to_the_first() -> None:
    """While W of a layer runs, earlier layers still hold tensors, and later layers already have gradients."""
    profile = profile_of_layers(*(layer(n) for n in range(4)))
    memory = split_backward_of(profile, 1, 4)
    assert last(memory.held) == 3 * 3000
    assert last(memory.weight) == 2 * 3000 + 3600
    assert last(memory.first_weight) == 2 * 3000 + 3500
    late = profile_of_layers(*(layer(n, first_weight_peak_bytes=9000 if n == 1 else 3500) for n in range(4)))
    assert last(split_backward_of(late, 1, 4).first_weight) == 9000 + 2 * GRADIENT


def test_inputs_of_the_first_stage_are_part_of_the_mini_batch() -> None:
    """The mini-batch holds them anyway; the first layers of other stages hold their own inputs."""
    profile = profile_of_layers(*(layer(n, held_input_bytes=OUT) for n in range(3)))
    assert last(split_backward_of(profile, 0, 2).held) == 2 * 3000 - OUT
    assert last(split_backward_of(profile, 1, 3).held) == 2 * 3000
    assert last(split_backward_of(profile, 0, 2).weight) == 3000 - OUT + 3600


@pytest.mark.parametrize(("with_output", "counted"), [(8000, 8000 - OUT), (8600, 8600 - OUT), (99000, 8000)])
def test_output_saved_by_the_next_layer_counts_once(with_output: int, counted: int) -> None:
    behind = layer(2, held_input_bytes=OUT, input_peak_bytes=0, first_input_peak_bytes=0)
    profile = profile_of_layers(layer(0), layer(1, output_input_peak_bytes=with_output), behind)
    # The next layer's 3000, and the stage's output, which the engine holds.
    assert last(split_backward_of(profile, 1, 3).input) == counted + 3000 + OUT


def test_output_and_gradient_count_once_at_the_end_of_a_stage() -> None:
    """The engine holds and counts both."""
    profile = profile_of_layers(layer(0), layer(1, end_input_peak_bytes=9200), layer(2))
    assert last(split_backward_of(profile, 1, 2).input) == 9200 - OUT
    without = profile_of_layers(layer(0), layer(1), layer(2))
    assert last(split_backward_of(without, 1, 2).input) == 8000 + OUT


def test_gradients_of_cached_weights_wait_for_the_end_of_w() -> None:
    half = GRADIENT // 2
    profile = profile_of_layers(*(replace(layer(n, weight_peak_bytes=3600), cast_bytes=half) for n in range(3)))
    assert last(split_backward_of(profile, 0, 3).weight) == 2 * 3000 + 3600
    high = profile_of_layers(
        *(replace(layer(n, weight_peak_bytes=9900 if n == 0 else 3600), cast_bytes=half) for n in range(3))
    )
    assert last(split_backward_of(high, 0, 3).weight) == max(9900 + 2 * half, 3 * half + 9900 - half)


def test_gradients_of_tied_weights_wait_for_each_other_in_w() -> None:
    first = replace(layer(0), tied=("layers.2",), tied_bytes=GRADIENT)
    second = replace(layer(2), tied=("layers.0",), tied_bytes=GRADIENT)
    untied = profile_of_layers(layer(0), layer(1, weight_peak_bytes=9900), layer(2))
    tied = profile_of_layers(first, layer(1, weight_peak_bytes=9900), second)
    assert last(split_backward_of(untied, 0, 3).weight) == 3000 + 9900
    assert last(split_backward_of(tied, 0, 3).weight) == 3000 + 9900 + GRADIENT


def test_weight_cache_counts_twice_with_whole_and_split_backwards() -> None:
    """In DualPipeV, autocast caches weights for whole backwards, and the executor for split ones."""
    for name, copies in (("dualpipev", 2), ("zbv", 1)):
        for counts in allocation_counts(SCHEDULES[name].actions(2, 8, 2)):
            assert (counts.during[:, :, CASTS] == copies).all()


def test_split_backward_is_assumed_if_one_layer_lacks_it() -> None:
    profile = profile_of_layers(layer(0), layer(1))
    assert not CostTable(profile).is_split_backward_assumed
    assert CostTable(profile_of_layers(layer(0), replace(layer(1), split=()))).is_split_backward_assumed
    assert CostTable(profile_of_layers(layer(0), replace(layer(1), backward_weight_us=()))).is_split_backward_assumed


def test_tensor_passed_between_chunks_of_a_device_is_held_once() -> None:
    """At the turn of a V, the output of one stage is the input of the next."""
    costs = costs_at(profile_of_layers(*(layer(n) for n in range(4))), 1)
    cuts = np.array([[0, 1, 2, 3, 4]])
    shared = shared_bytes(costs, cuts, 2, "v")
    assert shared.received.tolist() == [[0, 0, OUT, 0]]
    assert not shared_bytes(costs, cuts, 2, "loop").received.any()
    chunk = chunk_memory(costs, 2, 3, micro_batches=4, recompute="never", splits_backward=True)
    here = chunk.without(SharedBytes(*(item[:, 2:3] for item in shared)), exact=True)
    for name in ("held", "forward", "input_backward", "last_input_backward"):
        assert here.allocation_bytes[ALLOCATIONS.index(name)] == chunk.allocation_bytes[ALLOCATIONS.index(name)] - OUT
    for name in ("weight_held", "weight_backward", "input", "output_gradient"):
        assert here.allocation_bytes[ALLOCATIONS.index(name)] == chunk.allocation_bytes[ALLOCATIONS.index(name)]
