"""Sample values for views: a chain with unusual names, plans and runs of it, and simulated timelines."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.core.cost.costs import costs_at
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.partition import Partition
from planner.core.cost.simulate import Event, StageTimes, simulate
from planner.core.judge.certainty import certainty_of
from planner.core.judge.verdict import Verdict, judge
from planner.core.judge.verification import Tolerance, Verification, verification_of
from planner.core.schedule import SCHEDULES
from planner.core.values.cluster import Link
from planner.core.values.plan import (
    FrontierPoint,
    Inputs,
    Insight,
    Noise,
    Plan,
    ProfileReference,
    Recompute,
    ScheduleName,
    SolverReport,
    Stage,
    StageMemory,
    WhatIf,
)
from planner.core.values.profile import Device, Environment, LayerProfile, Model, Profile
from planner.core.values.run_report import RunReport, StageRun
from planner.show.step import StepTimeline, simulated_step
from planner.show.terminal.memory import memory_renderables
from planner.show.terminal.plan import plan_text
from planner.show.terminal.profile import profile_text
from planner.show.terminal.rendering import render
from planner.show.terminal.run import plan_and_run_text, run_text, verification_text
from planner.show.terminal.style import Style
from planner.show.terminal.timeline import timeline_parts
from planner.show.terminal.verdict import verdict_text

MIB = 2**20
LONG_NAME = "encoder.layers.11.self_attention.output_projection.dropout.with.a.very.long.module.path"
AWKWARD = ("[bold]stem[/bold]", "block.0", "block.1", "block.2", "größe\x1b[31m", LONG_NAME)


def style(width: int = 84, *, color: bool = False, wrap: bool = True) -> Style:
    return Style(width=width, color=color, wrap=wrap)


def memory_text(stages: Sequence[Stage], how: Style, *, num_devices: int | None = None) -> str:
    """Return only the memory bars; by default each device has one stage."""
    count = num_devices or len(stages)
    return render(how, *memory_renderables([stages[device::count] for device in range(count)], how))


def timeline_text(events: Sequence[Event], num_devices: int, how: Style) -> str:
    """Return only the timeline."""
    return render(how, *timeline_parts(events, num_devices, how))


def bare(text: str) -> str:
    """Return the text without ANSI codes."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def layer(name: str, *, forward_us: float = 1000.0, digest: str = "", tied: tuple[str, ...] = ()) -> LayerProfile:
    return LayerProfile(
        name=name,
        digest=digest,
        parameter_bytes=3 * MIB,
        optimizer_bytes=6 * MIB,
        buffer_bytes=4096,
        tied=tied,
        forward_us=(forward_us, 2 * forward_us),
        backward_us=(2 * forward_us, 4 * forward_us),
        spread=(0.01, 0.02),
        output_bytes=(MIB, 2 * MIB),
        saved_bytes=(4 * MIB, 8 * MIB),
        forward_flops=(10**9, 2 * 10**9),
    )


def profile(names: Sequence[str] = AWKWARD) -> Profile:
    """Return a profile in which the layers `block.…` share a digest."""
    return Profile(
        model=Model(source="models/[dim]net.py:build_model", settings={"depth": 6}, parameters=4_718_592),
        device=Device(kind="cuda", name="NVIDIA H100", memory_bytes=80 * 2**30),
        environment=Environment(torch="2.13.0", python="3.11.7"),
        optimizer="adamw",
        micro_batch_sizes=(1, 2),
        layers=tuple(layer(name, digest="d1" if name.startswith("block") else "") for name in names),
    )


def plan(
    balance: tuple[int, ...] = (2, 2, 2),
    *,
    micro_batches: int = 4,
    cap: int = 120 * MIB,
    recompute: Recompute = "never",
    solver: SolverReport | None = None,
    devices: int | None = None,
    reserve_bytes: int = 0,
    schedule: ScheduleName = "gpipe",
    chunks: int = 1,
    replicas: int = 1,
    caps: tuple[int, ...] = (),
    speeds: tuple[float, ...] = (),
    recomputed: tuple[tuple[int, ...], ...] = (),
    of: Profile | None = None,
) -> Plan:
    """Return a plan; `recomputed` lists the layers that each stage recomputes."""
    devices = devices or len(balance) // chunks * replicas
    inputs = Inputs(
        profile=ProfileReference(path="profile.yaml", digest="sha256:0"),
        devices=devices,
        memory_bytes=caps or (cap,) * devices,
        speeds=speeds,
        batch=micro_batches * replicas,
        link=Link(latency_us=10.0, bytes_per_s=1e10),
        reserve_bytes=reserve_bytes,
        schedule=schedule,
        chunks=chunks,
        replicas=replicas,
    )
    partition = Partition(
        schedule=schedule,
        micro_batches=micro_batches,
        balance=balance,
        recompute=tuple("layers" for _ in recomputed) if recomputed else (recompute,) * len(balance),
        recomputed=recomputed,
        chunks=chunks,
        replicas=replicas,
    )
    solver = solver or SolverReport(method="dynamic-programming", status="optimal")
    return Evaluation(costs_at(of or profile(), 1), partition, inputs.cluster).plan(inputs, solver)


def interleaved(*, cap: int = 120 * MIB) -> Plan:
    """Return a plan with two chunks on each of three devices."""
    return plan((1,) * 6, micro_batches=6, schedule="interleaved", chunks=2, cap=cap)


def in_a_v(*, cap: int = 120 * MIB) -> Plan:
    """Return a plan with split backwards and two chunks on each of three devices, placed as a V."""
    return plan((1,) * 6, micro_batches=6, schedule="zbv", chunks=2, cap=cap)


def compared_schedules() -> Plan:
    """Return a plan in a V with a trade-off over four schedules, one of them without a plan."""
    figures: tuple[tuple[ScheduleName, float, float, int], ...] = (
        ("gpipe", 40e3, 0.3, 100),
        ("1f1b", 39e3, 0.25, 60),
        ("zbv", 30e3, 0.02, 60),
    )
    points = [
        FrontierPoint(
            micro_batches=6,
            micro_batch_size=1,
            schedule=name,
            devices=3,
            step_us=step_us,
            bubble=bubble,
            peak_bytes=size * MIB,
        )
        for name, step_us, bubble, size in figures
    ]
    none = FrontierPoint(micro_batches=0, micro_batch_size=0, schedule="v-min", fits=False)
    return replace(in_a_v(), schedules=(*points, none))


def unlike() -> Plan:
    """Return a plan that uses three of four devices, one of them twice as fast."""
    caps = (120 * MIB, 60 * MIB, 90 * MIB, 240 * MIB)
    return plan((1, 3, 2), devices=4, caps=caps, speeds=(1.0, 2.0, 1.0, 1.0))


def explained(planned: Plan | None = None) -> Plan:
    """Return a plan with an explanation, and a trade-off over M in which M = 1 does not fit."""
    planned = planned or plan()
    step_us = planned.predicted.step_us
    points = tuple(
        FrontierPoint(
            micro_batches=m,
            micro_batch_size=16 // m,
            devices=3,
            step_us=step_us * factor,
            samples_per_s=1500.0 / factor,
            bubble=0.1 * factor,
            peak_bytes=round(60 * MIB * factor),
            recompute_share=0.1,
        )
        for m, factor in ((2, 6.0), (4, 1.0), (16, 1.5))
    )
    return replace(
        planned,
        frontier=(FrontierPoint(micro_batches=1, micro_batch_size=16, fits=False), *points),
        insight=Insight(
            pace="stage 1: forward 2.00 ms, backward 4.00 ms per micro-batch",
            tightest_device=1,
            free_bytes=7 * MIB,
            what_if=(
                WhatIf(change="1 GB more on every device", step_us=step_us * 0.9997),
                WhatIf(change="one more device", step_us=step_us * 0.902),
                WhatIf(change="links [twice] as fast", step_us=step_us * 1.01),
            ),
            noise=Noise(draws=20, spread=0.021, mean_regret=0.001, worst_regret=0.004, same_plan=0.65),
        ),
    )


def events_of(planned: Plan) -> tuple[Event, ...]:
    return Evaluation.of(planned, profile()).events


def step_of_sample(planned: Plan) -> StepTimeline:
    return simulated_step(Evaluation.of(planned, profile()))


def equal_stages(num_stages: int, micro_batches: int, *, forward_us: float = 1000.0) -> tuple[Event, ...]:
    """Return one GPipe step of equal stages without links; a backward takes two forwards."""
    times = StageTimes(forward_us=forward_us, backward_us=2 * forward_us, last_backward_us=2 * forward_us)
    actions = SCHEDULES["gpipe"].actions(num_stages, micro_batches)
    return simulate(actions, (times,) * num_stages)


def stage(index: int = 0, *, cap: int = 100 * MIB, **memory: int) -> Stage:
    return Stage(
        index=index,
        first="a",
        last="b",
        layers=2,
        recompute="never",
        forward_us=1.0,
        backward_us=2.0,
        memory=StageMemory.of(**memory),
        memory_bytes=cap,
    )


def report(planned: Plan, *, time_factor: float = 1.1, peak_factor: float = 0.99) -> RunReport:
    """Return a run that took `time_factor` of the planned time, after two slow steps."""
    step_us = planned.predicted.step_us * time_factor
    return RunReport(
        plan_digest="sha256:1",
        seed=0,
        device=Device(kind="cuda", name="NVIDIA [H100]"),
        losses=(8.5, 8.4, 8.3, 8.2, 8.1),
        step_us=(10 * step_us, 2 * step_us, 0.9 * step_us, step_us, 3 * step_us),
        warmup_steps=2,
        batch=32,
        bubble=0.25,
        overhead_us=250.0,
        stages=tuple(
            StageRun(
                index=s.index,
                first=s.first,
                last=s.last,
                forward_us=s.forward_us * time_factor,
                backward_us=s.backward_us * time_factor,
                backward_input_us=(s.backward_us - s.backward_weight_us) * time_factor if s.backward_weight_us else 0.0,
                backward_weight_us=s.backward_weight_us * time_factor,
                recompute_us=0.0 if s.recompute == "never" else s.forward_us,
                transfer_us=1500.0 * s.index,
                idle_us=4000.0,
                parameter_bytes=s.memory.parameters,
                peak_bytes=round(s.memory.total * peak_factor),
            )
            for s in planned.stages
        ),
    )


def verdict(*, cap: int = 40 * MIB, of: Plan | None = None) -> Verdict:
    """Return the verdict on a plan with other memory limits than planned."""
    return judge(of or plan(), profile(), profile_digest="sha256:0", memory_bytes=(cap,) * 3)


def verification() -> Verification:
    """Return the verification of a run that was slower than predicted, on too few cores."""
    found = verification_of(
        plan(),
        profile(),
        report(plan(), peak_factor=1.02),
        Tolerance(step=0.1, memory_below=0.01, memory_above=0.05),
        reason_times_are_invalid="times are not judged: the plan's processes need 3 cores, and this machine has 2",
    )
    return replace(found, calibration=replace(found.calibration, link=Link(latency_us=5.0, bytes_per_s=1e9)))


def renamed(planned: Plan, name: str) -> Plan:
    first, *others = planned.stages
    return replace(planned, stages=(replace(first, first=name), *others))


EVERYTHING: dict[str, Callable[[Style], str]] = {
    "plan": lambda s: plan_text(plan(), events_of(plan()), s),
    "plan with its bounds": lambda s: plan_text(plan(), (), s, certainty=certainty_of(plan(), profile())),
    "plan over its caps": lambda s: plan_text(plan(cap=40 * MIB), (), s),
    "plan far below its caps": lambda s: plan_text(plan(cap=10**15, recompute="except-last"), (), s),
    "interleaved plan": lambda s: plan_text(interleaved(), events_of(interleaved()), s),
    "plan in a V": lambda s: plan_text(in_a_v(), events_of(in_a_v()), s),
    "plan with replicas": lambda s: plan_text(plan(replicas=2, devices=8), (), s),
    "plan without a cut": lambda s: plan_text(plan((6,), replicas=3), (), s),
    "plan on unlike devices": lambda s: plan_text(unlike(), events_of(unlike()), s),
    "plan that recomputes layers": lambda s: plan_text(plan(recomputed=((0,), (2, 3), (4, 5))), (), s),
    "plan with its reasons": lambda s: plan_text(explained(), (), s),
    "plan beside other schedules": lambda s: plan_text(compared_schedules(), (), s),
    "profile": lambda s: profile_text(profile(), s),
    "run": lambda s: run_text(report(plan()), None, s),
    "run under a plan": lambda s: run_text(report(plan()), plan(), s),
    "comparison": lambda s: plan_and_run_text(plan(), report(plan(), peak_factor=2.0), s),
    "verification": lambda s: verification_text(verification(), s),
    "verdict": lambda s: verdict_text(verdict(), s),
    "verdict on an interleaved plan": lambda s: verdict_text(verdict(of=interleaved()), s),
    "comparison of an interleaved plan": lambda s: plan_and_run_text(interleaved(), report(interleaved()), s),
    "memory": lambda s: memory_text(plan().stages, s),
    "timeline": lambda s: timeline_text(events_of(plan()), 3, s),
    "timeline of many": lambda s: timeline_text(equal_stages(8, 32), 8, s),
}
