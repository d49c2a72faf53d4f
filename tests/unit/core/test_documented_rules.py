"""Special rules of docs/cost-model.md that few plans need. Each test quotes the page and applies the rule by hand."""

from dataclasses import replace

import pytest

from planner.core.cost.costs import costs_at
from planner.core.cost.device_memory import chunk_memory
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.cost.peak_points import ALLOCATIONS
from planner.core.schedule import SCHEDULES
from planner.core.values.cluster import Cluster, Link
from planner.core.values.plan import Recompute
from tests.support.chains import chain, layer
from tests.support.docs import ROOT

PAGE = " ".join((ROOT / "docs" / "cost-model.md").read_text(encoding="utf-8").split())
UNLIMITED = (10**12,) * 4


def held_bytes(held: int | None, recompute: Recompute) -> int:
    """Return the bytes at the input-gradient pass of layers 1 to 2 without exact records."""
    more = {} if held is None else {"weight_held_bytes": (held,)}
    passes = {"backward_us": 4.0, "backward_input_us": (2.0,), "backward_weight_us": (2.0,), "forward_us": 2.0}
    layers = [layer(str(n), output_bytes=10, saved_bytes=100, **passes, **more) for n in range(4)]
    memory = chunk_memory(costs_at(chain(*layers), 1), 1, 3, micro_batches=4, recompute=recompute, splits_backward=True)
    return int(memory.allocation_bytes[ALLOCATIONS.index("input_backward")])


@pytest.mark.parametrize(("recompute", "waiting"), [("never", 10 + 200), ("always", 10 + 10)])
def test_input_gradient_pass_needs_the_larger_of_waiting_and_held_bytes(recompute: Recompute, waiting: int) -> None:
    """A = I + S = 10 + 200, E = I + O = 10 + 10."""
    assert "input-gradient pass max(A, H) instead of A, or max(E, H) instead of E, in the lines above" in PAGE
    least = held_bytes(0, recompute)
    assert held_bytes(waiting // 2, recompute) == least
    assert held_bytes((waiting + 50) // 2, recompute) == least + 50
    assert "If any layer lacks these bytes or the time of a pass, H is I + S" in PAGE
    assert held_bytes(None, recompute) == least + max(0, 210 - waiting)


def test_1f1b_receives_an_input_before_a_backward_except_on_stage_0() -> None:
    """Stage 1 of three has two micro-batches waiting, 110 bytes each, and the next input of 10 bytes."""
    assert "On every stage except stage 0, the **input of the next forward is received before the current" in PAGE
    layers = [layer(str(n), output_bytes=10, saved_bytes=100, forward_us=2.0, backward_us=4.0) for n in range(3)]
    cuts = Partition(schedule="1f1b", micro_batches=8, balance=(1, 1, 1), recompute=("never",) * 3)
    stages = Evaluation(costs_at(chain(*layers), 1), cuts, Cluster(memory_bytes=UNLIMITED)).stages
    assert [stage.memory.in_flight for stage in stages] == [3 * 100, 2 * (100 + 10) + 10, 100 + 10 + 10]


def test_stages_of_a_profile_without_gradients_recompute() -> None:
    """A profile by hand may have no sizes. Its stages have a backward, so that R_k = F_k."""
    assert (
        "But if no layer of the profile has `gradient_bytes` or `idle_bytes` above 0, as in a profile written by hand "
        "without sizes, every stage has a backward." in PAGE
    )
    layers = [layer(str(n), forward_us=3.0, backward_us=5.0) for n in range(4)]
    cuts = Partition(schedule="gpipe", micro_batches=2, balance=(2, 2), recompute=("always",) * 2)
    cluster = Cluster(memory_bytes=UNLIMITED)
    assert [times.backward_us for times in Evaluation(costs_at(chain(*layers), 1), cuts, cluster).stage_times] == [
        16
    ] * 2
    trained = replace(layers[3], gradient_bytes=4, parameter_bytes=4)
    some = costs_at(chain(*layers[:3], trained), 1)
    assert [times.backward_us for times in Evaluation(some, cuts, cluster).stage_times] == [10, 16]


@pytest.mark.parametrize("chunks", [1, 2])
def test_every_chunk_pays_the_latency_of_the_allreduce(chunks: int) -> None:
    """A_k = 2 (R-1) (latency + G_k / R / bandwidth), here with R = 2, 7 us and 1 byte per us."""
    assert "So a device with V chunks runs V all-reduces in sequence, with V times the latency." in PAGE
    layers = [layer(str(n), forward_us=3.0, backward_us=5.0, parameter_bytes=6) for n in range(4)]
    cuts = Partition(
        schedule="interleaved" if chunks > 1 else "gpipe",
        micro_batches=4,
        balance=(4 // (2 * chunks),) * 2 * chunks,
        recompute=("never",) * 2 * chunks,
        chunks=chunks,
        replicas=2,
    )
    ring = Cluster(memory_bytes=UNLIMITED, allreduce=Link(latency_us=7.0, bytes_per_s=1e6))
    sums_us = Evaluation(costs_at(chain(*layers), 1), cuts, ring).gradient_allreduce_us
    assert list(sums_us) == [2 * (7 + 12 / chunks / 2)] * 2 * chunks
    assert sum(sums_us[:chunks]) == pytest.approx(2 * 7 * chunks + 12)


@pytest.mark.parametrize(("devices", "micro_batches"), [(4, 2), (4, 4), (4, 16), (3, 9)])
def test_interleaved_with_one_chunk_is_1f1b_with_a_longer_warm_up(devices: int, micro_batches: int) -> None:
    assert "device d runs min(M, 2·(K-1-d) + 1) forwards before its first backward" in PAGE
    for device, row in enumerate(SCHEDULES["interleaved"].actions(devices, micro_batches, 1)):
        kinds = "".join(action.kind for action in row)
        assert kinds.index("B") == min(micro_batches, 2 * (devices - 1 - device) + 1)
        assert kinds.count("F") == kinds.count("B") == micro_batches


@pytest.mark.parametrize(
    ("balance", "expected_us"), [((3,), [40 + 10 + 30]), ((2, 1), [40 + 10, 130]), ((1, 2), [40, 10 + 130])]
)
def test_a_stage_updates_tied_parameters_once(balance: tuple[int, ...], expected_us: list[float]) -> None:
    """The head has 130 bytes of gradients, 100 of which are shared."""
    assert "counts tied parameters once per stage" in PAGE
    profile = chain(
        layer("wte", parameter_bytes=100, optimizer_us=40.0, tied=("lm_head.weight",), tied_bytes=100),
        layer("h.0", parameter_bytes=7, optimizer_us=10.0),
        layer("lm_head", parameter_bytes=130, optimizer_us=130.0, tied=("wte.weight",), tied_bytes=100),
    )
    cuts = Partition(schedule="gpipe", micro_batches=2, balance=balance, recompute=("never",) * len(balance))
    evaluation = Evaluation(costs_at(profile, 1), cuts, Cluster(memory_bytes=UNLIMITED))
    assert evaluation.between_steps_us[: len(balance)].tolist() == pytest.approx(expected_us)
