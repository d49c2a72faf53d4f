"""Tensor parallelism in engine files, and refusals of engines without it."""

from dataclasses import replace
from pathlib import Path

import pytest

import planner
from planner.core.errors import UsageError
from planner.core.values.plan import Plan
from planner.core.values.profile import Model, Profile
from planner.emit.engines import FORMATS, engine_file, write_engine_files
from planner.emit.native import InputPaths
from tests.unit.emit.test_engines import profile_of

NAMES = ("embedding", "layers.0", "layers.1", "head")
OF_ENGINES = {
    "megatron": "    --tensor-model-parallel-size 4\n    --pipeline-model-parallel-size 2\n",
    "torchtitan": '    "tensor_parallel_degree": 4,\n',
    "automodel": "  pp_size: 2\n  tp_size: 4\n",
}


def planned(profile: Profile) -> tuple[Plan, Profile]:
    """Return a plan for two stages of four GPUs each."""
    profile = replace(profile, tensor_parallel=4)
    plan = planner.solve(profile, devices=8, mem="1GB", batch=4, micro_batches=4, schedule="1f1b", balance=(2, 2))
    assert (plan.tensor_parallel, plan.num_devices, plan.num_gpus) == (4, 2, 8)
    return plan, profile


@pytest.mark.parametrize("engine", OF_ENGINES)
def test_engine_files_have_the_width_of_the_plan(engine: str) -> None:
    plan, profile = planned(profile_of(*NAMES))
    text = engine_file(engine, plan, profile).text
    assert OF_ENGINES[engine] in text
    assert "4 GPUs per stage." in text
    alone = replace(profile, tensor_parallel=1)
    plan = planner.solve(alone, devices=2, mem="1GB", batch=4, micro_batches=4, schedule="1f1b", balance=(2, 2))
    text = engine_file(engine, plan, alone).text
    assert "GPUs per stage" not in text
    assert OF_ENGINES[engine].splitlines()[-1] not in text or engine == "megatron"
    assert "tensor-model-parallel" not in text


MEGATRON = """\
    --tensor-model-parallel-size 4
    --sequence-parallel
    --expert-model-parallel-size 2
    --recompute-granularity selective
"""
ASSUMED = {
    "megatron": (MEGATRON, ()),
    "torchtitan": ("", ("`expert_parallel_degree`", "`activation_checkpoint`")),
    "automodel": ("", ("`distributed.sequence_parallel`", "`distributed.ep_size`", "`activation_checkpointing`")),
}


def assuming(*, replicas: int = 2, recompute: str = "never", **settings: bool) -> tuple[Plan, Profile]:
    """Return a plan by formula for groups of four GPUs, in replicas that divide experts."""
    profile = replace(
        profile_of(*NAMES),
        tensor_parallel=4,
        expert_parallel=2,
        model=Model(settings={"formula": "mixtral", **settings}),
    )
    sizes = {"devices": 8 * replicas, "mem": "1GB", "batch": 4 * replicas, "micro_batches": 4, "balance": (2, 2)}
    return planner.solve(profile, replicas=replicas, schedule="1f1b", recompute=recompute, **sizes), profile


@pytest.mark.parametrize("engine", ASSUMED)
def test_assumptions_of_the_memory_are_set_or_noted(engine: str) -> None:
    """Otherwise the engine would need more memory than planned."""
    options, named = ASSUMED[engine]
    file = engine_file(engine, *assuming(sequence_parallel=True, recompute_attention=True))
    assert options in file.text
    notes = [note for note in file.notes if note.startswith("the memory assumes")]
    assert len(notes) == len(named)
    assert all(f"set {option}" in note for option, note in zip(named, notes, strict=True))
    plan, profile = planned(profile_of(*NAMES))
    measured = replace(profile, model=Model(settings={"sequence_parallel": True, "recompute_attention": True}))
    file = engine_file(engine, plan, measured)
    assert "sequence-parallel" not in file.text
    assert not any(note.startswith("the memory assumes") for note in file.notes)


def test_megatron_recomputes_either_layers_or_attention() -> None:
    """With shared layers, it divides experts only with sequence parallelism."""
    file = engine_file("megatron", *assuming(recompute="always", recompute_attention=True))
    assert "--recompute-granularity selective" not in file.text
    assert any("set `--recompute-granularity`" in note for note in file.notes)
    assert any("only with `--sequence-parallel`" in note for note in file.notes)
    file = engine_file("megatron", *assuming(sequence_parallel=True))
    assert not any("--sequence-parallel" in note for note in file.notes)


@pytest.mark.parametrize("engine", ["native", *sorted(set(FORMATS) - set(OF_ENGINES) - {"csv"})])
def test_engines_without_tensor_parallelism_refuse_the_plan(engine: str, tmp_path: Path) -> None:
    plan, profile = planned(profile_of(*NAMES))
    with pytest.raises(UsageError, match="in the plan, 4 GPUs share each layer") as refused:
        write_engine_files(
            plan,
            profile,
            engine=engine,
            folder=str(tmp_path),
            input_paths=InputPaths(plan="plan.yaml", profile="profile.yaml"),
            force=False,
        )
    assert "`--format megatron`, `torchtitan`, `automodel`" in refused.value.hint
    assert not list(tmp_path.iterdir())
