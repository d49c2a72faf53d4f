"""Waiting times of processes, from synthetic forwards and backwards."""

import pytest

from planner.executor.measure.run_times import RunSpan, RunStep, find_waits, mean_waits, typical_action_us


def f(stage, micro_batch, start, end):
    return RunSpan("forward", stage, micro_batch, start * 1000, end * 1000)


def b(stage, micro_batch, start, end):
    return RunSpan("backward", stage, micro_batch, start * 1000, end * 1000)


# Two stages, M = 2, GPipe. Forward takes 10, backward 20; a transfer 3, the engine 1; in microseconds.
ONE = [f(0, 0, 0, 10), f(0, 1, 11, 21), b(0, 0, 58, 78), b(0, 1, 81, 101)]
TWO = [f(1, 0, 13, 23), f(1, 1, 26, 36), b(1, 0, 37, 57), b(1, 1, 58, 78)]


def test_gap_is_idle_until_the_sender_finishes_then_transfer():
    waits = find_waits({0: ONE, 1: TWO})
    assert waits.window_ns == 101_000
    assert waits.idle_ns == {0: 36_000, 1: 10_000 + 23_000}
    crossed = {(t.kind, t.stage, t.micro_batch): (t.start_ns // 1000, t.end_ns // 1000) for t in waits.transfers}
    assert crossed == {
        ("forward", 1, 0): (10, 13),
        ("forward", 1, 1): (23, 26),
        ("backward", 0, 0): (57, 58),
        ("backward", 0, 1): (78, 81),
    }
    assert [t.is_waited_for for t in waits.transfers] == [True, True, True, False]
    assert waits.overhead_ns == (1000, 1000, 1000)


def test_computing_waiting_and_overhead_add_up_to_the_step():
    waits = find_waits({0: ONE, 1: TWO})
    computed = sum(span.end_ns - span.start_ns for span in (*ONE, *TWO))
    moved = sum(t.end_ns - t.start_ns for t in waits.transfers)
    assert computed + sum(waits.idle_ns.values()) + moved + sum(waits.overhead_ns) == 2 * waits.window_ns
    assert waits.bubble() == pytest.approx((sum(waits.idle_ns.values()) + moved) / (2 * waits.window_ns))


def test_disagreeing_clocks_give_no_negative_transfer():
    (transfer,) = find_waits({0: [f(0, 0, 0, 10)], 1: [f(1, 0, 8, 18)]}).transfers
    assert transfer.start_ns == transfer.end_ns == 8000


def test_chunks_of_one_process_have_no_transfers():
    waits = find_waits({0: [f(0, 0, 0, 10), f(1, 0, 12, 20), b(1, 0, 20, 30), b(0, 0, 33, 40)]})
    assert waits.transfers == ()
    assert waits.overhead_ns == (2000, 0, 3000)
    assert waits.bubble() == 0


def i(stage, micro_batch, start, end):
    return RunSpan("input backward", stage, micro_batch, start * 1000, end * 1000)


def w(stage, micro_batch, start, end):
    return RunSpan("weight backward", stage, micro_batch, start * 1000, end * 1000)


def test_input_gradient_waits_for_the_backward_of_the_next_stage():
    """Weight gradients wait for no transfer."""
    one = [f(0, 0, 0, 10), f(0, 1, 10, 20), i(0, 0, 36, 40), b(0, 1, 60, 70), w(0, 0, 72, 80)]
    two = [f(1, 0, 12, 20), i(1, 0, 20, 34), b(1, 1, 34, 55)]
    waits = find_waits({0: one, 1: two})
    crossed = {(t.kind, t.stage, t.micro_batch): (t.start_ns // 1000, t.end_ns // 1000) for t in waits.transfers}
    assert crossed == {
        ("forward", 1, 0): (10, 12),
        ("backward", 0, 0): (34, 36),
        ("backward", 0, 1): (55, 60),
    }
    assert waits.overhead_ns == (0, 2000, 0, 0)


def test_split_backward_counts_as_one_backward():
    spans = [f(0, 0, 0, 10), i(0, 0, 10, 14), f(0, 1, 14, 24), b(0, 1, 24, 34), w(0, 0, 34, 40)]
    assert typical_action_us([spans], "backward", 0) == 10.0
    assert typical_action_us([spans], "input backward", 0) == 4.0
    assert typical_action_us([spans], "weight backward", 0) == 6.0
    assert typical_action_us([spans], "recompute", 0) == 0.0


def test_waits_are_averaged_over_the_middle_steps():
    """Steps that some process did not record are left out."""

    def slower(spans, factor):
        return tuple(s._replace(start_ns=s.start_ns * factor, end_ns=s.end_ns * factor) for s in spans)

    steps = {
        0: [RunStep(n, slower(ONE, factor)) for n, factor in enumerate((1, 1, 9, 1))],
        1: [RunStep(n, slower(TWO, factor)) for n, factor in enumerate((1, 1, 9))],
    }
    waiting = mean_waits(steps, overlaps=False)
    assert waiting.idle_us == {0: 36.0, 1: 33.0}
    assert waiting.transfer_us == {0: 4.0, 1: 6.0}
    assert waiting.overhead_us == 1.0
    assert waiting.crossing_us == {("forward", 0): 3.0, ("backward", 0): 2.0}  # 3 and 1


def test_overlapping_transfers_count_only_if_the_receiver_waits():
    waiting = mean_waits({0: [RunStep(0, tuple(ONE))], 1: [RunStep(0, tuple(TWO))]}, overlaps=True)
    assert waiting.crossing_us == {("forward", 0): 3.0, ("backward", 0): 2.0}


def test_run_without_steps_has_no_waits():
    assert mean_waits({0: [], 1: []}, overlaps=False) is None


def test_typical_times_sum_recomputation_of_layers():
    again = [
        RunSpan("recompute", 0, 0, 58_000, 60_000),
        RunSpan("recompute", 0, 0, 62_000, 65_000),
        RunSpan("recompute", 0, 1, 81_000, 84_000),
    ]
    spans = [*ONE, *again, b(0, 2, 110, 140)]
    assert typical_action_us([spans], "forward", 0) == 10.0
    assert typical_action_us([spans], "backward", 0) == 20.0
    assert typical_action_us([spans], "recompute", 0) == 3.0
    assert typical_action_us([ONE], "recompute", 0) == 0.0
    assert typical_action_us([spans], "forward", 1) == 0.0
    assert typical_action_us([], "forward", 0) == 0.0


def test_typical_time_averages_middle_steps_and_takes_the_median_micro_batch():
    steps = [[f(0, 0, 0, first), f(0, 1, 30, 36), f(0, 2, 60, 61 + end)]
             for first, end in ((6, 0), (6, 1), (10, 2), (10, 3), (6, -1), (6, 90))]  # fmt: skip
    assert typical_action_us(steps, "forward", 0) == 6.0
    assert typical_action_us([spans[:1] for spans in steps], "forward", 0) == 7.0  # one of either kind left out
