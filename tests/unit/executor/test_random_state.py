"""Tests of seeds per step, layer and micro-batch."""

import random
from itertools import product

import pytest
import torch

from planner.executor.run.random_state import StepSeeds
from planner.model.seeding import keeping_random_state, layer_seed, seed_process


def test_seeds_differ_between_layers_micro_batches_steps_and_runs() -> None:
    seeds = [layer_seed(*parts) & 0xFFFFFFFF for parts in product((0, 1, 7), range(10), range(20), range(8))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= layer_seed(seed, 10**6, 10**4, 10**4) < 1 << 64 for seed in (0, 2**40))


def test_seeds_repeat_in_any_order() -> None:

    def drawn(seeds: StepSeeds, layer: int, micro_batch: int) -> list[float]:
        seeds.seed_generators(layer, micro_batch)
        return torch.rand(3).tolist()

    seeds = StepSeeds(seed=3, step=5)
    one, two = drawn(seeds, 0, 4), drawn(seeds, 1, 4)
    assert one != two
    assert drawn(seeds, 0, 4) == one
    assert drawn(StepSeeds(3, 5, first_micro_batch=4), 1, 0) == two
    torch.manual_seed(layer_seed(3, 5, 1, 4))
    assert torch.rand(3).tolist() == two


def test_a_step_restores_the_random_state() -> None:
    seed_process(4)
    expected = torch.rand(2), random.random()
    seed_process(4)
    with keeping_random_state():
        StepSeeds(0, 0).seed_generators(0, 0)
        torch.rand(5)
    assert torch.equal(torch.rand(2), expected[0])
    assert random.random() == expected[1]


def test_numpy_is_seeded_also_from_large_seeds() -> None:
    numpy = pytest.importorskip("numpy")
    drawn = []
    for _ in range(2):
        seed_process(2**40 + 3)
        drawn.append(numpy.random.rand())
    assert drawn[0] == drawn[1]
