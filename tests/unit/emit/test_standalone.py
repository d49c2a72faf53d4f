"""The script that needs torch alone: what stands in it, and what it is refused for."""

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.core.errors import UsageError
from planner.core.values.plan import Plan
from planner.core.values.profile import Environment, Model, Profile
from planner.emit import emit_standalone
from planner.emit.standalone import OPTIMIZER_CODE
from planner.model.optimizers import OPTIMIZERS
from tests.unit.emit.test_native import plan_of
from tests.unit.emit.test_native import profile_of as native_profile


def profile_of() -> Profile:
    """Twelve layers, each a module of its own, with an `example_batch`."""
    profile = native_profile(names=tuple(f"body.{n}" for n in range(12)))
    model = Model(source="models/model.py:build_model", settings={"width": 8, "flag": True, "name": 'a"b'})
    return replace(profile, model=model)


def script_of(plan: Plan, profile: Profile) -> str:
    return emit_standalone(plan, profile, folder="out", profile_folder=".")


def constants(text: str) -> dict[str, Any]:
    """What the script's capital names are."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            names = [n.id for n in target.elts] if isinstance(target, ast.Tuple) else [target.id]  # type: ignore[attr-defined]
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue
            found |= dict(zip(names, value, strict=True)) if len(names) > 1 else {names[0]: value}
    return found


def test_the_plan_stands_in_it() -> None:
    """Cuts by name, recomputation, sizes, settings; nothing of gpipe-plan is imported."""
    profile = profile_of()
    plan = plan_of(profile, (5, 7))
    text = script_of(plan, profile)
    found = constants(text)
    assert found["STAGES"] == [[f"body.{n}" for n in range(5)], [f"body.{n}" for n in range(5, 12)]]
    assert found["RECOMPUTE"] == [stage.recompute for stage in plan.stages]
    assert (found["BATCH"], found["MICRO_BATCHES"], found["THREADS"]) == (8, 4, 3)
    assert found["SETTINGS"] == {"width": 8, "flag": True, "name": 'a"b'}
    assert found["ENTRY"] == "build_model"
    assert "Path(__file__).parent / '../models/model.py'" in text
    imported = {
        alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {str(node.module) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} & {"planner", "numpy", "yaml"} == set()
    assert max(map(len, text.splitlines())) <= 130


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_schedule_is_the_plans(schedule: str) -> None:
    """As torch calls it."""
    profile = profile_of()
    plan = replace(plan_of(profile, (5, 7)), schedule=schedule)
    name = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}[schedule]
    assert f"schedule = {name}(pipelined, MICRO_BATCHES" in script_of(plan, profile)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_are_those_that_are_profiled(name: str) -> None:
    """The same class with the same settings."""
    parameters = [torch.nn.Parameter(torch.zeros(2))]
    emitted = eval(OPTIMIZER_CODE[name], {"torch": torch, "parameters": parameters})
    own = OPTIMIZERS[name](parameters)
    assert type(emitted) is type(own)
    assert emitted.defaults == own.defaults


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": "interleaved", "chunks": 2}, "runs plain GPipe or 1F1B, and the plan is for interleaved 1F1B"),
        ({"schedule": "zb-h1"}, "runs plain GPipe or 1F1B, and the plan is for ZB-H1"),
        ({"replicas": 2}, "does not do 2 replicas"),
    ],
)
def test_plans_that_need_more_are_refused(changes: dict[str, Any], said: str) -> None:
    """With what runs them."""
    profile = profile_of()
    plan = plan_of(profile, (3, 3, 3, 3))
    plan = replace(plan, **changes, inputs=replace(plan.inputs, devices=8))
    with pytest.raises(UsageError, match=said) as refused:
        script_of(plan, profile)
    assert "gpipe-plan's own executor" in refused.value.hint


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"environment": Environment(dtype="bf16-mixed")}, "does not do `--dtype bf16-mixed`"),
        ({"model": Model(source="")}, "names no model file"),
        ({"model": Model(source="model.py:m", inputs=("3x4",))}, "does not do inputs from `--input`"),
    ],
)
def test_profiles_that_need_more_are_refused(changes: dict[str, Any], said: str) -> None:
    """Other precisions, models without example batches."""
    profile = replace(profile_of(), **changes)
    with pytest.raises(UsageError, match=said):
        script_of(plan_of(profile, (5, 7)), profile)


def test_layers_and_ties_that_it_cannot_run_are_refused() -> None:
    """A layer of several modules, recomputation by layer, parameters that two stages share."""
    profile = profile_of()
    plan = plan_of(profile, (5, 7))
    first, *others = profile.layers
    several = replace(profile, layers=(replace(first, modules=("body.0", "body.x")), *others))
    with pytest.raises(UsageError, match="runs modules one after the other"):
        script_of(plan, several)
    first, *others, last = profile.layers
    tied = replace(profile, layers=(first, *others, replace(last, tied=("body.0.weight",))))
    with pytest.raises(UsageError, match=r'"body\.0" and "body\.11" share parameters') as refused:
        script_of(plan, tied)
    assert "--together" not in refused.value.hint  # which would leave one stage
    tied = replace(profile, layers=(first, *others, replace(last, tied=("body.1.weight",))))
    with pytest.raises(UsageError, match=r'"body\.1" and "body\.11" share parameters') as refused:
        script_of(plan, tied)
    assert "--together body.1,body.11" in refused.value.hint
    stages = (replace(plan.stages[0], recompute="layers", recomputed=("body.1",)), plan.stages[1])
    with pytest.raises(UsageError, match="recomputation layer by layer"):
        script_of(replace(plan, stages=stages), profile)


def test_a_path_cannot_leave_its_string(tmp_path: Path) -> None:
    """Whatever a file is called."""
    profile = replace(profile_of(), model=Model(source='we"ird\\n.py:build_model'))
    text = script_of(plan_of(profile, (5, 7)), profile)
    ast.parse(text)
