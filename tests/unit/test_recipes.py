"""What CONTRIBUTING tells how to add, added: here a schedule, of which no other module knows."""

from dataclasses import replace

import pytest

from planner.core.judge.verdict import judge
from planner.core.schedule import SCHEDULES, Action, Schedule, programs
from planner.core.values.profile import Model
from planner.emit import emit_native
from planner.show.terminal.plan import plan_text
from planner.show.terminal.style import Style
from planner.solve import Request, solve
from tests.support.profiles import inputs_of, profile_of


class Reversed(Schedule):
    """GPipe as its paper has it (arXiv:1811.06965, figure 2): backwards in the reverse order of the forwards."""

    name = "reversed"
    title = "GPipe, reversed"
    torch_name = "none"
    is_forwards_first = True

    def order(self, device: int, num_devices: int, micro_batches: int, chunks: int) -> tuple[Action, ...]:
        """The micro-batch that came last is the first to go back."""
        forwards = tuple(Action(device, "F", i) for i in range(micro_batches))
        return (*forwards, *(Action(device, "B", i) for i in reversed(range(micro_batches))))


def test_a_schedule_is_one_class_and_its_place_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for by name it is planned, judged, shown and emitted; its memory is counted along its own program.

    The micro-batch that `except-last` does not recompute is held by nobody else's backward, as it is under GPipe: where
    GPipe has to compute all of them again, this one spares the last.
    """
    monkeypatch.setitem(SCHEDULES, Reversed.name, Reversed())  # type: ignore[arg-type]
    profile = profile_of([10.0] * 4, [20.0] * 4, saved_bytes=100, output_bytes=10, parameter_bytes=20)
    profile = replace(profile, model=Model(source="model.py:build_model"))
    plans = {}
    for schedule in ("gpipe", Reversed.name):
        inputs = replace(inputs_of(2, 4, memory_bytes=440), schedule=schedule)
        plans[schedule] = solve(profile, Request(inputs=inputs, micro_batches=4))
        assert judge(plans[schedule], profile, profile_digest="sha256:0").fits
    gpipe, plan = plans["gpipe"], plans[Reversed.name]
    assert [stage.recompute for stage in gpipe.stages] == ["always", "always"]
    assert [stage.recompute for stage in plan.stages] == ["except-last", "except-last"]
    assert [stage.memory.total for stage in plan.stages] == [stage.memory.total for stage in gpipe.stages]
    assert gpipe.predicted.step_us - plan.predicted.step_us == 20  # of one micro-batch's forward on one stage
    assert plan.solver.status == "optimal"
    style = Style(width=100, unicode=True, color=False, wrap=True)
    assert plan_text(plan, (), style).startswith("GPipe, reversed, 2 stages")
    emitted = emit_native(plan, profile, folder=".", profile_folder=".")
    assert f"schedule: {Reversed.name}\n" in emitted.balance
    rows = programs(Reversed().actions(2, 2))
    assert [f"{x.do} {x.kind}{x.micro_batch}" for x in rows[1]] == [
        *("receive F0", "receive F1", "run F0", "run F1"),
        *("run B1", "send B1", "run B0", "send B0"),
    ]
