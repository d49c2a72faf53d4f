"""Tests of messages on failed runs."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from planner.core.errors import TrainingError
from planner.executor.run.gradients import check_gradients_are_finite, check_losses, check_output_is_finite
from planner.executor.watch import explain
from planner.executor.watch.activity import ANY, RankActivity
from planner.executor.watch.failure import FailureWatch
from tests.support.ranks import run_ranks


def activity(doing: str = "forward of micro-batch 1") -> RankActivity:
    """Return the activity of stage 1 of 2, in step 7."""
    here = RankActivity()
    here.names, here.stages = {0: "stage 0 (layer a)", 1: "stage 1 (layers b to c)"}, (1,)
    here.step = 7
    here.begin(doing, stage=1)
    return here


def sent_activity(
    name: str, waits_for: int | None, where: str = "in forward of micro-batch 2 of step 7"
) -> dict[str, object]:
    """Return the values that a rank sends to the others."""
    return {"name": name, "waits_for": waits_for, "where": where, "idle_s": 61.0, "beat": 3}


def test_positions_name_stage_replica_and_step() -> None:
    here = activity()
    assert (here.name, here.where) == ("stage 1 (layers b to c)", "in forward of micro-batch 1 of step 7")
    here.begin("between steps")
    here.stages, here.replica = (0, 1), 2
    two = "the process of stages 0 (layer a) and 1 (layers b to c) of replica 2"  # one thing, that is gone or waits
    assert (here.name, here.where) == (two, "between steps")
    assert here.waits_for is None
    assert RankActivity().name == ""


def test_the_rank_that_waits_for_no_other_is_named_as_hanging() -> None:
    """If every rank waits for another, all are named."""
    ranks = {0: sent_activity("stage 0", 1), 1: sent_activity("stage 1", None), 2: sent_activity("stage 2", ANY)}
    message = explain.error_of_hang(ranks, 60.0).message
    assert message.startswith(
        "stage 1 has been in forward of micro-batch 2 of step 7 for 61 s, and holds up the others"
    )
    assert message.endswith("stage 0 waits in forward of micro-batch 2 of step 7; stage 2 waits in forward of "
                            "micro-batch 2 of step 7")  # fmt: skip
    ranks[1] = sent_activity("stage 1", 0)
    assert explain.error_of_hang(ranks, 60.0).message.startswith(
        "the stages wait for each other for 60 s: stage 0 waits"
    )


def test_out_of_memory_errors_report_the_predicted_peak() -> None:
    here = activity("backward of micro-batch 0")
    here.predicted_bytes = {0: 1, 1: 3 * 2**30}
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    error = explain.error_for_exception(raised.value, here)
    assert error.message.startswith("stage 1 (layers b to c) ran out of memory in backward of micro-batch 0 of step 7")
    assert "the plan predicts a peak of 3.00 GiB" in error.message
    assert "you tried to allocate" in error.message
    assert "--reserve" in error.hint
    assert "ran out of memory" in explain.error_for_exception(MemoryError("no"), here).message


def test_a_buffer_that_a_later_forward_overwrites_is_explained() -> None:
    weight, buffer = torch.ones((), requires_grad=True), torch.ones(())
    product = weight * buffer
    buffer.copy_(torch.zeros(()))
    with pytest.raises(RuntimeError) as raised:
        product.backward()
    assert "assign a new tensor to the buffer" in explain.error_for_exception(raised.value, activity()).hint


def test_the_wrapped_cause_is_reported_with_its_lines() -> None:
    with pytest.raises(KeyError) as cause:
        {}["mine"]
    error = RuntimeError("[Rank 0] failed to run forward")
    error.__cause__ = cause.value
    message = explain.error_for_exception(error, activity()).message
    assert "failed in forward of micro-batch 1 of step 7: KeyError: 'mine'" in message
    assert Path(__file__).name in message
    assert "Rank 0" not in message


def test_frames_of_context_managers_are_omitted() -> None:
    @contextlib.contextmanager
    def step() -> Iterator[None]:
        yield
        raise KeyError("mine")

    with pytest.raises(KeyError) as raised, step():
        pass
    message = explain.error_for_exception(raised.value, activity()).message
    assert "contextlib.py" not in message
    assert Path(__file__).name in message


def test_the_first_non_finite_tensor_is_named() -> None:
    good, bad = torch.ones(()), torch.tensor(float("inf"))
    check_losses([good, good], 1.0, activity())
    with pytest.raises(TrainingError, match=r"micro-batch 1 of step 7 is inf, computed on stage 1 \(layers b to c\)"):
        check_losses([good, bad], float("inf"), activity())
    check_output_is_finite((good, torch.ones(2, dtype=torch.int64)), activity())
    with pytest.raises(
        TrainingError, match=r"stage 1 .* returned NaN or infinity in forward of micro-batch 1 of step 7"
    ):
        check_output_is_finite(bad, activity())
    parameters: dict[str, Tensor] = {"a.weight": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2))}
    check_gradients_are_finite(parameters, activity())
    parameters["b"].grad = torch.full((2,), float("nan"))
    with pytest.raises(TrainingError, match=r"the gradient of b on stage 1"):
        check_gradients_are_finite(parameters, activity())


def test_signals_end_a_single_process_at_once_or_after_its_step() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as left, FailureWatch(60.0):
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 143
    with FailureWatch(60.0) as watch:
        watch.saves_on_stop = True
        assert watch.stop_signal(1) == 0
        signal.raise_signal(signal.SIGTERM)
        assert watch.stop_signal(2) == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


LEAVES_LATER = """
import time
from planner.executor.watch.failure import FailureWatch

with FailureWatch(60.0) as watch:
    watch._store.wait(["at/0", "at/1"])
    if watch._rank == 0:
        watch._store.wait(["heard"])  # else it might leave, and the store with it, before the other has its answer
    else:
        watch._store.set("heard", "1")
        time.sleep(2.0)
"""


@pytest.mark.slow
def test_a_rank_may_end_after_the_rank_with_the_store(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text(LEAVES_LATER)
    assert "Traceback" not in run_ranks(2, ["worker.py"], tmp_path)


TERMINATES_A_CHILD = """
import os, signal, time
from planner.executor.watch.failure import FailureWatch

with FailureWatch(60.0) as watch:
    child = os.fork()
    if not child:
        time.sleep(60.0)
        os._exit(0)
    time.sleep(0.1)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    time.sleep(1.0)
    assert watch._signal == 0
    if not os.fork():
        raise SystemExit(0)  # leaves the block in the child: the job must not take it for this rank
    os.wait()
    if watch._store is not None:
        assert not watch._store.check(["quit"])
        watch._store.set(f"looked/{watch._rank}", "1")
        if watch._rank == 0:
            watch._store.wait(["looked/1"])  # else it might leave, and the store with it, before the other has looked
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_terminated_child_process_is_no_signal_to_the_job(tmp_path: Path, count: int) -> None:
    """`multiprocessing.Pool` ends its workers by SIGTERM."""
    (tmp_path / "worker.py").write_text(TERMINATES_A_CHILD)
    assert "Traceback" not in run_ranks(count, ["worker.py"], tmp_path)
