"""Memory of gradient messages to replicas, and of parameters that chunks of a device share, by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from planner.core.cost import chain_costs as costs_module
from planner.core.cost.chain_costs import ChainCosts
from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.values.cluster import Cluster
from planner.core.values.plan import Recompute, ScheduleName, StageMemory
from tests.support.chains import even_chain

MANY = 10**9


def costs_of(*, parameters: tuple[int, ...] = (100, 0, 1000)) -> ChainCosts:
    """Return layers of which the last has the highest backward peak."""
    return costs_at(even_chain(parameters), 1)


def memory_of(
    costs: ChainCosts, *, m: int, replicas: int = 2, recompute: Recompute = "never", schedule: ScheduleName = "gpipe"
) -> StageMemory:
    """Return the memory of one stage with all layers."""
    partition = Partition(schedule=schedule, micro_batches=m, balance=(3,), recompute=(recompute,), replicas=replicas)
    (stage,) = Evaluation(costs, partition, Cluster(memory_bytes=(MANY,))).stages
    return stage.memory


def test_small_stage_sends_all_gradients_in_one_message() -> None:
    """1,100 bytes of gradients and as many in the message; only the first layer's backward level remains then."""
    memory = memory_of(costs_of(), m=3)
    assert memory.transfer == 1100
    # 70 above what is held in front of that layer, which is nothing, and the loss of 8 that the engine holds.
    assert (memory.gradients, memory.working) == (1100, 70 + 8)
    assert memory.total == 1100 + 1100 + 1100 + 3 * 8 + 78


def test_one_micro_batch_sends_gradients_of_the_same_backward() -> None:
    memory = memory_of(costs_of(), m=1)
    assert memory.transfer == 1100
    assert memory.gradients + memory.working == 60 + 1100 + 8


def test_large_stage_sends_one_message_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message may be sent at any time of the last backward, so the highest level counts."""
    monkeypatch.setattr(costs_module, "BUCKET_BYTES", 400)
    memory = memory_of(costs_of(), m=3)
    assert memory.transfer == 400
    # In front of the last layer 2 * (20 + 8) bytes are saved.
    assert memory.working == 56 + 70 + 8


@pytest.mark.parametrize("recompute", ["never", "except-last", "always"])
def test_replicas_do_not_change_the_peak_with_many_micro_batches(recompute: Recompute) -> None:
    costs = costs_of(parameters=(4, 0, 4))
    assert memory_of(costs, m=9, recompute=recompute) == memory_of(costs, m=9, recompute=recompute, replicas=1)


def shared(
    *,
    schedule: ScheduleName = "interleaved",
    optimizer: int = 0,
    others: Sequence[Sequence[int]] = ((2,), (), (0,), ()),
) -> tuple[list[StageMemory], list[StageMemory]]:
    """Return memory of four stages on two devices, tied as requested and not tied."""
    found = []
    even = even_chain((0,) * 4, optimizer_peak_bytes=optimizer)
    for tied in (200, 0):
        layers = [
            replace(
                one,
                parameter_bytes=size,
                gradient_bytes=size,
                optimizer_bytes=2 * size,
                tied=tuple(f"layers.{n}.weight" for n in other) if tied else (),
                tied_bytes=tied if other else 0,
            )
            for one, size, other in zip(even.layers, (200, 500, 300, 500), others, strict=True)
        ]
        partition = Partition(
            schedule=schedule,
            micro_batches=4,
            balance=(1,) * 4,
            recompute=("never",) * 4,
            chunks=2 if schedule == "interleaved" else 1,
        )
        cluster = Cluster(memory_bytes=(MANY,) * partition.num_devices)
        costs = costs_at(replace(even, layers=tuple(layers)), 1)
        found.append(list(Evaluation(costs, partition, cluster).memory))
    return found[0], found[1]


def test_chunks_of_a_device_hold_a_shared_parameter_once() -> None:
    """The later chunk, whose backward is the first, counts gradient and state."""
    tied, untied = shared(optimizer=5000)
    assert [a.parameters - b.parameters for a, b in zip(untied, tied, strict=True)] == [200, 0, 0, 0]
    assert [a.optimizer - b.optimizer for a, b in zip(untied, tied, strict=True)] == [400, 0, 0, 0]
    assert [a.gradients - b.gradients for a, b in zip(untied, tied, strict=True)] == [200, 0, 0, 0]
    assert [a.total - b.total for a, b in zip(untied, tied, strict=True)] == [800, 0, 0, 0]


def test_chunks_share_a_parameter_that_another_device_has_too() -> None:
    tied, untied = shared(others=((1, 2), (0, 2), (0, 1), ()))
    assert [a.parameters - b.parameters for a, b in zip(untied, tied, strict=True)] == [200, 0, 0, 0]
    assert [a.gradients - b.gradients for a, b in zip(untied, tied, strict=True)] == [200, 0, 0, 0]


def test_stages_of_different_devices_hold_a_copy_each() -> None:
    tied, untied = shared(schedule="gpipe")
    assert tied == untied
