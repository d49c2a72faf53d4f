"""Our action lists are those that torch.distributed.pipelining runs, read from the engine without processes.

Two sources: the order in which the engine's own loop calls a (mocked) stage, which is what is executed, and the order
that `_get_pipeline_order` announces, which the engine's visualiser draws.
"""

from typing import Any
from unittest import mock

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, ScheduleGPipe, _ComputationType
from torch.distributed.pipelining.stage import PipelineStage

from planner.core.schedule import SCHEDULES
from planner.core.values.plan import ScheduleName

KINDS = {_ComputationType.FORWARD: "F", _ComputationType.FULL_BACKWARD: "B"}
ENGINE: dict[ScheduleName, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
SIZES = [(1, 1), (1, 4), (2, 2), (2, 5), (3, 3), (4, 4), (4, 7), (5, 16), (8, 8), (8, 32)]


def mocked_stage(stage_index: int, num_stages: int) -> Any:
    """A stage that computes and sends nothing."""
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.stage_index = stage.group_rank = stage_index
    stage.group_size = stage.num_stages = num_stages
    stage.submod = None
    for operations in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, operations).return_value = []
    return stage


def executed(schedule: ScheduleName, stage_index: int, num_stages: int, micro_batches: int) -> list[str]:
    """The forwards and backwards of one stage as the engine's loop calls them."""
    stage = mocked_stage(stage_index, num_stages)
    calls: list[str] = []
    stage.forward_one_chunk.side_effect = lambda i, *_args, **_kwargs: calls.append(f"F{i}")
    stage.backward_one_chunk.side_effect = lambda i, **_kwargs: calls.append(f"B{i}")
    engine = ENGINE[schedule](stage, micro_batches)
    nothing: list[Any] = [()] * micro_batches
    harness = ("_initialize_stage", "_maybe_compute_loss", "_maybe_get_loss", "_update_losses")
    with mock.patch.multiple(engine, **dict.fromkeys(harness, mock.DEFAULT)):
        engine._step_microbatches(nothing, [{}] * micro_batches)
    return calls


def announced(schedule: ScheduleName, num_stages: int, micro_batches: int) -> list[list[str]]:
    """Per stage the engine's announced order, idle slots left out."""
    order = ENGINE[schedule](mocked_stage(0, num_stages), micro_batches)._get_pipeline_order()
    assert order is not None
    found = []
    for rank in range(num_stages):
        actions = [action for action in order[rank] if action is not None]
        # A reduction over data-parallel replicas may end the list; it is no pass of a micro-batch.
        if actions[-1].computation_type is _ComputationType.REDUCE_GRAD:
            actions.pop()
        assert {action.stage_index for action in actions} == {rank}
        found.append([f"{KINDS[action.computation_type]}{action.microbatch_index}" for action in actions])
    return found


def ours(schedule: ScheduleName, num_stages: int, micro_batches: int) -> list[list[str]]:
    """Our lists as text."""
    stages = SCHEDULES[schedule].actions(num_stages, micro_batches)
    return [[f"{action.kind}{action.micro_batch}" for action in stage] for stage in stages]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "micro_batches"), SIZES)
def test_actions_are_those_the_engine_executes(schedule: ScheduleName, num_stages: int, micro_batches: int) -> None:
    """Stage by stage the same forwards and backwards in the same order."""
    engine = [executed(schedule, k, num_stages, micro_batches) for k in range(num_stages)]
    assert ours(schedule, num_stages, micro_batches) == engine


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gpipe_with_few_micro_batches_is_that_of_the_engine(micro_batches: int) -> None:
    """Fewer micro-batches than stages, which GPipe allows."""
    assert ours("gpipe", 6, micro_batches) == [executed("gpipe", k, 6, micro_batches) for k in range(6)]


@pytest.mark.parametrize(("num_stages", "micro_batches"), SIZES)
def test_gpipe_actions_are_those_the_engine_announces(num_stages: int, micro_batches: int) -> None:
    """The list that torch's visualiser draws."""
    assert ours("gpipe", num_stages, micro_batches) == announced("gpipe", num_stages, micro_batches)


@pytest.mark.parametrize(("num_stages", "micro_batches"), SIZES)
def test_1f1b_actions_are_those_the_engine_announces(num_stages: int, micro_batches: int) -> None:
    """Stage by stage; on the last one torch 2.13 announces forwards one too high (F1 B0 F2 B1), and runs them right."""
    announcement = announced("1f1b", num_stages, micro_batches)
    assert ours("1f1b", num_stages, micro_batches)[:-1] == announcement[:-1]
    last = [action if action[0] == "B" else f"F{int(action[1:]) - 1}" for action in announcement[-1]]
    assert last == executed("1f1b", num_stages - 1, num_stages, micro_batches)
