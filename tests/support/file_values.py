"""One value of every kind of file, with every field set."""

from dataclasses import replace

from planner.core.values.balance import Balance, RunPrediction, StageBalance
from planner.core.values.calibration import Calibration
from planner.core.values.cluster import ExecutorCost, Link
from planner.core.values.links import Links, MeasuredLink
from planner.core.values.partial import Measurement, PartialProfile
from planner.core.values.plan import FrontierPoint, Insight, Noise, Plan, TrainingRunEstimate, WhatIf
from planner.core.values.profile import (
    ArrayKind,
    Device,
    Environment,
    LayerProfile,
    Model,
    Profile,
    ProgramMemory,
    SplitMemory,
    TiedGroup,
    WidthCosts,
    WritingTool,
)
from planner.core.values.proof import Proof
from planner.core.values.run_report import BoundaryRun, RunReport, StageRun
from planner.solve import Request, solve
from tests.support.chains import record, tensor
from tests.support.profiles import inputs_of

EXECUTOR = ExecutorCost(overhead_us=12.5, link=Link(latency_us=3.0, bytes_per_s=1e9, blocking=True))
THIS_TOOL = WritingTool(name="gpipe-plan", version="0.1.0")


def full_layer(n: int) -> LayerProfile:
    """Return a layer with no field at its default."""
    details = tuple(
        record(
            internal=10 * s,
            given=[tensor(20 * s, kept=True)],
            made=[tensor(20 * s, alias=0), tensor(4 * s, kept=True)],
            forward=50 * s,
            no_grad=40 * s,
            first_backward=90 * s,
            backward=80 * s,
            target=s,
            writes_input=True,
        )
        for s in (1, 4)
    )
    return LayerProfile(
        name=f"h.{n}",
        modules=(f"h.{n}", f"dropout.{n}"),
        digest=f"{n:08x}",
        parameter_bytes=1000 + n,
        gradient_bytes=500,
        idle_bytes=10,
        optimizer_bytes=2000,
        buffer_bytes=8,
        cast_bytes=6,
        rewritten_bytes=4,
        tied=("head.weight", "1e9"),
        tied_bytes=100,
        tied_view_bytes=90,
        tied_groups=(TiedGroup(layers=("h.0",), bytes=60),) if n else (),
        optimizer_us=3.5,
        optimizer_peak_bytes=64,
        optimizer_boundary_peak_bytes=96,
        forward_us=(10.1 + n, 40.2),
        backward_us=(20.3, 80.4),
        entry_us=(0.4, 0.5),
        backward_input_us=(11.5, 45.5),
        backward_weight_us=(9.5, 36.5),
        spread=(0.01, 0.025),
        output_bytes=(24, 96),
        saved_bytes=(30, 120),
        weight_held_bytes=(25, 100),
        forward_peak_bytes=(50, 200),
        backward_peak_bytes=(90, 360),
        forward_flops=(10**12, 4 * 10**12),
        collective_bytes=(48, 192),
        collectives=2,
        detail=details,
        split=tuple(
            SplitMemory(
                held_bytes=25 * s,
                held_input_bytes=20 * s,
                weight_gradient_bytes=400,
                first_input_peak_bytes=85 * s,
                input_peak_bytes=75 * s,
                output_first_input_peak_bytes=95 * s,
                output_input_peak_bytes=85 * s,
                end_first_input_peak_bytes=99 * s,
                end_input_peak_bytes=90 * s,
                first_weight_peak_bytes=400 + 30 * s,
                weight_peak_bytes=30 * s,
            )
            for s in (1, 4)
        ),
        program=tuple(
            ProgramMemory(
                carried_bytes=8 * s,
                peak_bytes=70 * s,
                narrowed_bytes=500,
                padding_bytes=24,
                reshaped_bytes=12 * s,
                input_bytes=20 * s,
                narrowed_input_bytes=10 * s,
                laid_out_bytes=32 * s,
                target_bytes=s,
                trained=(ArrayKind(kind="float32[5,25]", bytes=600, plain_bytes=500, loop_bytes=600),),
                kept=(ArrayKind(kind=f"float32[{s},2]", bytes=16 * s, plain_bytes=8 * s, loop_bytes=16 * s, count=2),),
                received=(ArrayKind(kind=f"float32[{s},6]", bytes=24 * s, plain_bytes=24 * s, loop_bytes=12 * s),),
            )
            for s in (1, 4)
        ),
    )


def full_profile() -> Profile:
    """Return a profile of three such layers."""
    return Profile(
        generator=THIS_TOOL,
        model=Model(
            source="model.py:build",
            settings={
                "depth": 3,
                "rate": 0.1,
                "tiny": 1e-9,
                "name": "no",
                "flag": False,
                "on": True,
                "text": "a: b # c",
            },
            inputs=("3x224x224",),
            uncut=("h.7",),
            counted_labels="shifted",
            sample_tokens=7,
            batch_norm=True,
            digest="sha256:abc",
            parameters=3003,
        ),
        proof=Proof(
            layers=2,
            cuts=1,
            uncovered=1,
            gradients=4,
            buffers=1,
            states=8,
            worst=6e-8,
            reason="it takes more",
            differs_recomputed="the loss",
        ),
        device=Device(
            kind="cuda", name="NVIDIA H100 80GB HBM3", memory_bytes=85_017_493_504, how="estimated", executor=EXECUTOR
        ),
        environment=Environment(torch="2.13.0", python="3.11.7", dtype="bf16-mixed", threads=2),
        optimizer="adamw",
        optimizer_peak="sum",
        micro_batch_sizes=(1, 4),
        layers=tuple(full_layer(n) for n in range(3)),
    )


def fullest_profile() -> Profile:
    """Return the profile with the same layers divided between two and between four GPUs."""
    profile = full_profile()
    return replace(
        profile,
        tensor_parallel=2,
        expert_parallel=2,
        fast_round_ratio=0.95,
        slow_round_ratio=1.25,
        widths=(WidthCosts(tensor_parallel=4, layers=profile.layers),),
    )


def full_plan() -> Plan:
    """Return an optimal plan for the profile."""
    inputs = inputs_of(
        2,
        8,
        memory_bytes=(10**6, 2 * 10**6),
        link=Link(latency_us=5.0, bytes_per_s=25e9, blocking=True),
        reserve_bytes=77,
        headroom=0.05,
        overhead_us=0.5,
    )
    return solve(full_profile(), Request(inputs=inputs))


def order_of(micro_batches: int) -> tuple[str, ...]:
    """Return the action order of two stages on one device, partly with split backward."""
    whole = " ".join(f"0F{i} 1F{i} 1B{i} 0B{i}" for i in range(1, micro_batches))
    return (f"0F0 1F0 1I0 0B0 1W0 {whole}",)


def fullest_plan() -> Plan:
    """Return a plan with every field, though no real plan has all of them."""
    plan = full_plan()
    asked = replace(
        plan.inputs,
        speeds=(1.0, 2.5),
        batch=2 * plan.inputs.batch,
        inter_link=Link(latency_us=9.0, bytes_per_s=1e9),
        node_devices=2,
        tensor_parallel=2,
        links=(Link(latency_us=1.5, bytes_per_s=1e8),) * (plan.inputs.devices - 1),
        allreduce=Link(bytes_per_s=2e9),
        chunks=2,
        replicas=2,
        together=(("h.0", "h.1"),),
        apart=(("h.1", "h.2"),),
        dtype="bf16-mixed",
        compute=1.25,
        step_ratio=0.97,
        tokens=10**12,
        samples=10**9,
        price=2.5,
    )
    stages = tuple(
        replace(stage, recompute="layers", recomputed=(stage.first,), backward_weight_us=1.5) for stage in plan.stages
    )
    return replace(
        plan,
        inputs=asked,
        schedule="search",
        placement="v",
        order=order_of(plan.micro_batches),
        chunks=2,
        replicas=2,
        tensor_parallel=2,
        stages=stages,
        predicted=replace(plan.predicted, tokens_per_s=1e6, flops_utilization=0.4),
        training=TrainingRunEstimate(gpus=2, steps=1000, days=1.5, gpu_hours=72.0, cost=180.0),
        frontier=(
            FrontierPoint(
                micro_batches=2, micro_batch_size=4, replicas=2, tensor_parallel=2, devices=2, step_us=1.5, bubble=0.25
            ),
        ),
        schedules=(FrontierPoint(micro_batches=2, micro_batch_size=4, schedule="1f1b", devices=2, step_us=1.5),),
        insight=Insight(
            pace="stage 0",
            tightest_device=1,
            free_bytes=5,
            what_if=(WhatIf(change="one more device", step_us=2.5),),
            noise=Noise(draws=20, spread=0.01, mean_regret=0.001, worst_regret=0.01, same_plan=0.5),
        ),
        solver=replace(plan.solver, named_lower_bound_us=1234.5),
        seal="sha256:abc",
    )


def full_run() -> RunReport:
    """Return a report of two steps of the plan."""
    return RunReport(
        generator=THIS_TOOL,
        plan_digest="sha256:def",
        seed=7,
        device=Device(kind="cpu", name="x86_64"),
        environment=Environment(torch="2.13.0"),
        losses=(2.5, -0.25),
        step_us=(1000.5, 900.1),
        warmup_steps=1,
        batch=8,
        samples_per_s=(8000.5, 9000.25),
        bubble=0.25,
        overhead_us=150.5,
        stages=(
            StageRun(
                index=0,
                replica=1,
                first="h.0",
                last="h.1",
                forward_us=1.5,
                backward_us=2.5,
                backward_input_us=1.4,
                backward_weight_us=1.1,
                recompute_us=1.2,
                transfer_us=3.5,
                idle_us=4.5,
                parameter_bytes=9,
                peak_bytes=99,
                outside_bytes=1000,
                core_share=0.97,
            ),
        ),
        boundaries=(BoundaryRun(index=0, replica=1, forward_us=0.5, backward_us=0.7),),
    )


def full_calibration() -> Calibration:
    """Return the calibration from such a run."""
    return Calibration(
        generator=THIS_TOOL,
        plan_digest="sha256:def",
        steps=10,
        device=Device(kind="cpu", name="x86_64"),
        environment=Environment(torch="2.13.0", python="3.11.7"),
        compute=1.125,
        overhead_us=151.5,
        link=Link(latency_us=400.5, bytes_per_s=2.1e9, blocking=True),
        reserve_bytes=4096,
        step_ratio=1.031,
    )


def full_links() -> Links:
    """Return links of three processes; the second one was measured at no size."""
    measured = MeasuredLink(
        link=Link(latency_us=400.5, bytes_per_s=2.1e9, blocking=True),
        sample_bytes=(1024, 4096),
        sample_us=(401.0, 402.9),
    )
    return Links(
        generator=THIS_TOOL,
        device=Device(kind="cpu", name="x86_64"),
        environment=Environment(torch="2.13.0", python="3.11.7"),
        backend="gloo",
        boundaries=(measured, MeasuredLink(link=Link())),
    )


def full_partial() -> PartialProfile:
    """Return a profile interrupted in the timing of the second size."""
    profile = full_profile()
    one, four = profile.layers[0].detail
    return PartialProfile(
        generator=THIS_TOOL,
        model=profile.model,
        device=profile.device,
        environment=profile.environment,
        optimizer="adamw",
        measurements=(
            Measurement(
                digest="h",
                micro_batch_size=1,
                memory=one,
                split=full_profile().layers[0].split[0],
                forward_us=(1.5, 1.4),
                backward_us=(2.5, 2.6),
                backward_input_us=(1.3, 1.2),
                backward_weight_us=(1.2, 1.1),
            ),
            Measurement(digest="h", micro_batch_size=4, memory=four),
        ),
    )


def full_balance() -> Balance:
    """Return the balance that `emit` writes of the plan."""
    return Balance(
        generator=THIS_TOOL,
        plan_digest="sha256:def",
        model=full_profile().model,
        optimizer="adamw",
        dtype="bf16-mixed",
        device="cuda",
        threads=4,
        schedule="search",
        chunks=2,
        placement="v",
        order=order_of(2),
        replicas=2,
        batch=8,
        micro_batches=2,
        balance=(1, 2),
        stages=(
            StageBalance(index=0, recompute="never", layers=("h.0",)),
            StageBalance(index=1, recompute="except-last", layers=("h.1", "h.2")),
        ),
        smaller=(1,),
        planned=RunPrediction(
            step_us=123.4,
            reserve_bytes=7,
            plan="../plan.yaml",
            profile="../profile.yaml",
            solve=("--devices 2", "--together a b,c"),
        ),
    )
