"""Optimizers divided among replicas: memory and time, choice of replicas, and engines."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import planner
from planner import files
from planner.cli.main import run
from planner.core.cost.evaluate import Evaluation
from planner.core.cost.width import tensor_parallel_profile
from planner.core.errors import InfeasibleError, UsageError
from planner.core.judge.recut import with_cuts
from planner.core.judge.verdict import judge
from planner.core.values.cluster import Link
from planner.core.values.profile import Profile
from planner.emit.engines import engine_file
from planner.solve import Request, solve
from tests.support.profiles import inputs_of, profile_of
from tests.unit.emit.test_engines import profile_of as named_profile

ENGINES = {
    "megatron": "    --use-distributed-optimizer\n",
    "torchtitan": '    "data_parallel_shard_degree": 2,\n',
    "automodel": "  dp_size: 2\n",
}


def profile() -> Profile:
    """Return four layers whose optimizer has 80 bytes, 10 more during its step, and takes 30 us."""
    plain = profile_of([10.0] * 4, [20.0] * 4, parameter_bytes=40, output_bytes=10, saved_bytes=10)
    layers = [
        replace(layer, optimizer_bytes=80, optimizer_peak_bytes=10, optimizer_boundary_peak_bytes=7, optimizer_us=30.0)
        for layer in plain.layers
    ]
    return replace(plain, layers=tuple(layers))


def request(devices: int, replicas: int, *, divides: bool, **limits: int) -> Request:
    """Return a request with two stages per replica and one sample per micro-batch."""
    inputs = inputs_of(devices, 4 * max(1, replicas), **limits)
    inputs = replace(inputs, schedule="1f1b", replicas=replicas, shard_optimizer=divides, allreduce=Link(latency_us=1))
    return Request(inputs=inputs, micro_batches=4)


def test_optimizer_memory_and_time_are_divided() -> None:
    """Parameters, gradients and the all-reduce are not."""
    whole = solve(profile(), request(4, 2, divides=False))
    divided = solve(profile(), request(4, 2, divides=True))
    assert divided.shards_optimizer
    assert not whole.shards_optimizer
    for one, other in zip(divided.stages, whole.stages, strict=True):
        assert 2 * one.memory.optimizer == other.memory.optimizer
        assert (one.memory.parameters, one.memory.gradients) == (other.memory.parameters, other.memory.gradients)
    update, longer = (Evaluation.of(plan, profile()).between_steps_us for plan in (divided, whole))
    assert (longer - update).tolist() == [30.0, 30.0]
    layer = tensor_parallel_profile(profile(), divided.cluster).layers[0]
    assert (layer.optimizer_peak_bytes, layer.optimizer_boundary_peak_bytes) == (5, 4)


def test_divided_optimizer_has_no_effect_with_one_replica() -> None:
    whole, divided = (solve(profile(), request(2, 1, divides=divides)) for divides in (False, True))
    assert not divided.shards_optimizer
    assert divided.stages == whole.stages
    assert divided.predicted == whole.predicted


def test_optimizer_of_divided_experts_is_shared_by_fewer_replicas() -> None:
    experts = replace(profile(), expert_parallel=2)
    plan = solve(experts, request(8, 4, divides=True))
    assert tensor_parallel_profile(experts, plan.cluster).layers[0].optimizer_bytes == 40
    assert tensor_parallel_profile(profile(), plan.cluster).layers[0].optimizer_bytes == 20


def test_best_number_of_replicas_is_chosen_with_divided_optimizer() -> None:
    fits: dict[bool, set[tuple[int, int]]] = {False: set(), True: set()}
    for divides, limit in product((False, True), (400, 480, 560, 700)):
        steps = {}
        for replicas in (1, 2, 4):
            asked = request(4, replicas, divides=divides, memory_bytes=limit)
            asked = replace(asked, inputs=replace(asked.inputs, batch=4), micro_batches=None)
            try:
                steps[replicas] = solve(profile(), asked).predicted.step_us
            except InfeasibleError:
                continue
        chosen = solve(profile(), replace(asked, inputs=replace(asked.inputs, replicas=0)))
        assert chosen.predicted.step_us == min(steps.values())
        assert all(sum(stage.memory.total for stage in chunks) <= limit for chunks in chosen.by_device())
        fits[divides] |= {(limit, replicas) for replicas in steps}
    assert fits[False] < fits[True]


def test_check_and_given_cuts_divide_the_optimizer() -> None:
    plan = solve(profile(), request(4, 2, divides=True))
    assert judge(plan, profile(), profile_digest="sha256:0").plan == plan
    assert with_cuts(plan, profile(), (1, 3)).stages[0].memory.optimizer == 40


def test_hint_suggests_a_divided_optimizer_if_it_fits() -> None:
    limit = max(sum(s.memory.total for s in row) for row in solve(profile(), request(4, 2, divides=True)).by_device())
    with pytest.raises(InfeasibleError) as refused:
        solve(profile(), request(4, 2, divides=False, memory_bytes=limit))
    assert "`--shard-optimizer` fits" in refused.value.hint


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_files_divide_the_optimizer_only_if_the_plan_does(engine: str) -> None:
    texts = []
    for divides in (True, False):
        names = named_profile("embedding", "layers.0", "layers.1", "head")
        options = {"devices": 4, "mem": "1GB", "batch": 8, "micro_batches": 4, "balance": (2, 2), "schedule": "1f1b"}
        plan = planner.solve(names, replicas=2, shard_optimizer=divides, **options)
        texts.append(engine_file(engine, plan, names).text)
    assert ENGINES[engine] in texts[0]
    assert texts[0] != texts[1]
    assert engine == "automodel" or ENGINES[engine] not in texts[1]


def test_engines_without_divided_optimizers_refuse_the_plan() -> None:
    names = named_profile("embedding", "layers.0", "layers.1", "head")
    options = {"devices": 4, "mem": "1GB", "batch": 8, "micro_batches": 4, "balance": (2, 2), "schedule": "1f1b"}
    plan = planner.solve(names, replicas=2, shard_optimizer=True, **options)
    with pytest.raises(UsageError, match="in the plan, 2 replicas divide the optimizer, which") as refused:
        engine_file("deepspeed", plan, names)
    assert refused.value.hint.endswith("or solve without `--shard-optimizer`")


def test_suggested_next_command_works_with_divided_optimizer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The bundled executor cannot divide the optimizer, so its script is not suggested."""
    files.write(str(tmp_path / "profile.yaml"), named_profile("embedding", "layers.0", "layers.1", "head"))
    size = ["--mem", "1GB", "--batch", "8", "--replicas", "2", "--schedule", "1f1b"]
    paths = [str(tmp_path / "profile.yaml"), "-o", str(tmp_path / "plan.yaml")]
    assert run(["solve", *paths, "--devices", "4,2", *size, "--shard-optimizer"]) == 0
    *_, line = capfd.readouterr().err.splitlines()
    assert line == f"next: gpipe-plan emit {tmp_path / 'plan.yaml'} --format torchtitan"
    assert run([*line.split()[2:], "-o", str(tmp_path)]) == 0
