"""The regret of the evenest cut: nothing where times do not scatter, much where they do and it matters."""

import random
from itertools import combinations, pairwise

import pytest

from planner.profile.regret import _evenest, regret
from planner.profile.units import Key

CHAIN = ["a", "b", "c", "d"]


def samples_of(times: list[float], spread: float, size: int = 1, seed: int = 0) -> dict[Key, list[tuple[float, float]]]:
    """Ten repeats of every layer, each up to `spread` too long."""
    rng = random.Random(seed)
    return {
        (name, size): [(time * (1 + spread * rng.random()), 0.0) for _ in range(10)]
        for name, time in zip(CHAIN, times, strict=True)
    }


def test_times_that_do_not_scatter_have_no_regret() -> None:
    """Whatever is drawn is what was measured."""
    assert regret(CHAIN, samples_of([1e4, 2e4, 3e4, 1e4], 0.0)) == 0.0


def test_a_cut_that_is_hard_to_tell_is_regretted() -> None:
    """Few repeats of layers that scatter: another draw cuts elsewhere."""
    loud = regret(CHAIN, samples_of([1e4, 1.02e4, 1e4, 0.98e4], 10.0))
    quiet = regret(CHAIN, samples_of([1e4, 1.02e4, 1e4, 0.98e4], 0.01))
    assert quiet < 0.01 < loud


def test_a_cut_that_noise_cannot_move_is_not_regretted() -> None:
    """One layer takes nearly all the time: it is the slowest stage wherever one cuts."""
    assert regret(CHAIN, samples_of([1.0, 1e5, 2.0, 1.0], 2.0)) < 1e-3


def test_a_micro_batch_size_that_is_hard_to_tell_is_regretted() -> None:
    """Of equal layers, whose cut is certain: where both sizes take about as long, and one of them scatters."""

    def regret_of(large: float) -> float:
        rng = random.Random(0)
        scattered = [(large * (1 + 0.8 * rng.random()), 0.0) for _ in range(10)]
        return regret(["a"] * 4, {("a", 1): [(1e4, 0.0)] * 10, ("a", 2): scattered})

    assert max(regret_of(1e3 * n) for n in range(8, 16)) > 0.01
    assert regret_of(0.4e4) == 0.0


def test_what_takes_no_time_beside_an_executor_does_not_matter() -> None:
    """Layers of a microsecond, however much they scatter."""
    assert regret(CHAIN, samples_of([1.0, 1.1, 1.2, 1.0], 2.0)) < 0.01


def test_a_single_layer_cannot_be_cut_wrongly() -> None:
    """Nor can an empty measurement."""
    assert regret(["a"], {("a", 1): [(1e5, 2e5), (2e5, 1e5)]}) == 0.0


def test_equal_layers_err_alike() -> None:
    """They were measured once: 8 of them are cut in the middle whatever their time."""
    assert regret(["a"] * 8, {("a", 1): [(1e5, 2e5), (3e5, 1e5), (2e5, 2e5)]}) == 0.0


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_evenest_cut_is_the_evenest(stages: int) -> None:
    """Against all cuts of random chains, layers without time among them."""
    rng = random.Random(stages)
    for _ in range(50):
        times = [rng.choice([0.0, 1.0, rng.random() * 5]) for _ in range(rng.randint(stages, 8))]

        def slowest(cuts: tuple[int, ...], times: list[float] = times) -> float:
            return max(sum(times[first:end]) for first, end in pairwise((0, *cuts, len(times))))

        best = min(map(slowest, combinations(range(1, len(times)), stages - 1)))
        ours = _evenest(times, stages)
        assert (ours[0], ours[-1], len(ours)) == (0, len(times), stages + 1)
        assert slowest(tuple(ours[1:-1])) == pytest.approx(best)
