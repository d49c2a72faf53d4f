"""Tests of the commands as a user types them: files, messages and exit codes."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessException

from planner import files
from planner.cli.main import run
from planner.core.errors import ExitCode
from planner.core.values.plan import Plan
from planner.core.values.profile import Device
from planner.core.values.run_report import RunReport, StageRun
from planner.core.values.units import format_us
from planner.emit.native import decisions_digest
from planner.executor.measure import calibrate
from tests.support.cli import (
    BUILD,
    EXAMPLE,
    FAST,
    HEAD,
    LOSS,
    MODEL,
    Ran,
    call,
    command,
    environment,
    known_executor,
    no_calibration,
    no_proof,
    spawn,
    write_model,
)
from tests.support.docs import blocks, lines
from tests.support.profiles import profile_of

COMMANDS = (
    *("profile", "profile-links", "solve", "emit", "check", "verify"),
    *("explain", "show", "explore", "compare", "sweep", "export", "schema"),
)
SOLVE = ("solve", "--devices", "2", "--mem", "8GB", "--balance", "2,3", "--micro-batches", "2")

Capsys = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write model.py, and profile.yaml and plan.yaml made from it."""
    folder = tmp_path_factory.mktemp("finished")
    write_model(folder)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.chdir(folder)
        no_calibration(patch)
        no_proof(patch)
        assert run(["profile", "model.py", *FAST]) == 0
        assert run(list(SOLVE)) == 0
    return folder


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with nothing but model.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    no_calibration(monkeypatch)
    no_proof(monkeypatch)
    write_model(tmp_path)
    return tmp_path


@pytest.fixture
def here(empty: Path, finished: Path) -> Path:
    """Change to a folder with model.py, profile.yaml and plan.yaml."""
    shutil.copytree(finished, empty, dirs_exist_ok=True)
    return empty


def replace_once(path: Path, old: str, new: str) -> None:
    """Edit a file as a user does by hand."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def visible(folder: Path) -> set[str]:
    """Return the names of all files in `folder`, including hidden ones, except Python's caches."""
    return {entry.name for entry in folder.iterdir() if entry.name != "__pycache__"}


# The workflow


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_quiet_and_format_options(name: str, capsys: Capsys) -> None:
    done = call(capsys, name, "--help")
    assert "-q, --quiet" in done.out
    option = done.out[done.out.index("--format ") :]
    assert "json" in option


@pytest.mark.slow
@pytest.mark.parametrize(("reserve", "message"), [(10**9, "reserve of 1GB per device is"), (0, "try `--reserve 1GB`")])
def test_estimates_report_the_memory_they_reserve(here: Path, capsys: Capsys, reserve: int, message: str) -> None:
    """An amount given by the user needs no note."""
    profile = files.read_profile("profile.yaml")
    device = replace(profile.device, how="estimated", reserve_bytes=reserve)
    files.write("estimate.yaml", replace(profile, device=device))
    solve = ("solve", "estimate.yaml", "--devices", "2", "--mem", "8GB")
    assert message in call(capsys, *solve).err
    assert message not in call(capsys, *solve, "--reserve", "2GB").err


@pytest.mark.slow
def test_readme_commands_work_with_default_file_names(empty: Path, capsys: Capsys) -> None:
    """Each command prints the next one."""
    profiled = call(capsys, "profile", "model.py", *FAST)
    assert (profiled.code, visible(empty)) == (0, {"model.py", "profile.yaml"})
    assert "next: gpipe-plan solve --devices 2 --mem 8GB\n" in profiled.err

    solved = call(capsys, *shlex.split(profiled.err.rpartition("next: gpipe-plan ")[2]))
    assert (solved.code, visible(empty)) == (0, {"model.py", "profile.yaml", "plan.yaml"})
    assert solved.err.endswith("next: gpipe-plan emit\n")

    emitted = call(capsys, "emit")
    plan = files.read_plan("plan.yaml")
    assert emitted.code == 0
    assert emitted.out.split() == ["balance.yaml", "train.py"]
    assert {"balance.yaml", "train.py"} < visible(empty)
    assert emitted.err.endswith(f"next: torchrun --nproc-per-node {plan.num_devices * plan.replicas} train.py\n")

    checked = call(capsys, "check")
    assert checked.code == 0
    assert checked.out.splitlines()[-1] == "fits"

    for arguments in ((), ("plan.yaml",), ("profile.yaml",)):
        shown = call(capsys, "show", *arguments)
        assert (shown.code, shown.err) == (0, ""), arguments
        assert "layer" in shown.out


@pytest.mark.slow
def test_suggested_next_commands_use_the_written_files(here: Path, capsys: Capsys) -> None:
    """Run the suggested commands as printed."""
    solved = call(capsys, *SOLVE, "-o", "plans/two.yaml")
    assert solved.err.endswith("next: gpipe-plan emit plans/two.yaml\n")
    profiled = call(capsys, "profile", "model.py", *FAST, "-o", "small.yaml")
    command_line = profiled.err.rpartition("next: gpipe-plan ")[2]
    assert "small.yaml" in command_line
    assert call(capsys, *shlex.split(command_line)).code == 0


@pytest.mark.slow
def test_only_the_result_is_on_stdout(here: Path, capsys: Capsys) -> None:
    """Notes, progress and the next command are on stderr, and `--quiet` removes them."""
    for arguments in (("profile", "model.py", *FAST), SOLVE, ("emit",), ("check",), ("show",)):
        loud, quiet = call(capsys, *arguments), call(capsys, *arguments, "--quiet")
        assert (loud.code, quiet.code, quiet.err) == (0, 0, ""), arguments
        assert quiet.out, arguments
        assert not re.search(r"^(note|next|warning|error|wrote|profiling)\b", loud.out, re.MULTILINE), arguments
        if arguments[0] != "profile":  # whose times differ
            assert loud.out == quiet.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "schema"),
    [
        pytest.param(("profile", "model.py", *FAST), "gpipe-plan/profile/v1", marks=pytest.mark.nightly),
        (SOLVE, "gpipe-plan/plan/v1"),
        (("check",), "gpipe-plan/check/v1"),
        (("show",), "gpipe-plan/plan/v1"),
        (("show", "profile.yaml"), "gpipe-plan/profile/v1"),
        (("profile", "model.py", *FAST, "-o", "-"), "gpipe-plan/profile/v1"),
        ((*SOLVE, "-o", "-"), "gpipe-plan/plan/v1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_format_json_prints_exactly_one_document(here, capsys, arguments, schema):
    """Its first key is the schema. The same holds if the file itself goes to stdout."""
    done = call(capsys, *arguments, "--format", "json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert next(iter(document)) == "schema"
    assert document["schema"] == schema


@pytest.mark.slow
def test_output_of_the_model_does_not_mix_with_json(empty: Path, capsys: Capsys) -> None:
    noisy = MODEL + "print('imported')\n" + BUILD.replace("return", "print('built')\n    return", 1)
    write_model(empty, noisy.replace("return ((", "print('loss')\n    return (("))
    done = call(capsys, "profile", "model.py", *FAST, "--format", "json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["schema"] == "gpipe-plan/profile/v1"


def test_printed_json_of_a_plan_is_a_plan_file(here: Path, capsys: Capsys) -> None:
    (here / "again.json").write_text(call(capsys, "show", "--format", "json").out)
    assert files.read_plan("again.json") == files.read_plan("plan.yaml")
    assert call(capsys, "check", "again.json").code == 0


# Files: `-`, -o


def test_dash_is_stdin_and_stdout(here: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "plan.yaml").unlink()
    monkeypatch.setattr(sys, "stdin", io.StringIO((here / "profile.yaml").read_text()))
    solved = call(capsys, SOLVE[0], "-", *SOLVE[1:], "-o", "-")
    assert solved.code == 0, solved.err
    assert visible(here) == {"model.py", "profile.yaml"}
    (here / "copy.yaml").write_text(solved.out)
    assert files.read_plan("copy.yaml").balance == (2, 3)

    monkeypatch.setattr(sys, "stdin", io.StringIO(solved.out))
    checked = call(capsys, "check", "-", "--profile", "profile.yaml")
    assert (checked.code, checked.out.splitlines()[-1]) == (0, "fits"), checked.err


def test_piped_plans_find_their_profile(here: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = call(capsys, *SOLVE, "-o", "-").out
    for arguments in (("check", "-"), ("emit", "-"), ("show", "-")):
        monkeypatch.setattr(sys, "stdin", io.StringIO(plan))
        assert call(capsys, *arguments).code == 0, arguments


@pytest.mark.slow
def test_a_profile_to_stdout_can_be_solved(empty: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is written."""
    profiled = call(capsys, "profile", "model.py", *FAST, "-o", "-")
    assert (profiled.code, visible(empty)) == (0, {"model.py"})
    monkeypatch.setattr(sys, "stdin", io.StringIO(profiled.out))
    assert call(capsys, SOLVE[0], "-", *SOLVE[1:]).code == 0


def test_plans_solved_from_stdin_need_the_profile_option(here, capsys, monkeypatch):
    """`check` names `--profile` and does not wait for the terminal."""
    monkeypatch.setattr(sys, "stdin", io.StringIO((here / "profile.yaml").read_text()))
    assert call(capsys, SOLVE[0], "-", *SOLVE[1:]).code == 0
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    checked = call(capsys, "check")
    assert checked.code == 2
    assert "--profile" in checked.err
    assert call(capsys, "check", "--profile", "profile.yaml").code == 0


@pytest.mark.slow
def test_files_that_move_together_find_each_other(here: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in files are relative to the file."""
    assert call(capsys, "profile", "model.py", *FAST, "-o", "a/profiles/p.yaml").code == 0
    assert call(capsys, SOLVE[0], "a/profiles/p.yaml", *SOLVE[1:], "-o", "a/plans/q.yaml").code == 0
    assert call(capsys, "emit", "a/plans/q.yaml", "-o", "a/out").code == 0
    plan = files.read_plan("a/plans/q.yaml")
    assert plan.inputs.profile.path == "../profiles/p.yaml"
    assert files.read_balance("a/out/balance.yaml").model.source == "../../model.py:build_model"

    (here / "b").mkdir()
    shutil.move(here / "a", here / "b" / "a")
    assert call(capsys, "check", "b/a/plans/q.yaml").code == 0
    monkeypatch.chdir(here / "b" / "a" / "plans")
    assert call(capsys, "check", "q.yaml").code == 0


@pytest.mark.slow
def test_an_absolute_model_path_stays_absolute(here: Path, capsys: Capsys) -> None:
    assert call(capsys, "profile", str(here / "model.py"), *FAST, "-o", "a/p.yaml").code == 0
    assert files.read_profile("a/p.yaml").model.source == f"{here / 'model.py'}:build_model"


def test_output_format_follows_the_suffix(here: Path, capsys: Capsys) -> None:
    assert call(capsys, *SOLVE, "-o", "plan.json").code == 0
    assert json.loads((here / "plan.json").read_text())["balance"] == [2, 3]
    assert files.read_plan("plan.json") == files.read_plan("plan.yaml")
    assert call(capsys, "check", "plan.json").code == 0


@pytest.mark.slow
def test_solving_twice_gives_the_same_bytes(here: Path, capsys: Capsys) -> None:
    first = call(capsys, "solve", "--devices", "3", "--mem", "8GB", "-o", "one.yaml")
    second = call(capsys, "solve", "--devices", "3", "--mem", "8GB", "-o", "two.yaml")
    assert (first.code, second.code) == (0, 0)
    assert (here / "one.yaml").read_bytes() == (here / "two.yaml").read_bytes()


def test_special_files_are_not_replaced(here: Path, capsys: Capsys) -> None:
    """`-o /dev/stdout` and named pipes must not become regular files."""
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDWR | os.O_NONBLOCK)
    try:
        call(capsys, *SOLVE, "-o", "pipe")
        assert stat.S_ISFIFO(Path("pipe").stat().st_mode)
    finally:
        os.close(reader)


# profile


@pytest.mark.slow
def test_settings_reach_the_model_and_the_profile(empty: Path, capsys: Capsys) -> None:
    """Expect 8·24 + 24 + 24·24 + 24 + 24·4 + 4 parameters."""
    assert call(capsys, "profile", "model.py", *FAST, "--set", "width=24").code == 0
    profile = files.read_profile("profile.yaml")
    assert profile.model.settings == {"width": 24}
    assert profile.model.parameters == 8 * 24 + 24 + 24 * 24 + 24 + 24 * 4 + 4
    assert profile.layers[0].parameter_bytes == 4 * (8 * 24 + 24)
    assert profile.micro_batch_sizes == (1, 2, 4)


@pytest.mark.slow
def test_input_option_replaces_the_example_batch(empty: Path, capsys: Capsys) -> None:
    """Without `loss_fn`, the loss is the mean of the output, and a note reports this."""
    write_model(empty, HEAD + "model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 4))\n")
    done = call(capsys, "profile", "model.py", *FAST, "--input", "6:int64:50")
    assert done.code == 0, done.err
    assert re.search(r"^note: .*loss_fn", done.err, re.MULTILINE)
    profile = files.read_profile("profile.yaml")
    assert profile.model.inputs == ("6:int64:50",)
    assert profile.layers[0].output_bytes == tuple(b * 6 * 8 * 4 for b in (1, 2, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "name", "states"),
    [pytest.param((), "adamw", 2, marks=pytest.mark.nightly), (("--optimizer", "sgd"), "sgd", 0)],
)
def test_optimizer_option_replaces_adamw(empty, capsys, options, name, states):
    """AdamW keeps two numbers per parameter, and its step counters."""
    assert call(capsys, "profile", "model.py", *FAST, *options).code == 0
    profile = files.read_profile("profile.yaml")
    assert profile.optimizer == name
    assert profile.layers[0].optimizer_bytes // profile.layers[0].parameter_bytes == states


@pytest.mark.slow
def test_in_place_layers_are_profiled(empty: Path, capsys: Capsys) -> None:
    write_model(empty, MODEL.replace("nn.ReLU()", "nn.ReLU(inplace=True)"))
    done = call(capsys, "profile", "model.py", *FAST)
    assert done.code == 0, done.err


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        ProcessException,
        *(pytest.param(error, marks=pytest.mark.nightly) for error in (OSError, RuntimeError, ValueError)),
    ],
)
def test_a_failed_calibration_is_a_warning(empty, capsys, monkeypatch, error):

    def fail(*_: object, **__: object) -> None:
        raise ProcessException("exploded", 1, 2) if error is ProcessException else error("exploded")

    monkeypatch.setattr(calibrate, "executor_cost", fail)
    done = call(capsys, "profile", "model.py", *FAST)
    assert done.code == 0, done.err
    assert re.search(r"^warning: .*exploded", done.err, re.MULTILINE)
    assert (empty / "profile.yaml").exists()


@pytest.mark.slow
def test_layer_names_are_not_read_as_markup(empty: Path, capsys: Capsys) -> None:
    build = """
def build_model():
    from collections import OrderedDict
    return nn.Sequential(OrderedDict({"[bold]": nn.Linear(8, 8), "[/red]x{y}": nn.ReLU(), "häd:1": nn.Linear(8, 4)}))
"""
    write_model(empty, HEAD + build + EXAMPLE + LOSS)
    outputs = [call(capsys, "profile", "model.py", *FAST)]
    outputs.append(call(capsys, "solve", "--devices", "3", "--mem", "8GB", "--balance", "1,1,1"))
    outputs.append(call(capsys, "show", "plan.yaml"))
    for done in outputs:
        assert done.code == 0, done.err
        for name in ("[bold]", "[/red]x{y}", "häd:1"):
            assert name in done.out
    over = call(capsys, "check", "--mem", "1B")
    assert over.code == 1
    assert "[/red]x{y}" in over.out
    assert call(capsys, "emit").code == 0
    assert [stage.layers for stage in files.read_balance("balance.yaml").stages] == [
        ("[bold]",),
        ("[/red]x{y}",),
        ("häd:1",),
    ]


@pytest.mark.slow
def test_names_are_escaped_on_ascii_terminals(empty: Path, capsys: Capsys) -> None:
    build = "def build_model():\n    m = nn.Sequential()\n    m.add_module('\u00e4', nn.Linear(8, 4))\n    return m\n"
    write_model(empty, HEAD + build + EXAMPLE + LOSS)
    assert call(capsys, "profile", "model.py", *FAST).code == 0
    shown = spawn(["show", "profile.yaml", "--format", "json"], empty, PYTHONIOENCODING="ascii")
    assert shown.code == 0, shown.err
    assert json.loads(shown.out)["layers"][0]["name"] == "ä"
    solved = spawn(["solve", "--devices", "1", "--mem", "1GB", "-o", "-"], empty, PYTHONIOENCODING="ascii")
    assert solved.code == 0, solved.err


# solve: the answer no


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "auto"])
def test_an_impossible_memory_limit_names_one_that_fits(here: Path, capsys: Capsys, schedule: str) -> None:
    """The exit code is 1, nothing is written, and the suggested `--mem` works."""
    (here / "plan.yaml").unlink()
    asked = ("solve", "--devices", "2", "--schedule", schedule, "--mem")
    refused = call(capsys, *asked, "500B")
    assert (refused.code, refused.out) == (1, "")
    assert refused.error.startswith("error: no plan fits 500 B on each of 2 devices: ")
    assert not (here / "plan.yaml").exists()

    advised = re.search(r"(?:smallest `--mem` is|need at least `--mem`) (\S+) \(M = (\d+)\)", refused.err)
    assert advised is not None, refused.err
    followed = call(capsys, *asked, advised[1])
    assert followed.code == 0, followed.err
    assert call(capsys, "check").code == 0
    # Other numbers of micro-batches may fit as well, and be faster.
    with_its_number = call(capsys, *asked, advised[1], "--micro-batches", advised[2])
    assert with_its_number.code == 0, with_its_number.err


def test_the_suggested_number_of_devices_is_the_smallest_that_fits(here: Path, capsys: Capsys) -> None:
    # Other schedules may fit on fewer devices than the advice names, which is of the one asked for.
    asked = ("solve", "--schedule", "gpipe")
    several = call(capsys, *asked, "--devices", "5", "--mem", "1B")
    smallest = re.search(r"(?:smallest `--mem` is|need at least `--mem`) (\S+) ", several.err)
    assert smallest is not None, several.err
    refused = call(capsys, *asked, "--devices", "1", "--mem", smallest[1])
    assert refused.code == 1
    advised = re.search(r"`--devices (\d+)` fits", refused.err)
    assert advised is not None, refused.err
    assert call(capsys, *asked, "--devices", advised[1], "--mem", smallest[1]).code == 0
    assert call(capsys, *asked, "--devices", str(int(advised[1]) - 1), "--mem", smallest[1]).code == 1


def test_a_note_names_a_faster_schedule(here: Path, capsys: Capsys) -> None:
    """The optimality certificate covers the requested schedule only."""
    asked = ("solve", "--devices", "2", "--mem", "8GB")
    (here / "profile.yaml").write_text(files.dump(profile_of([1e4] * 8, [2e4] * 8, saved_bytes=1000, size=2)))
    gpipe = call(capsys, *asked, "--batch", "8", "--schedule", "gpipe")
    assert "no GPipe plan is faster" in gpipe.out
    said = re.search(r"note: (.+) would take (\S+ ms), (\S+ %) less: `--schedule auto`", gpipe.err)
    assert said is not None, gpipe.err
    open_ = call(capsys, *asked, "--batch", "8")
    assert open_.out.startswith(f"{said[1]}, 2 devices")
    assert f"\nstep {said[2]} " in open_.out
    assert "no plan is faster" in open_.out
    assert "would take" not in open_.err
    assert "would take" not in call(capsys, *asked, "--batch", "8", "--schedule", "gpipe", "--quiet").err


def test_a_note_names_a_simpler_schedule_that_is_hardly_slower(here: Path, capsys: Capsys) -> None:
    """The option in the note gives a plan with the step time in the note, and removes the note."""
    profile = profile_of([1e4] * 8, [2e4] * 8, saved_bytes=1000, size=1, output_bytes=8000)
    (here / "profile.yaml").write_text(files.dump(profile))
    asked = ("solve", "--devices", "2", "--mem", "8GB", "--batch", "64")
    best = call(capsys, *asked)
    said = re.search(r"note: (.+), a simpler schedule, would take (\S+ m?s), \S+ % more: `--simplest 2%`", best.err)
    assert said is not None, best.err
    simple = call(capsys, *asked, "--simplest", "2%")
    assert simple.out.startswith(f"{said[1]}, 2 stages")
    assert format_us(files.read_plan("plan.yaml").predicted.step_us) == said[2]
    assert "simpler" not in simple.err
    assert call(capsys, "check").code == 0


def test_a_plan_within_the_error_range_is_a_warning_of_solve_and_a_finding_of_check(here: Path, capsys: Capsys) -> None:
    roomy = call(capsys, *SOLVE)
    assert " · fits\n" in roomy.out
    assert "warning" not in roomy.err
    need = max(stage.memory.total for stage in files.read_plan("plan.yaml").stages)
    limited = (*SOLVE[:4], f"{need}B", *SOLVE[5:], "--headroom", "0%")
    tight = call(capsys, *limited)
    assert tight.code == 0
    assert " · tight\n" in tight.out
    assert "warning: device 0 may need " in tight.err
    as_json = call(capsys, *limited, "--format", "json")
    assert [line for line in as_json.err.splitlines() if line in tight.err and "warning" in line]
    verdict = json.loads(call(capsys, "check", "--format", "json").out)
    assert verdict["memory"] == "tight"
    assert "GP103" in {each["code"] for each in verdict["findings"]}


def test_a_note_reports_what_replicas_on_unused_devices_would_give(here: Path, capsys: Capsys) -> None:
    """Over a link with a latency of a second, one pipeline is slower than one device."""
    (here / "profile.yaml").write_text(files.dump(profile_of([1e4] * 4, [2e4] * 4, size=1, output_bytes=8)))
    asked = ("solve", "--devices", "4", "--mem", "8GB", "--batch", "16", "--link", "1GB/s,1s")
    one = call(capsys, *asked)
    assert "3 of 4 devices left unused" in one.out, one.err
    said = re.search(r"note: 4 replicas on 4 of 4 devices would take (\S+ m?s), 75.0 % less", one.err)
    assert said is not None, one.err
    assert call(capsys, *asked, "--replicas", "auto").code == 0
    assert format_us(files.read_plan("plan.yaml").predicted.step_us) == said[1]


def test_the_memory_limit_is_printed_in_gb_and_gib(here: Path, capsys: Capsys) -> None:
    assert "8 GB = 7.45 GiB" in call(capsys, *SOLVE).err


@pytest.mark.slow
def test_the_plan_records_the_resolved_options(here: Path, capsys: Capsys) -> None:
    options = ("--batch", "4", "--recompute", "always", "--link", "25GB/s,5us", "--reserve", "1MB", "--headroom", "10%")
    assert call(capsys, "solve", "--devices", "2", "--mem", "1GB,2GB", *options).code == 0
    inputs = files.read_plan("plan.yaml").inputs
    assert (inputs.devices, inputs.batch, inputs.recompute, inputs.reserve_bytes) == (2, 4, "always", 10**6)
    assert inputs.memory_bytes == (900_000_000, 1_800_000_000)
    assert (inputs.link.bytes_per_s, inputs.link.latency_us, inputs.link.blocking) == (25e9, 5.0, False)
    assert inputs.profile.digest == files.digest_of(files.read_profile("profile.yaml"))


# check


def test_check_reports_stages_above_the_memory_limit(here: Path, capsys: Capsys) -> None:
    over = call(capsys, "check", "--mem", "1kB")
    assert over.code == 1
    assert over.out.count("GP101 error: stage ") == 2
    assert over.out.splitlines()[-1].startswith("does not fit")
    assert call(capsys, "check", "--mem", "1GB").code == 0
    one_over = call(capsys, "check", "--mem", "1GB,1kB", "--format", "json")
    assert one_over.code == 1
    assert [(f["code"], f["stage"]) for f in json.loads(one_over.out)["findings"]] == [("GP101", 1)]


def test_headroom_warns_without_changing_the_exit_code(here: Path, capsys: Capsys) -> None:
    need = max(stage.memory.total for stage in files.read_plan("plan.yaml").stages)
    tight = call(capsys, "check", "--mem", f"{need}B", "--headroom", "20%")
    assert tight.code == 0
    assert "GP102 warning" in tight.out
    assert call(capsys, "check", "--mem", f"{need - 1}B").code == 1


def test_headroom_auto_equals_the_share_in_its_note(here: Path, capsys: Capsys) -> None:
    """The plans have the same bytes. `check` and `show` use the same share."""
    solved = call(capsys, *SOLVE, "--headroom", "auto")
    share = re.search(r"note: headroom ([\d.]+)% of every memory limit", solved.err)
    plan = Path("plan.yaml").read_bytes()
    assert call(capsys, *SOLVE, "--headroom", f"{share[1]}%").code == 0
    assert Path("plan.yaml").read_bytes() == plan
    bounds = [line for line in solved.out.splitlines() if line.startswith(("step ", "accuracy: measured on"))]
    assert len(bounds) == 2
    assert [line for line in call(capsys, "show").out.splitlines() if line in bounds] == bounds
    need = max(stage.memory.total for stage in files.read_plan("plan.yaml").stages)
    tight = call(capsys, "check", "--mem", f"{need}B", "--headroom", "auto", "--format", "json")
    verdict = json.loads(tight.out)
    assert verdict["findings"][0]["code"] == "GP102"
    assert verdict["certainty"]["device_bytes"][0] > need or verdict["certainty"]["device_bytes"][1] > need
    least, most = verdict["certainty"]["step_us"]
    assert least < verdict["plan"]["predicted"]["step_us"] < most
    assert call(capsys, "sweep", "--devices", "1", "--mem", "8GB", "--batch", "2", "--headroom", "auto").code == 0


def test_a_changed_number_in_the_profile_makes_the_plan_stale(here: Path, capsys: Capsys) -> None:
    saved = files.read_profile("profile.yaml").layers[0].saved_bytes
    replace_once(
        here / "profile.yaml",
        f"saved_bytes: {list(saved)}",
        f"saved_bytes: {[saved[0] + 1, *saved[1:]]}",
    )
    stale = call(capsys, "check")
    assert stale.code == 1
    assert "GP201 error: the plan was made from another profile" in stale.out
    assert stale.out.splitlines()[-1].startswith("does not fit")


def test_comments_and_spacing_do_not_make_a_plan_stale(here: Path, capsys: Capsys) -> None:
    text = (here / "profile.yaml").read_text()
    (here / "profile.yaml").write_text("# measured on a quiet night\n" + text.replace(", ", ",  "))
    assert call(capsys, "check").code == 0


@pytest.mark.parametrize("shown", ["text", "json"])
def test_check_recomputes_an_edited_balance(here: Path, capsys: Capsys, shown: str) -> None:
    """The numbers equal those of solving for these cuts, and a warning reports the edit."""
    replace_once(here / "plan.yaml", "balance: [2, 3]", "balance: [4, 1]")
    checked = call(capsys, "check", "--format", shown)
    assert checked.code == 0
    assert "GP203" in checked.out
    if shown == "json":
        now = json.loads(checked.out)["plan"]
        options = ("--balance", "4,1", "--micro-batches", "2", "--schedule", now["schedule"], "--format", "json")
        asked = json.loads(call(capsys, "solve", "--devices", "2", "--mem", "8GB", *options).out)
        assert [stage["last"] for stage in now["stages"]] == ["3", "4"]
        assert now["predicted"] == asked["predicted"]
        assert now["stages"] == asked["stages"]


@pytest.mark.parametrize(
    ("balance", "message"),
    [("[2, 2]", "4 layers"), ("[3, 3]", "6 layers"), ("[5, 0]", "every stage needs at least one layer")],
)
def test_balances_without_all_layers_or_with_empty_stages_are_refused(here, capsys, balance, message):
    replace_once(here / "plan.yaml", "balance: [2, 3]", f"balance: {balance}")
    for arguments in (("check",), ("emit",)):
        refused = call(capsys, *arguments)
        assert refused.code == 2
        assert message in refused.error
    assert "train.py" not in visible(here)


def test_profile_option_replaces_a_moved_profile(here: Path, capsys: Capsys) -> None:
    (here / "profile.yaml").rename(here / "moved.yaml")
    for arguments in (("check",), ("emit",), ("show",)):
        missing = call(capsys, *arguments)
        assert missing.code == 2
        assert missing.error.startswith("profile.yaml: error: no such file")
        assert call(capsys, *arguments, "--profile", "moved.yaml").code == 0


# emit


def test_emit_keeps_an_edited_script_and_renews_the_balance(here: Path, capsys: Capsys) -> None:
    """Only `--force` replaces an edited train.py."""
    assert call(capsys, "emit").code == 0
    assert call(capsys, "emit").code == 0
    emitted = (here / "train.py").read_text()
    replace_once(here / "train.py", "STEPS = 20", "STEPS = 30")
    edited = (here / "train.py").read_text()
    call(capsys, *SOLVE[:5], "--balance", "3,2")

    again = call(capsys, "emit")
    assert (again.code, again.out) == (0, "balance.yaml\n")
    assert "train.py was edited and is kept" in again.err
    assert (here / "train.py").read_text() == edited
    assert files.read_balance("balance.yaml").balance == (3, 2)

    assert call(capsys, "emit", "--force").code == 0
    assert "STEPS = 20" in (here / "train.py").read_text() != emitted


def test_an_edited_balance_is_not_overwritten(here: Path, capsys: Capsys) -> None:
    assert call(capsys, "emit").code == 0
    with (here / "balance.yaml").open("a") as file:
        file.write("# mine\n")
    edited, script = (here / "balance.yaml").read_text(), (here / "train.py").read_text()
    call(capsys, *SOLVE[:5], "--balance", "3,2")
    refused = call(capsys, "emit")
    assert (refused.code, refused.out) == (2, "")
    assert refused.error == "balance.yaml: error: was edited since it was emitted"
    assert ((here / "balance.yaml").read_text(), (here / "train.py").read_text()) == (edited, script)
    assert call(capsys, "emit", "--force").code == 0
    assert files.read_balance("balance.yaml").balance == (3, 2)


def test_a_script_that_was_not_emitted_is_not_overwritten(here: Path, capsys: Capsys) -> None:
    (here / "train.py").write_text("print('mine')\n")
    refused = call(capsys, "emit")
    assert refused.code == 2
    assert (here / "train.py").read_text() == "print('mine')\n"
    assert "balance.yaml" not in visible(here)


def test_a_folder_or_binary_file_named_train_py_is_a_user_error(here: Path, capsys: Capsys) -> None:
    (here / "train.py").write_bytes(b"\xff\xfe\x00")
    refused = call(capsys, "emit")
    assert refused.code == 2
    assert refused.error.startswith("train.py: error: ")
    (here / "train.py").unlink()
    (here / "train.py").mkdir()
    refused = call(capsys, "emit", "--force")
    assert refused.code == 2
    assert "train.py" in refused.error
    assert "bug" not in refused.err


def test_the_script_describes_the_edited_plan(here: Path, capsys: Capsys) -> None:
    """The table in train.py has the edited stages."""
    replace_once(here / "plan.yaml", "balance: [2, 3]", "balance: [4, 1]")
    assert call(capsys, "emit").code == 0
    assert files.read_balance("balance.yaml").balance == (4, 1)
    script = (here / "train.py").read_text()
    assert "stage 0: 4 layers, 0 to 3" in script
    assert "stage 1: 1 layer, 4 to 4" in script


def test_nothing_is_emitted_from_a_stale_plan(here: Path, capsys: Capsys) -> None:
    replace_once(here / "profile.yaml", "parameters: 484", "parameters: 485")
    refused = call(capsys, "emit")
    assert "another profile" in refused.error
    assert "solve again" in refused.err
    assert {"balance.yaml", "train.py"}.isdisjoint(visible(here))
    assert refused.code == ExitCode.NO


# show


def run_of(plan: Plan) -> RunReport:
    """Return the report of a short run under `plan`."""
    stages = tuple(
        StageRun(
            index=stage.index,
            first=stage.first,
            last=stage.last,
            forward_us=10.0,
            backward_us=20.0,
            parameter_bytes=stage.memory.parameters,
            peak_bytes=stage.memory.total,
        )
        for stage in plan.stages
    )
    return RunReport(
        plan_digest=decisions_digest(plan),
        device=Device(kind="cpu"),
        losses=(1.0, 0.5),
        step_us=(100.0, 90.0),
        warmup_steps=1,
        stages=stages,
    )


def test_show_compares_a_run_with_its_plan_only(here: Path, capsys: Capsys) -> None:
    """Another plan in the same folder is not used, and a warning reports this."""
    report = run_of(files.read_plan("plan.yaml"))
    files.write("run.json", report)
    beside = call(capsys, "show", "run.json")
    assert (beside.code, beside.err) == (0, "")
    assert "predicted" in beside.out

    assert call(capsys, *SOLVE[:5], "--balance", "3,2").code == 0
    other = call(capsys, "show", "run.json")
    assert other.code == 0
    assert other.err.startswith("warning: plan.yaml is not the plan of this run")

    (here / "plan.yaml").unlink()
    alone = call(capsys, "show", "run.json")
    assert (alone.code, alone.err) == (0, "")
    assert "`--html` of a run report needs a plan" in call(capsys, "show", "run.json", "--html", "x").error
    assert json.loads(call(capsys, "show", "run.json", "--format", "json").out)["schema"] == "gpipe-plan/run/v1"


def test_show_writes_report_picture_and_trace_at_once(here: Path, capsys: Capsys) -> None:
    text = call(capsys, "show").out
    done = call(capsys, "show", "--html", "out/report.html", "--svg", "step.svg", "--trace", "step.json")
    assert (done.code, done.out) == (0, text)
    assert done.err == "wrote out/report.html\nwrote step.svg\nwrote step.json\n"
    assert (here / "out/report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (here / "step.svg").read_text(encoding="utf-8").startswith("<svg")
    assert json.loads((here / "step.json").read_text(encoding="utf-8"))["traceEvents"]
    assert call(capsys, "show", "profile.yaml", "--html", "profile.html", "-q").err == ""
    assert "Profile of model.py" in (here / "profile.html").read_text(encoding="utf-8")


def test_show_writes_at_most_one_file_to_stdout(here: Path, capsys: Capsys) -> None:
    done = call(capsys, "show", "--svg", "-")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("<svg")
    assert done.out.endswith("</svg>\n")
    before = visible(here)
    for arguments in (("--svg", "-", "--trace", "-"), ("--html", "-", "--format", "json")):
        assert call(capsys, "show", *arguments).code == 2
    assert call(capsys, "show", "--html", "a.html", "--svg", "profile.yaml/x.svg").code == 2
    assert visible(here) == before


def test_only_plans_have_a_timeline(here: Path, capsys: Capsys) -> None:
    """A profile gives a report, but no picture or trace; `--run` needs a plan."""
    for option in ("--svg", "--trace"):
        done = call(capsys, "show", "profile.yaml", option, "x")
        assert done.code == 2
        assert f"`{option}` of a profile needs a plan" in done.error
    assert "`--run` needs a plan" in call(capsys, "show", "profile.yaml", "--run", "run.json").error
    assert not (here / "x").exists()


def test_show_of_plan_and_of_run_write_the_same_report(here: Path, capsys: Capsys) -> None:
    """`show plan.yaml --run run.json` equals `show run.json`. A run of another plan is left out."""
    plan = files.read_plan("plan.yaml")
    files.write("run.json", run_of(plan))
    beside = call(capsys, "show", "--run", "run.json", "--html", "a.html")
    assert "predicted" in beside.out
    assert call(capsys, "show", "run.json", "--html", "b.html").code == 0
    page = (here / "a.html").read_text(encoding="utf-8")
    assert page == (here / "b.html").read_text(encoding="utf-8")
    assert "Median of 1 steps" in page

    (here / "profile.yaml").rename(here / "moved.yaml")
    alone = call(capsys, "show", "run.json", "--html", "c.html")
    assert alone.code == 0
    assert alone.err.startswith("warning: profile.yaml does not exist")
    assert call(capsys, "show", "run.json", "--profile", "moved.yaml", "--html", "c.html").err == "wrote c.html\n"
    (here / "moved.yaml").rename(here / "profile.yaml")

    assert call(capsys, *SOLVE[:5], "--balance", "3,2").code == 0
    other = call(capsys, "show", "--run", "run.json")
    assert (other.code, other.err) == (
        0,
        "warning: run.json belongs to another plan than plan.yaml and is ignored\n",
    )


@pytest.mark.slow
def test_show_prints_ascii_on_ascii_terminals(here: Path, capsys: Capsys) -> None:
    """Files stay UTF-8."""
    files.write("run.json", run_of(files.read_plan("plan.yaml")))
    plain = {"PYTHONIOENCODING": "ascii", "LANG": "C", "LC_ALL": "C", "NO_COLOR": "1"}
    for name in ("plan.yaml", "profile.yaml", "run.json"):
        shown = spawn(["show", name, "--html", "report.html"], here, **plain)
        assert shown.code == 0, shown.err
        assert shown.out.isascii()
        assert "\x1b" not in shown.out
        assert "·" in (here / "report.html").read_text(encoding="utf-8")


# Help, version, schema


@pytest.mark.parametrize("kind", ["profile", "plan", "balance", "run", "links", "calibration", "partial"])
def test_schema_prints_a_json_schema(capsys: Capsys, kind: str) -> None:
    done = call(capsys, "schema", kind)
    assert (done.code, done.err) == (0, "")
    schema = json.loads(done.out)
    assert schema["$schema"].startswith("https://json-schema.org/")
    assert schema["properties"]["schema"]["const"] == f"gpipe-plan/{kind}/v1"


def test_the_schema_line_for_editors_does_not_change_the_plan(here: Path, capsys: Capsys) -> None:
    """Use the command and the line of docs/file-formats.md."""
    ((typed, _),) = lines("docs/file-formats.md")
    (modeline,) = blocks("docs/file-formats.md", "yaml")
    asked, schema_file = typed.split(" > ")
    schema = json.loads(call(capsys, *asked.split()[1:]).out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"]["schema"]["const"] == "gpipe-plan/plan/v1"
    assert modeline == f"# yaml-language-server: $schema={schema_file}\n"
    before = files.read_plan("plan.yaml")
    Path("plan.yaml").write_text(modeline + Path("plan.yaml").read_text())
    assert files.read_plan("plan.yaml") == before
    assert call(capsys, "check").code == 0


def test_version_prints_package_python_and_torch(capsys: Capsys) -> None:
    done = call(capsys, "--version")
    assert (done.code, done.err) == (0, "")
    assert re.fullmatch(r"gpipe-plan \d+\.\d+\.\d+ \(python 3\.\d+\.\d+, torch 2\..*\)\n", done.out)


OPTIONS = {
    "profile-links": "--output --device --format --quiet",
    "profile": "--output --batch-sizes --batch --repeat --time-budget --device --optimizer --set --input --format",
    "solve": "--devices --mem --batch --micro-batches --recompute --link --reserve --calibration --balance",
    "emit": "--output --profile --launch --nodes --smaller --force --quiet",
    "verify": "--profile --steps --tolerance-time --tolerance-memory --calibration --format --quiet",
    "check": "--mem --device --headroom --against --strict --profile --format --quiet",
    "explain": "--format",
    "compare": "--format",
    "sweep": "--devices --mem --batch --schedule --recompute --link --headroom --time-limit --output --format",
    "show": "--plan --profile --run --html --svg --trace --format",
    "explore": "--output --profile --quiet --debug",
    "export": "CHECKPOINT --output --quiet --debug",
    "schema": "profile|plan|balance|run|links|calibration|partial",
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_option(capsys: Capsys, name: str, flag: str) -> None:
    done = call(capsys, name, flag)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: gpipe-plan {name} ")
    assert [option for option in OPTIONS[name].split() if option not in done.out] == []
    assert "\x1b" not in done.out


@pytest.mark.parametrize("width", [80, 120])
def test_help_lists_the_commands_with_whole_summaries(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    done = call(capsys, "--help")
    assert (done.code, done.err) == (0, "")
    assert "gpipe-plan solve --devices 8 --mem 8GB" in done.out
    assert width - 20 < max(map(len, done.out.splitlines())) <= width
    words = " ".join(re.sub(r"-\n +", "-", done.out).split())  # a line may be broken after a hyphen
    for name in COMMANDS:
        summary = re.split(r"(?<=\.)\s", call(capsys, name, "--help").out.split("\n\n")[1].strip(), maxsplit=1)[0]
        assert f"{name} {' '.join(summary.split())}" in words


def test_without_a_command_the_help_is_printed(capsys: Capsys) -> None:
    done = call(capsys)
    assert "Usage: gpipe-plan" in done.out + done.err
    assert "error:" not in done.err


def test_only_debug_prints_a_traceback(here: Path, capsys: Capsys) -> None:
    assert "Traceback" not in call(capsys, "check", "missing.yaml").err
    assert "Traceback (most recent call last)" in call(capsys, "check", "missing.yaml", "--debug").err


# Pipes and signals, in processes of their own

PIPED = (
    ("check",),
    (*SOLVE, "-o", "-"),
    ("--help",),
    *(
        pytest.param(arguments, marks=pytest.mark.nightly)
        for arguments in (("show",), ("show", "profile.yaml", "--format", "json"), SOLVE, ("emit",), ("schema", "plan"))
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize("arguments", PIPED, ids=" ".join)
@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_pipe_is_no_error(here: Path, arguments: tuple[str, ...], closed: str) -> None:
    """The same holds if the reader of `| head` has ended before the start."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, closed: write_end}
    process = subprocess.Popen(command(*arguments), cwd=here, env=environment(), text=True, **streams)
    os.close(write_end)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in (err or ""), "error" in (err or "")) == (0, False, False), err
    if closed == "stderr":
        assert out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash for `set -o pipefail`")
def test_exit_code_1_of_check_survives_a_pipe_to_head(here: Path) -> None:
    line = f"set -o pipefail; {shlex.join(command('check', '--mem', '1kB'))} | head -1"
    done = subprocess.run(
        ["bash", "-c", line], cwd=here, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout.startswith("GP101 error")
    assert "Traceback" not in done.stderr


SLOW = """
import time
class Slow(nn.Module):
    def forward(self, value):
        with open(".cache/forwards", "a") as file:
            file.write(".")
        time.sleep(0.02)
        return value
def build_model():
    return nn.Sequential(nn.Linear(8, 4), Slow())
"""


@pytest.fixture
def profiling(empty: Path) -> Iterator["subprocess.Popen[str]"]:
    """Start a process and wait until it is measuring."""
    write_model(empty, HEAD + SLOW + EXAMPLE + LOSS)
    process = subprocess.Popen(
        command("profile", "model.py", "--repeat", "500", "--proof-budget", "0s"),
        cwd=empty,
        env=environment(XDG_CACHE_HOME=known_executor(empty / ".cache")),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs, and so perhaps this test run, ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,  # noqa: PLW1509
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_ctrl_c_ends_profiling_and_keeps_the_measurements(empty: Path, profiling: "subprocess.Popen[str]") -> None:
    assert profiling.stderr.readline().startswith("profiling model.py")
    forwards = empty / ".cache" / "forwards"
    while not forwards.exists() or forwards.stat().st_size < 260:  # layers are being timed
        assert profiling.poll() is None
        time.sleep(0.05)
    profiling.send_signal(signal.SIGINT)
    out, err = profiling.communicate(timeout=60)
    assert (profiling.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert "bug" not in err
    assert err.endswith("wrote profile.yaml.partial; the same command continues from it\ninterrupted\n")
    assert visible(empty) == {"model.py", "profile.yaml.partial", ".cache"}
    assert files.read_partial("profile.yaml.partial").measurements


@pytest.mark.slow
def test_an_interrupted_profile_is_continued(empty: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """The partial file is removed at the end. A partial file of another optimizer is not used."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    command_line = ("profile", "model.py", *FAST)
    for options, message in (
        ((), "note: continuing from profile.yaml.partial"),
        (("--optimizer", "sgd"), "starting over"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(import_module("planner.profile.backends.measured"), "measure_times", interrupted)
            stopped = call(capsys, *command_line)
        assert (stopped.code, visible(empty)) == (130, {"model.py", "profile.yaml.partial"})
        assert stopped.err.endswith("wrote profile.yaml.partial; the same command continues from it\ninterrupted\n")
        assert "profile.yaml.partial is an unfinished profile" in call(capsys, "show", "profile.yaml.partial").error
        done = call(capsys, *command_line, *options)
        assert (done.code, visible(empty)) == (0, {"model.py", "profile.yaml"})
        assert message in done.err
        (empty / "profile.yaml").unlink()


def test_a_broken_partial_profile_is_refused_and_kept(empty: Path, capsys: Capsys) -> None:
    (empty / "profile.yaml.partial").write_text("schema: gpipe-plan/partial/v1\nwhat: 1\n")
    done = call(capsys, "profile", "model.py", *FAST)
    assert done.code == 2
    assert "profile.yaml.partial:1: error: `generator`: is missing" in done.err
    assert visible(empty) == {"model.py", "profile.yaml.partial"}


@pytest.mark.slow
def test_auto_sizes_are_powers_of_two_and_the_batch(empty: Path, capsys: Capsys) -> None:
    fast = ("--repeat", "2", "--time-budget", "0s")
    for options, sizes in (((), (1, 2, 4, 8)), (("--batch", "6"), (1, 2, 4, 6))):
        assert call(capsys, "profile", "model.py", *fast, *options).code == 0
        assert files.read_profile("profile.yaml").micro_batch_sizes == sizes


def test_an_interrupt_while_writing_keeps_the_old_plan(here, capsys, monkeypatch):
    before, names = (here / "plan.yaml").read_bytes(), visible(here)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    monkeypatch.setattr(os, "replace", interrupted)
    assert call(capsys, *SOLVE[:5], "--balance", "1,4").code == 130
    assert (here / "plan.yaml").read_bytes() == before
    assert visible(here) == names


def test_interrupts_give_exit_code_130(here: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "read_plan", interrupted)
    done: Ran = call(capsys, "check")
    assert done.code == ExitCode.INTERRUPTED == 130
    assert "Traceback" not in done.err
