"""Emitted training files: the plan's cuts in balance.yaml, and a short script with its command."""

import ast
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal

import pytest

from planner.api.question import calibrated_solve_options
from planner.core.errors import UsageError
from planner.core.values.balance import RunPrediction
from planner.core.values.plan import Inputs, Plan, ProfileReference, ScheduleName
from planner.core.values.profile import Environment, Model, Profile
from planner.core.values.units import format_bytes
from planner.emit.native import InputPaths, decisions_digest, emit_native
from planner.emit.signature import is_edited
from planner.files import digest_of, read_balance
from planner.solve import Request, solve
from tests.support.chains import random_profile

NUM_LAYERS = 12


def profile_of(source: str = "model.py:build_model", *, names: tuple[str, ...] = ()) -> Profile:
    """Return a profile of twelve layers that has a model file."""
    profile = random_profile(3, NUM_LAYERS, exact=True, sizes=(1, 2, 4))
    layers = profile.layers
    if names:
        layers = tuple(replace(layer, name=name) for layer, name in zip(layers, names, strict=True))
    model = Model(source=source, settings={"width": 8}, inputs=("8",), digest="sha256:abc", parameters=7)
    return replace(profile, layers=layers, model=model, optimizer="adamw", environment=Environment(threads=3))


def plan_of(profile: Profile, balance: tuple[int, ...], *, micro_batches: int = 4) -> Plan:
    """Return a plan with these cuts."""
    inputs = Inputs(
        profile=ProfileReference(path="profile.yaml", digest=digest_of(profile)),
        devices=len(balance),
        memory_bytes=(10**9,) * len(balance),
        batch=8,
    )
    return solve(profile, Request(inputs=inputs, balance=balance, micro_batches=micro_batches))


def write(folder: Path, plan: Plan, profile: Profile, *, folder_name: str = ".", profile_folder: str = ".") -> str:
    """Emit into `folder` and return the script's text."""
    emitted = emit_native(plan, profile, folder=folder_name, profile_folder=profile_folder)
    (folder / "balance.yaml").write_text(emitted.balance)
    (folder / "train.py").write_text(emitted.script)
    return emitted.script


@pytest.mark.parametrize("balance", [(12,), (5, 7), (1, 2, 3, 6), (1,) * 12])
def test_balance_configuration_has_the_stages_of_the_plan(tmp_path: Path, balance: tuple[int, ...]) -> None:
    profile = profile_of()
    plan = plan_of(profile, balance)
    write(tmp_path, plan, profile)
    read = read_balance(str(tmp_path / "balance.yaml"))
    names = [layer.name for layer in profile.layers]
    assert read.balance == balance
    assert read.num_stages == len(balance)
    assert [list(stage.layers) for stage in read.stages] == [
        names[first:end] for first, end in pairwise(accumulate(balance, initial=0))
    ]
    assert [stage.recompute for stage in read.stages] == [stage.recompute for stage in plan.stages]
    assert [stage.index for stage in read.stages] == list(range(len(balance)))
    assert (read.schedule, read.batch, read.micro_batches) == ("gpipe", 8, 4)
    assert (read.optimizer, read.device, read.threads) == ("adamw", "cpu", 3)
    assert replace(read.model, source="") == replace(profile.model, source="")
    assert read.plan_digest == decisions_digest(plan)


@pytest.mark.parametrize("balance", [(12,), (5, 7), (1,) * 12])
def test_script_compiles_and_describes_every_stage(tmp_path: Path, balance: tuple[int, ...]) -> None:
    profile = profile_of()
    script = write(tmp_path, plan_of(profile, balance), profile)
    compile(script, "train.py", "exec")
    assert len(script.splitlines()) <= 80
    described = ast.get_docstring(ast.parse(script)) or ""
    assert f"torchrun --nproc-per-node {len(balance)} train.py --steps 20 --report run.json" in described
    assert "M = 4 micro-batches of 2" in described
    assert f"pipeline of {len(balance)} stage{'s' if len(balance) > 1 else ''}:" in described
    assert all(f"stage {k}: {layers} layer" in described for k, layers in enumerate(balance))


def test_script_of_many_stages_has_at_most_80_lines(tmp_path: Path) -> None:
    """balance.yaml has all stages."""
    profile = random_profile(3, 40)
    profile = replace(profile, model=Model(source="model.py:build_model"))
    plan = plan_of(profile, (1,) * 40, micro_batches=8)
    script = write(tmp_path, plan, profile)
    assert len(script.splitlines()) <= 80
    assert "… and 25 more stages" in script
    assert read_balance(str(tmp_path / "balance.yaml")).num_stages == 40


def test_script_lines_are_not_overlong(tmp_path: Path) -> None:
    profile = profile_of()
    script = write(tmp_path, plan_of(profile, (5, 7)), profile)
    assert max(map(len, script.splitlines())) <= 120
    assert all(line == line.rstrip() for line in script.splitlines())


def test_emitted_files_are_repeatable() -> None:
    profile = profile_of()
    plan = plan_of(profile, (5, 7))
    one, two = (emit_native(plan, profile, folder="a", profile_folder="b") for _ in range(2))
    assert one == two


@pytest.mark.parametrize(
    ("source", "profile_folder", "folder", "expected"),
    [
        ("model.py:build_model", ".", ".", "model.py:build_model"),
        ("model.py:build_model", ".", "out", "../model.py:build_model"),
        ("../models/net.py:Net", "profiles", "out/two", "../../models/net.py:Net"),
        ("net.py:Net", "a/b", "a", "b/net.py:Net"),
        ("/srv/models/net.py:Net", "profiles", "out", "/srv/models/net.py:Net"),
        ("C:x/net.py:Net", ".", ".", "C:x/net.py:Net"),
    ],
)
def test_model_path_is_relative_to_the_balance_configuration(tmp_path, source, profile_folder, folder, expected):
    """Absolute paths are not changed."""
    profile = profile_of(source)
    write(tmp_path, plan_of(profile, (5, 7)), profile, folder_name=folder, profile_folder=profile_folder)
    assert read_balance(str(tmp_path / "balance.yaml")).model.source == expected


def test_command_in_the_script_has_its_path(tmp_path: Path) -> None:
    profile = profile_of()
    script = write(tmp_path, plan_of(profile, (5, 7)), profile, folder_name="out/two")
    assert "torchrun --nproc-per-node 2 out/two/train.py" in script


# Signature


def test_new_script_is_not_edited(tmp_path: Path) -> None:
    """Some editors and git change line ends."""
    profile = profile_of()
    script = write(tmp_path, plan_of(profile, (5, 7)), profile)
    path = tmp_path / "train.py"
    assert not is_edited(path)
    path.write_bytes(script.replace("\n", "\r\n").encode())
    assert not is_edited(path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("STEPS = 20", "STEPS = 21"),
        ("optimizer.step()\n", "optimizer.step()  # !\n"),
        ('"""Train', '"""Train '),
        ("# As emitted: ", "# As emitted: 0"),
        ("\n# As emitted:", "\nprint()\n# As emitted:"),
    ],
)
def test_every_edit_is_detected(tmp_path: Path, old: str, new: str) -> None:
    profile = profile_of()
    script = write(tmp_path, plan_of(profile, (5, 7)), profile)
    path = tmp_path / "train.py"
    assert old in script
    path.write_text(script.replace(old, new, 1))
    assert is_edited(path)


@pytest.mark.parametrize("how", ["appended", "without signature", "empty", "another's"])
def test_other_files_count_as_edited(tmp_path: Path, how: str) -> None:
    profile = profile_of()
    script = write(tmp_path, plan_of(profile, (5, 7)), profile)
    texts = {
        "appended": script + "print('more')\n",
        "without signature": script.rpartition("\n# As emitted: ")[0],
        "empty": "",
        "another's": "print('hello')\n",
    }
    path = tmp_path / "train.py"
    path.write_text(texts[how])
    assert is_edited(path)


# Names from files in a script


@pytest.mark.parametrize(
    "name",
    ["[bold]", "{x}", "a\\N{x}", "a\\u12", 'quo"""te', "single'quote", "100%", "%(prog)s", "two\nlines", "ümlaut"],
)
@pytest.mark.parametrize("where", ["first", "last", "model"])
def test_names_do_not_change_the_code_of_the_script(tmp_path: Path, name: str, where: str) -> None:
    names = [f"layers.{n}" for n in range(NUM_LAYERS)]
    if where != "model":
        names[0 if where == "first" else -1] = name
    profile = profile_of(f"{name}/net.py:Net" if where == "model" else "model.py:build_model", names=tuple(names))
    script = write(tmp_path, plan_of(profile, (5, 7)), profile)
    plain = profile_of()
    expected = ast.parse(write(tmp_path, plan_of(plain, (5, 7)), plain))
    made = ast.parse(script)
    assert ast.get_docstring(made)
    assert ast.dump(ast.Module(made.body[1:], [])) == ast.dump(ast.Module(expected.body[1:], []))


def test_names_cannot_inject_code(tmp_path: Path) -> None:
    smuggled = '"""\nraise SystemExit("smuggled")\n"""'
    names = tuple(smuggled if n == 4 else f"layers.{n}" for n in range(NUM_LAYERS))
    profile = profile_of(names=names)
    script = write(tmp_path, plan_of(profile, (5, 7)), profile)
    assert not any(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(script)))


# Digests and refusals


def test_decisions_digest_ignores_predictions() -> None:
    """A report then still matches its plan after predictions are recomputed."""
    profile = profile_of()
    plan = plan_of(profile, (5, 7))
    digest = decisions_digest(plan)
    assert decisions_digest(replace(plan, predicted=replace(plan.predicted, step_us=1.0))) == digest
    stages = (replace(plan.stages[0], recompute="always"), plan.stages[1])
    other = "never" if plan.stages[0].recompute == "always" else "always"
    stages = (replace(plan.stages[0], recompute=other), plan.stages[1])
    changed = [
        replace(plan, balance=(6, 6)),
        replace(plan, micro_batches=8),
        replace(plan, schedule="1f1b"),
        replace(plan, stages=stages),
        replace(plan, inputs=replace(plan.inputs, batch=16)),
        replace(plan, inputs=replace(plan.inputs, profile=replace(plan.inputs.profile, digest="sha256:other"))),
    ]
    assert len({digest, *map(decisions_digest, changed)}) == 1 + len(changed)


@pytest.mark.parametrize("balance", [(5, 6), (6, 7), (12, 0), (13, -1)])
def test_invalid_cuts_are_not_emitted(balance: tuple[int, ...]) -> None:
    profile = profile_of()
    plan = replace(plan_of(profile, (5, 7)), balance=balance)
    with pytest.raises(UsageError):
        emit_native(plan, profile, folder=".", profile_folder=".")


def test_profile_without_a_model_is_not_emitted() -> None:
    profile = profile_of("")
    with pytest.raises(UsageError, match="names no model file"):
        emit_native(plan_of(profile, (5, 7)), profile, folder=".", profile_folder=".")


def test_plan_of_a_gpu_profile_is_emitted_for_gpus(tmp_path: Path) -> None:
    profile = profile_of()
    profile = replace(profile, device=replace(profile.device, kind="cuda"))
    write(tmp_path, plan_of(profile, (5, 7)), profile)
    assert read_balance(str(tmp_path / "balance.yaml")).device == "cuda"


def test_script_names_its_schedule(tmp_path: Path) -> None:
    profile = profile_of()
    plan = replace(plan_of(profile, (5, 7)), schedule="1f1b")
    assert "1F1B with M = 4" in write(tmp_path, plan, profile)
    assert read_balance(str(tmp_path / "balance.yaml")).schedule == "1f1b"


@pytest.mark.parametrize("how", ["measured", "compiled", "estimated"])
def test_prediction_from_an_estimate_is_marked_in_the_script(how: Literal["measured", "compiled", "estimated"]) -> None:
    profile = profile_of()
    plan = plan_of(profile, (5, 7))
    plan = replace(plan, inputs=replace(plan.inputs, profile=replace(plan.inputs.profile, how=how)))
    script = emit_native(plan, profile, folder=".", profile_folder=".").script
    (line,) = [line for line in script.splitlines() if line.startswith("Predicted: ")]
    assert line.endswith("'s device." if how == "measured" else f"'s device; {how}, not measured.")


@pytest.mark.parametrize(("schedule", "rows"), [("zbv", ["0, 3", "1, 2"]), ("search", ["0, 3", "1, 2"]), ("1f1b", [])])
def test_script_lists_devices_and_stages_apart(tmp_path: Path, schedule: ScheduleName, rows: list[str]) -> None:
    """Stages of one device share its memory, which is therefore a figure of the device."""
    profile, count = profile_of(), 2 if rows else 1
    inputs = replace(plan_of(profile, (6, 6)).inputs, schedule=schedule, chunks=count)
    balance = (3,) * 4 if rows else (6, 6)
    plan = solve(profile, Request(inputs=inputs, balance=balance, micro_batches=4, searches_longer=False))
    assert plan.placement == ("v" if rows else "loop")
    listed = [line.strip() for line in write(tmp_path, plan, profile).splitlines() if " 0: " in line or " 1: " in line]
    devices, stages = ([line for line in listed if line.startswith(word)] for word in ("device", "stage"))
    memory = [f"{format_bytes(used)} of 954 MiB" for used in plan.peak_bytes_by_device()]
    assert devices == [f"device {d}: stages {row}, {memory[d]}" for d, row in enumerate(rows)]
    assert [line.partition(", ")[0] for line in stages] == [f"stage {k}: {balance[k]} layers" for k in range(2)]
    assert [line.endswith(" of 954 MiB") for line in stages] == [not rows] * 2


def test_balance_configuration_has_predictions_and_paths() -> None:
    """Paths are relative to its folder; smaller plans have the same entries."""
    profile = profile_of()
    plan, smaller = plan_of(profile, (2, 4, 6)), plan_of(profile, (5, 7))
    input_paths = InputPaths(plan="plans/three.yaml", profile="data/profile.yaml", smaller=("two.yaml",))
    write = partial(emit_native, plan, profile, folder="out", repeat_options=calibrated_solve_options)
    emitted = write(profile_folder="data", smaller=(smaller,), input_paths=input_paths)
    expected = {"profile": "../data/profile.yaml", "reserve_bytes": 0}
    assert [balance.planned for balance in emitted.plans] == [
        RunPrediction(
            step_us=each.predicted.step_us,
            plan=f"../{path}",
            solve=(f"--devices {count}", "--mem 1GB", "--batch 8", "--schedule gpipe"),
            **expected,
        )
        for each, path, count in ((plan, "plans/three.yaml", 3), (smaller, "two.yaml", 2))
    ]
    piped = write(profile_folder=".", input_paths=InputPaths(plan="-", profile="-"))
    assert piped.plans[0].planned == replace(emitted.plans[0].planned, plan="plan.yaml", profile="profile.yaml")
