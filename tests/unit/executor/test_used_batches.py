"""Tests of the number of mini-batches after which a resumed run continues."""

import torch

from planner.executor.used_batches import UsedBatches
from planner.model.load import Batch


def batches(count: int) -> list[Batch]:
    return [Batch(torch.zeros(2), {"labels": torch.zeros(2)}) for _ in range(count)]


def test_a_mini_batch_that_the_loop_gets_ahead_is_not_used() -> None:
    used, (first, second, third) = UsedBatches(), batches(3)
    used.take(first)
    used.take(second)
    assert list(used.used([first])) == [first]
    assert used.num_used == 1
    used.take(third)
    assert list(used.used([(second.inputs + 1, second.targets)]))  # a script may change the inputs
    assert used.num_used == 2


def test_a_step_uses_none_or_several_mini_batches() -> None:
    used, given = UsedBatches(), batches(4)
    used.begin(10)
    for batch in given[:3]:
        used.take(batch)
    list(used.used(given[1:3]))  # the first one was skipped
    assert used.num_used == 13
    list(used.used(given[1:2]))  # a second pass over an earlier one
    assert used.num_used == 13
    used.take(given[3])
    list(used.used([(torch.zeros(2), [1, 2])]))  # a script may change everything
    assert used.num_used == 14


def test_tensors_of_earlier_mini_batches_are_released() -> None:
    used = UsedBatches()
    for _ in range(3):
        used.take(batches(1)[0])
    assert len(used._numbers) == 2


def test_a_new_tensor_at_the_place_of_an_earlier_one_is_not_taken_for_it() -> None:
    used, (first, second) = UsedBatches(), batches(2)
    used.take(first)
    used.take(second)
    changed = torch.zeros(2)
    used._numbers[id(changed)] = used._numbers[id(first.inputs)]
    list(used.used([(changed, [])]))
    assert used.num_used == 2
