"""Tests of bad input: one message, exit code 2, no traceback, and no partly written output."""

import contextlib
import io
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.cli.main import run
from tests.support.cli import (
    BUILD,
    EXAMPLE,
    FAST,
    HEAD,
    LOSS,
    MODEL,
    Ran,
    call,
    no_calibration,
    write_model,
)
from tests.support.processes import Job
from tests.support.ranks import ForkedProcess, end_ranks, run_ranks

SAMPLE_MODELS = Path(__file__).parents[2] / "sample_models"
SOLVE = ("solve", "--devices", "2", "--mem", "8GB")

Capsys = pytest.CaptureFixture[str]

CLIPS = """
class build_optimizer(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0)
        super().step(closure)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write model.py, profile.yaml, plan.yaml (two stages), balance.yaml and train.py."""
    folder = tmp_path_factory.mktemp("finished")
    write_model(folder)
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.chdir(folder)
        no_calibration(patch)
        assert run(["profile", "model.py", "--repeat", "2", "--time-budget", "0s", "--batch-sizes", "2,4"]) == 0
        assert run([*SOLVE, "--balance", "2,3", "--batch", "8", "--micro-batches", "4"]) == 0
        assert run(["emit"]) == 0
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path) -> Path:
    """Change to a copy of `finished`."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    no_calibration(monkeypatch)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes | None]:
    """Return the content of all files in `folder`, except Python's caches."""
    entries = (entry for entry in folder.rglob("*") if "__pycache__" not in entry.parts)
    return {str(e.relative_to(folder)): e.read_bytes() if e.is_file() else None for e in entries}


def refused(capsys: Capsys, folder: Path, *arguments: str) -> Ran:
    """Run a command that must be refused, and check the properties of every refusal."""
    before = contents(folder)
    done = call(capsys, *arguments)
    assert done.code == 2, done
    assert done.out == ""
    assert "Traceback" not in done.err
    assert "bug in gpipe-plan" not in done.err, done.err
    assert len(done.error.splitlines()) == 1, done.err
    assert contents(folder) == before
    return done


# Files

READERS = [
    pytest.param("profile.yaml", SOLVE, id="profile.yaml-solve"),
    pytest.param("profile.yaml", ("show", "profile.yaml"), id="profile.yaml-show"),
    pytest.param("profile.yaml", ("check",), id="profile.yaml-check"),
    pytest.param("plan.yaml", ("check",), id="plan.yaml-check"),
    pytest.param("plan.yaml", ("emit",), id="plan.yaml-emit"),
    pytest.param("plan.yaml", ("show",), id="plan.yaml-show"),
]


def _delete(path: Path) -> None:
    path.unlink()


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _becomes(content: bytes) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_bytes(content)

    return change


def _append(text: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.write_text(path.read_text() + text)

    return change


def _replace(pattern: str, new: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        changed, count = re.subn(pattern, new, path.read_text(), count=1)
        assert count == 1, pattern
        path.write_text(changed)

    return change


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments"), READERS)
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        pytest.param(_delete, "no such file", id="missing"),
        pytest.param(_folder, "is a directory", id="directory"),
        pytest.param(_becomes(b""), "is empty", id="empty"),
        pytest.param(_becomes(b"\n  \n"), "is empty", id="blank"),
        pytest.param(_becomes(b"\xff\xfe\x00\x01"), "is not UTF-8", id="binary"),
        pytest.param(_becomes(b"just a line\n"), "`schema`", id="text"),
        pytest.param(_becomes(b"- 1\n- 2\n"), "`schema`", id="list"),
        pytest.param(_becomes(b"{a: [1, 2\n"), "is not YAML", id="truncated"),
        pytest.param(_replace(r"/v1\b", "/v2"), "/v2", id="other-version"),
        pytest.param(_replace(r"schema: .*", "schema: 7"), "`schema`", id="schema-no-text"),
        pytest.param(_append("colour: blue\n"), "`colour`", id="unknown-key"),
        pytest.param(_append("schema: gpipe-plan/plan/v1\n"), "`schema` is defined twice", id="key-twice"),
    ],
)
def test_messages_on_unreadable_files_begin_with_the_file_name(here, capsys, *, name, arguments, spoil, message):
    spoil(here / name)
    done = refused(capsys, here, *arguments)
    assert re.match(rf"{re.escape(name)}(:\d+)?: error: ", done.error), done.error
    assert message in done.error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "spoil", "key", "message"),
    [
        ("profile.yaml", _replace(r"saved_bytes: \[\d+", "saved_bytes: [-5"), "layers[0].saved_bytes[0]", "-5"),
        ("profile.yaml", _replace(r"buffer_bytes: \d+", "buffer_bytes: -1"), "layers[0].buffer_bytes", "-1"),
        ("profile.yaml", _replace(r"forward_us: \[[\d.]+", "forward_us: [NaN"), "layers[0].forward_us[0]", "NaN"),
        ("profile.yaml", _replace(r"forward_us: \[[\d.]+", "forward_us: [.nan"), "layers[0].forward_us[0]", ".nan"),
        ("profile.yaml", _replace(r"forward_us: \[[\d.]+", "forward_us: [1e999"), "layers[0].forward_us[0]", "1e999"),
        ("profile.yaml", _replace(r"parameter_bytes: \d+", "parameter_bytes: 7.5"), "layers[0].parameter_bytes", "7.5"),
        ("profile.yaml", _replace(r"parameter_bytes: \d+", "parameter_bytes: 7GB"), "layers[0].parameter_bytes", "7GB"),
        ("profile.yaml", _replace(r"name: '1'", "name: '0'"), "layers[1].name", '"0" is already layer 0'),
        ("profile.yaml", _replace(r"name: '1', ", ""), "layers[1].name", "is missing"),
        ("profile.yaml", _replace(r"forward_us: \[[\d.]+, ", "forward_us: ["), "layers[0].forward_us", "got 1"),
        ("profile.yaml", _replace(r"buffer_bytes:", "bufer_bytes:"), "layers[0].bufer_bytes", "unknown key"),
        ("profile.yaml", _replace(r"micro_batch_sizes: \[2,", "micro_batch_sizes: [0,"), "micro_batch_sizes", "0"),
        ("plan.yaml", _replace(r"balance: \[2, 3\]", "balance: [2, -3]"), "balance[1]", "-3"),
        ("plan.yaml", _replace(r"balance: \[2, 3\]", "balance: [2, x]"), "balance[1]", "x"),
        ("plan.yaml", _replace(r"balance: \[2, 3\]", "balance: [2, 2, 1]"), "stages", "3"),
        ("plan.yaml", _replace(r"micro_batches: 4", "micro_batches: 3"), "micro_batches", "not the batch of 8"),
        ("plan.yaml", _replace(r"micro_batches: 4", "micro_batches: 0"), "micro_batches", "at least 1"),
        ("plan.yaml", _replace(r"recompute: never, f", "recompute: maybe, f"), "stages[0].recompute", "never"),
        ("plan.yaml", _replace(r"total: \d+", "total: -1"), "stages[0].memory.total", "-1"),
        ("plan.yaml", _replace(r"step_us: [\d.]+", "step_us: .inf"), "predicted.step_us", ".inf"),
        ("plan.yaml", _replace(r"devices: 2", "devices: 3"), "inputs.memory_bytes", "3 memory limits"),
        ("plan.yaml", _replace(r"devices: 2", "devices: true"), "inputs.devices", "true"),
    ],
)
def test_messages_on_invalid_values_name_file_line_and_key(here, capsys, *, name, spoil, key, message):
    was = (here / name).read_text().splitlines()
    spoil(here / name)
    now = (here / name).read_text().splitlines()
    changed = next(n for n, (a, b) in enumerate(zip(was, now, strict=True), 1) if a != b)
    done = refused(capsys, here, "show", name)
    placed = re.match(rf"{re.escape(name)}:(\d+): error: `([^`]*)`: ", done.error)
    assert placed is not None, done.error
    assert placed[2] == key
    assert message in done.error
    line = int(placed[1])
    # "stages" and "memory_bytes" are valid, but contradict another line.
    assert line == changed or key in ("stages", "inputs.memory_bytes")
    assert key.rpartition(".")[2].partition("[")[0] in now[line - 1] or message == "is missing"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("solve", "plan.yaml", *SOLVE[1:]), "is a plan, a profile is needed"),
        (("check", "profile.yaml"), "is a profile, a plan is needed"),
        (("emit", "balance.yaml"), "is a balance, a plan is needed"),
        (("check", "--profile", "plan.yaml"), "is a plan, a profile is needed"),
        (("show", "balance.yaml"), "balance"),
        (("show", "model.py"), "model.py"),
    ],
)
def test_a_plan_is_refused_as_profile(here: Path, capsys: Capsys, arguments: tuple[str, ...], message: str) -> None:
    done = refused(capsys, here, *arguments)
    assert message in done.error
    assert "hint: " in done.err


def test_empty_or_binary_stdin_is_an_input_error(here: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert refused(capsys, here, "check", "-").error.startswith("standard input: error: is empty")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe"), encoding="utf-8"))
    assert refused(capsys, here, "check", "-").error.startswith("standard input: error: ")


@pytest.mark.parametrize(
    "arguments",
    [SOLVE, ("profile", "model.py", *FAST), ("emit",)],
    ids=lambda value: value[0],
)
@pytest.mark.parametrize("output", ["model.py/inside.yaml", "x" * 300], ids=["under a file", "name too long"])
def test_unwritable_outputs_are_named_and_leave_no_files(here, capsys, arguments, output):
    done = refused(capsys, here, *arguments, "-o", output)
    assert done.error.startswith(output)
    assert ": error: cannot be written: " in done.error


@pytest.mark.parametrize("arguments", [SOLVE, ("profile", "model.py", *FAST)], ids=lambda value: value[0])
def test_a_folder_as_output_is_refused(here: Path, capsys: Capsys, arguments: tuple[str, ...]) -> None:
    assert refused(capsys, here, *arguments, "-o", ".").error.startswith(".: error: is a directory")


# Options


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("solve", "--devices", "2", "--mem", "8"), ["`--mem 8`", "has no unit"]),
        (("solve", "--devices", "2", "--mem", "banana"), ["`--mem banana`"]),
        (("solve", "--devices", "2", "--mem", "8XB"), ["`--mem 8XB`", "unknown unit `XB`"]),
        (("solve", "--devices", "2", "--mem", "-8GB"), ["`--mem -8GB`"]),
        (("solve", "--devices", "2", "--mem", "8GB,8GB,8GB"), ["3 limits for 2 devices"]),
        (("solve", "--devices", "2", "--mem", ""), ["`--mem `"]),
        (("solve", "--devices", "2"), ["the memory of its device"]),
        (("solve", "--devices", "0", "--mem", "8GB"), ["--devices 0", "at least 1"]),
        (("solve", "--devices", "-1", "--mem", "8GB"), ["--devices -1", "at least 1"]),
        (("solve", "--devices", "two", "--mem", "8GB"), ["--devices", "integer"]),
        (("solve", "--devices", "2.5", "--mem", "8GB"), ["--devices", "integer"]),
        (("solve", "--devices", "6", "--mem", "8GB"), ["6 devices for 5 layers"]),
        (("solve", "--mem", "8GB"), ["the number of devices is missing"]),
        ((*SOLVE, "--batch", "7"), ["batch of 7", "none is within the profiled sizes 2, 4"]),
        ((*SOLVE, "--batch", "0"), ["--batch 0"]),
        ((*SOLVE, "--batch", "-8"), ["--batch -8"]),
        ((*SOLVE, "--batch", "8", "--micro-batches", "3"), ["batch of 8", "3 equal micro-batches"]),
        ((*SOLVE, "--micro-batches", "0"), ["--micro-batches 0"]),
        ((*SOLVE, "--micro-batches", "many"), ["--micro-batches many"]),
        ((*SOLVE, "--micro-batches", "4,2"), ["--micro-batches 4,2"]),
        ((*SOLVE, "--balance", "2,2"), ["[2, 2]", "4 layers"]),
        ((*SOLVE, "--balance", "5,0"), ["--balance 5,0"]),
        ((*SOLVE, "--balance", "2,1,2"), ["3 stages need 3 devices"]),
        ((*SOLVE, "--balance", "2;3"), ["--balance 2;3"]),
        ((*SOLVE, "--link", "5"), ["`--link 5`", "has no unit"]),
        ((*SOLVE, "--link", "5GB"), ["`--link 5GB`"]),
        ((*SOLVE, "--link", "0GB/s"), ["a rate must not be zero: `--link 0GB/s`"]),
        ((*SOLVE, "--link", "5GB/s,5"), ["a time is needed, `--link 5GB/s,5` has no unit"]),
        ((*SOLVE, "--link", "5GB/s,5us,sometimes"), ["`sometimes`"]),
        ((*SOLVE, "--overhead", "1"), ["`--overhead 1`"]),
        ((*SOLVE, "--batch", "x"), ["`--batch x`: expected an integer"]),
        ((*SOLVE, "--links", "l.yaml", "--link", "1GB/s"), ["`--links l.yaml`", "`--link 1GB/s`"]),
        ((*SOLVE, "--links", "l.yaml", "--inter-link", "1GB/s"), ["`--links l.yaml`", "`--inter-link 1GB/s`"]),
        (("solve", "--nodes", "2x1", "--links", "l.yaml"), ["`--links l.yaml`", "`--nodes 2x1`"]),
        ((*SOLVE, "--reserve", "1"), ["`--reserve 1`"]),
        ((*SOLVE, "--headroom", "5"), ["`--headroom 5`"]),
        ((*SOLVE, "--headroom", "100%"), ["`--headroom 100%`"]),
        ((*SOLVE, "--recompute", "sometimes"), ["--recompute sometimes"]),
        ((*SOLVE, "--format", "xml"), ["--format xml"]),
        (("check", "--format", "xml"), ["--format xml"]),
        (("check", "--mem", "8"), ["`--mem 8`"]),
        (("check", "--mem", "8GB,8GB,8GB"), ["3 limits for 2 devices"]),
        (("check", "--headroom", "lots"), ["`--headroom lots`"]),
        (("show", "--format", "xml"), ["--format xml"]),
        (("profile", "model.py", "--format", "xml"), ["--format xml"]),
        (("schema", "pictures"), ["`pictures`"]),
        (("schema",), ["missing argument"]),
        (("profile",), ["the argument MODEL is missing"]),
        (("check", "a.yaml", "b.yaml"), ["b.yaml"]),
        (("bake",), ["no such command", "bake"]),
        (("check", "--frobnicate"), ["no such option", "--frobnicate"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_usage_names_the_option_or_value(here, capsys, arguments, message):
    done = refused(capsys, here, *arguments)
    assert done.error.startswith("error: ")
    assert [part for part in message if part not in done.error.replace("'", "`")] == [], done.error


def test_refusals_list_valid_values(here: Path, capsys: Capsys) -> None:
    """The hint lists valid numbers of micro-batches, or the formats."""
    for arguments, hint in (
        ((*SOLVE, "--batch", "8", "--micro-batches", "3"), "one of 1, 2, 4, 8"),
        ((*SOLVE, "--format", "xml"), "one of text, json"),
        (("solve", "--devices", "6", "--mem", "8GB"), "`--devices 5` or fewer"),
        ((*SOLVE, "--batch", "7"), "`--batch-sizes`"),
        (("solve", "--devices", "2", "--mem", "8"), "8GB"),
        (("bake",), "gpipe-plan --help"),
    ):
        assert hint in refused(capsys, here, *arguments).err.partition("hint: ")[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch-sizes", "0,1"), ["--batch-sizes 0,1"]),
        (("--batch-sizes", "1;2"), ["--batch-sizes 1;2"]),
        (("--batch-sizes", ""), ["--batch-sizes"]),
        (("--device", "npu"), ["`npu`"]),
        (("--device", "tpu:v1"), ["tpu"]),
        (("--device", "cpu:banana"), ["cpu:banana"]),
        (("--optimizer", "magic"), ["`magic`"]),
        (("--repeat", "1"), ["--repeat 1"]),
        (("--threads", "0"), ["--threads 0"]),
        (("--time-budget", "60"), ["`--time-budget 60`", "has no unit"]),
        (("--batch", "0"), ["--batch 0"]),
        (("--batch", "8", "--batch-sizes", "1,2"), ["`--batch 8` and `--batch-sizes 1,2`"]),
        (("--set", "depth=3"), ["`depth`"]),
        (("--set", "width"), ["--set width"]),
        (("--set", "width=wide"), ["--set width=wide", "integer"]),
        (("--set", "width=7.5"), ["--set width=7.5", "integer"]),
    ],
    ids=" ".join,
)
def test_bad_options_of_profile_are_refused_before_measuring(here, capsys, options, message):
    done = refused(capsys, here, "profile", "model.py", *options)
    assert [part for part in message if part not in done.error] == [], done.error


@pytest.mark.slow
@pytest.mark.parametrize(("text", "right"), [("x=maybe", False), ("x=TRUE", True), ("x=false", True)])
def test_boolean_settings_accept_only_true_and_false(here: Path, capsys: Capsys, *, text: str, right: bool) -> None:
    write_model(here, HEAD + BUILD.replace("width: int = 16", "width: int = 16, x: bool = True") + EXAMPLE + LOSS)
    if right:
        assert call(capsys, "profile", "model.py", *FAST, "--proof-budget", "0s", "--set", text).code == 0
    else:
        assert "true or false" in refused(capsys, here, "profile", "model.py", *FAST, "--set", text).error


@pytest.mark.parametrize(
    "shape",
    ["banana", "", "3x", "-1", "0x-3", "8:floaty", "8:int64:0", "8:int64:-5", "8:int64:many", "8:complex64", "8:a:2:b"],
)
@pytest.mark.parametrize("position", ["first", "second"])
def test_bad_input_shapes_are_named_with_an_example(here: Path, capsys: Capsys, shape: str, position: str) -> None:
    write_model(here, HEAD + BUILD + LOSS)
    shapes = [shape] if position == "first" else ["8", shape]
    options = [word for text in shapes for word in ("--input", text)]
    done = refused(capsys, here, "profile", "model.py", *FAST, *options)
    assert f"--input {shape}" in done.error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--inter-link", "1GB/s"), "`--inter-link` has no effect without `--nodes`"),
        (("--allreduce", "1GB/s"), "`--allreduce` has no effect with one replica"),
        (("--shard-optimizer",), "`--shard-optimizer` has no effect with one replica"),
        (("--schedule", "gpipe", "--simplest", "2%"), "`--simplest` has no effect with `--schedule gpipe`"),
        (("--balance", "2,3", "--solver", "milp"), "`--solver milp` has no effect with `--balance`"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_options_without_effect_are_noted(here: Path, capsys: Capsys, options: tuple[str, ...], message: str) -> None:
    done = call(capsys, *SOLVE, *options, "--output", "other.yaml")
    assert done.code == 0
    assert f"note: {message}" in done.err
    done = call(capsys, *SOLVE, "--replicas", "2", "--allreduce", "1GB/s", "--output", "other.yaml")
    assert "no effect" not in done.err


def test_a_sweep_into_a_file_is_refused_before_the_search(here: Path, capsys: Capsys) -> None:
    done = refused(capsys, here, "sweep", "--devices", "2", "--mem", "8GB", "-o", "plan.yaml")
    assert "a folder of this path is a file" in done.error
    assert "solving" not in done.err


@pytest.mark.parametrize(
    ("path", "message"),
    [("plan.yaml", "is a file"), ("nothing", "no such folder"), (".", "the folder has no checkpoint")],
)
def test_exports_without_a_checkpoint_say_what_the_path_is(here: Path, capsys: Capsys, path: str, message: str) -> None:
    done = refused(capsys, here, "export", path)
    assert done.error == f"{path}: error: {message}"
    assert "hint: give a checkpoint" in done.err


# Model files

BODY = BUILD + EXAMPLE + LOSS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            HEAD + "raise ValueError('too bad')\n", "bad.py:3: importing it raised ValueError: too bad", id="raises"
        ),
        pytest.param("import nowhere_to_be_found\n", "nowhere_to_be_found", id="import"),
        pytest.param("def build_model(:\n", "SyntaxError", id="syntax"),
        pytest.param("x = 1\n\x00", "bad.py", id="null-byte"),
        pytest.param("raise SystemExit(0)\n", "SystemExit", id="exits"),
        pytest.param(
            "import sys\nsys.exit('enough')\n", "bad.py:2: importing it raised SystemExit: enough", id="sys-exit"
        ),
        pytest.param("", "no model", id="empty"),
        pytest.param(HEAD + EXAMPLE, "no model", id="no-model"),
        pytest.param(
            HEAD + "class A(nn.ReLU): pass\nclass B(nn.ReLU): pass\n",
            "2 modules that could be the model (`A`, `B`)",
            id="two",
        ),
        pytest.param(HEAD + BUILD + LOSS, "no `example_batch(batch_size)`", id="no-example"),
        pytest.param(MODEL + "def build_model(): raise KeyError('x')\n", "`build_model()` raised KeyError", id="build"),
        pytest.param(MODEL + "def build_model(): raise SystemExit(0)\n", "SystemExit", id="build-exits"),
        pytest.param(MODEL + "def build_model(): return 42\n", "returned int, not an nn.Module", id="no-module"),
        pytest.param(MODEL + "def build_model(): return None\n", "returned NoneType", id="none"),
        pytest.param(MODEL + "def build_model(size): return None\n", "size", id="required-argument"),
        pytest.param(MODEL + "build_model = 42\n", "`build_model`", id="build-is-a-number"),
        pytest.param(HEAD + EXAMPLE + "model = 42\n", "`model`", id="model-is-a-number"),
        pytest.param(MODEL + "def build_model(): return nn.Sequential()\n", "empty nn.Sequential", id="no-layers"),
        pytest.param(MODEL + "def build_model(): return nn.Linear(8, 4)\n", "(Linear) cannot be cut", id="one-layer"),
        pytest.param(
            MODEL + "def build_model(): return nn.Sequential(nn.LazyLinear(4))\n", 'layer "0"', id="lazy-layer"
        ),
        pytest.param(MODEL + "example_batch = 42\n", "`example_batch`", id="example-is-a-number"),
        pytest.param(MODEL + "def example_batch(n): raise OSError('no data')\n", "no data", id="example-raises"),
        pytest.param(MODEL + "def example_batch(n): return torch.randn(n, 8)\n", "returned Tensor", id="no-targets"),
        pytest.param(MODEL + "def example_batch(n): return 1, 2, 3\n", "a tuple of 3", id="three"),
        pytest.param(
            MODEL + "def example_batch(n): return torch.randn(3, 8), torch.randn(n, 4)\n", "[3, 8]", id="wrong-size"
        ),
        pytest.param(
            MODEL + "def example_batch(n): return torch.randn(n, 9), None\n", 'layer "0" (Linear)', id="shape"
        ),
        pytest.param(MODEL + "def loss_fn(output, target): return output\n", "expected a scalar", id="loss-no-scalar"),
        pytest.param(MODEL + "def loss_fn(output, target): return 0.5\n", "float, expected a scalar", id="loss-float"),
        pytest.param(MODEL + "def loss_fn(output, target): raise OSError('x')\n", "`loss_fn", id="loss-raises"),
        pytest.param(MODEL + "def loss_fn(output): return output.mean()\n", "`loss_fn", id="loss-one-argument"),
        pytest.param(MODEL + "loss_fn = 42\n", "`loss_fn", id="loss-is-a-number"),
        pytest.param(MODEL + "def build_optimizer(p): raise OSError('x')\n", "`build_optimizer", id="optimizer-raises"),
        pytest.param(MODEL + "def build_optimizer(p): return None\n", "`build_optimizer", id="optimizer-is-none"),
        pytest.param(MODEL + "build_optimizer = 42\n", "`build_optimizer", id="optimizer-is-a-number"),
        pytest.param(MODEL + "build_optimizer = torch.optim.LBFGS\n", "LBFGS needs a closure", id="optimizer-closure"),
        pytest.param(MODEL + CLIPS, "reads all parameters in `step()`", id="optimizer-clips"),
        pytest.param(
            HEAD
            + "class Out(nn.Module):\n    def forward(self, x): raise SystemExit(0)\n"
            + "def build_model(): return nn.Sequential(nn.Linear(8, 4), Out())\n"
            + EXAMPLE,
            'layer "1" (Out)',
            id="layer-exits",
        ),
    ],
)
def test_errors_of_the_model_file_are_reported_as_user_errors(
    here: Path, capsys: Capsys, text: str, message: str
) -> None:
    write_model(here, text, name="bad.py")
    done = refused(capsys, here, "profile", "bad.py", *FAST)
    assert message in done.error


HALVED = """
class Out(nn.Linear):
    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            return super().forward(x)
def build_model(): return nn.Sequential(nn.Linear(8, 4), Out(4, 4))
"""


def test_an_error_that_torch_raises_in_the_models_backward_is_no_bug(here: Path, capsys: Capsys) -> None:
    write_model(here, HEAD + HALVED + EXAMPLE + LOSS, name="bad.py")
    done = refused(capsys, here, "profile", "bad.py", "--batch-sizes", "1,2", "--dtype", "bf16-mixed")
    assert "error: the stages cannot be compared with the model in a plain loop: RuntimeError: expected m" in done.err
    assert "under `torch.autocast`" in done.err


@pytest.mark.slow
def test_a_loss_fn_with_input_needs_targets(here: Path, capsys: Capsys) -> None:
    """`--input` gives no targets, so the `loss_fn` of the file cannot be called."""
    write_model(here, HEAD + BUILD + LOSS, name="bad.py")
    assert "`loss_fn" in refused(capsys, here, "profile", "bad.py", *FAST, "--input", "8").error


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.py", "missing.py: error: no such file"),
        (".", ".: error: has no config.json"),
        ("profile.yaml", "profile.yaml: error: is not a Python file"),
        ("model.py:nothing", "model.py has no `nothing`"),
        ("model.py:torch", "torch"),
        ("model.py:", "model.py"),
    ],
)
def test_invalid_model_arguments_are_named(here: Path, capsys: Capsys, source: str, message: str) -> None:
    """The file is missing, a folder or no Python; or the entry is missing or no model."""
    assert message in refused(capsys, here, "profile", source, *FAST).error


def test_settings_for_a_model_instance_are_refused(here: Path, capsys: Capsys) -> None:
    write_model(here, HEAD + "model = nn.Sequential(nn.Linear(8, 4))\n" + EXAMPLE, name="bad.py")
    assert "takes no `--set width" in refused(capsys, here, "profile", "bad.py", "--set", "width=3").error


_NOISY = """
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    def forward(self, value):
        noise = value.clone().normal_()
        for layer in self.layers:
            value = layer(value + noise)
        return value + noise
def build_model(): return Noisy()
"""


def test_models_without_cuts_report_where_and_why(here: Path, capsys: Capsys) -> None:
    """All layers share noise that is drawn into a tensor that depends on the input, so every stage would draw it."""
    write_model(here, MODEL + _NOISY, name="bad.py")
    done = refused(capsys, here, "profile", "bad.py", *FAST)
    assert 'the model (Noisy) cannot be cut: after "layers.0": random numbers are drawn' in done.error
    assert refused(capsys, here, "profile", "bad.py", "--granularity", "tiny").error.startswith(
        "error: unknown `--granul"
    )


# The emitted script


def _refused(folder: Path, message: str, *arguments: str) -> None:
    """Run the script as one rank, and check its exit code and message."""
    done = end_ranks(1, arguments, folder)
    assert done.codes == (2,), done
    assert re.search(message, done.output), done.output
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_the_script_refuses_a_wrong_number_of_processes(here: Path) -> None:
    """Report the right command in one message, also if several processes are started."""
    out, err = here / "alone.out", here / "alone.err"
    arguments = ["train.py", "--steps", "1", "--report", "run.json"]
    code = ForkedProcess(arguments, here, out=out, err=err).wait()
    alone = Ran(code, out.read_text(), err.read_text())
    assert (alone.code, alone.out) == (2, "")
    assert alone.error == "error: the plan needs 2 processes (2 stages), but 1 process was started"
    assert "torchrun --nproc-per-node 2 train.py" in alone.err
    assert "Traceback" not in alone.err

    with Job(3, arguments, here) as job:
        three = job.ended()
    assert 0 not in three.codes
    assert three.err.count("error: the plan needs 2 processes (2 stages), but 3 processes were started") == 1
    assert not (here / "run.json").exists()


@pytest.mark.slow
def test_ranks_with_different_balances_are_refused(here: Path, capsys: Capsys) -> None:
    """One machine still has the files of an earlier plan. The error is reported once, before any step."""
    assert call(capsys, "emit", "-o", "other").code == 0
    balance = here / "other/balance.yaml"
    balance.write_text(balance.read_text().replace("micro_batches: 4", "micro_batches: 2"))
    choose = "import os, runpy; runpy.run_path('other/' * int(os.environ['RANK']) + 'train.py', run_name='__main__')"
    (here / "both.py").write_text(choose)
    with pytest.raises(AssertionError) as failed:
        run_ranks(2, ["both.py", "--steps", "1", "--report", "run.json"], here)
    said = str(failed.value)
    assert said.count("error: rank 1 has another balance.yaml (sha256:") == 1
    assert "Traceback" not in said
    assert "step 0" not in said
    assert not (here / "run.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nn.Linear(width, 4)", "nn.Linear(width, 4), nn.ReLU()", "the plan has 5"),
        ("width: int = 16", "width: int = 17", "the model has changed since it was planned"),
        ("def build_model", "def build_other", "no `build_model`"),
    ],
    ids=["one layer more", "another width", "gone"],
)
def test_the_script_refuses_a_changed_model(here: Path, capsys: Capsys, old: str, new: str, message: str) -> None:
    """The model has more layers, other shapes or no entry."""
    assert call(capsys, "solve", "--devices", "1", "--mem", "8GB", "-o", "one.yaml").code == 0
    assert call(capsys, "emit", "one.yaml", "-o", "one").code == 0
    write_model(here, MODEL.replace(old, new))
    _refused(here, message, "one/train.py", "--steps", "1", "--report", "run.json")
    assert not (here / "run.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--steps", "0"), "--steps"), (("--stepz", "3"), "--stepz"), (("--seed", "x"), "--seed")],
)
def test_the_script_refuses_bad_options(here: Path, arguments: tuple[str, ...], message: str) -> None:
    _refused(here, message, "train.py", *arguments)


@pytest.mark.slow
def test_the_script_names_file_line_and_key_of_a_broken_balance(here: Path) -> None:
    balance = here / "balance.yaml"
    balance.write_text(balance.read_text().replace("micro_batches: 4", "micro_batches: four"))
    _refused(here, r"balance\.yaml:\d+: .*micro_batches", "train.py")


def test_unwritable_outputs_are_reported_before_loading_the_model(tmp_path: Path, capsys: Capsys) -> None:
    """Loading this model would raise."""
    (tmp_path / "model.py").write_text("raise SystemExit('loaded')\n")
    (tmp_path / "out").mkdir()
    assert run(["profile", str(tmp_path / "model.py"), "-o", str(tmp_path / "out")]) == 2
    assert "is a directory" in capsys.readouterr().err


def test_a_loss_without_gradient_is_refused(tmp_path: Path, capsys: Capsys) -> None:
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build_model(): return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))\n"
        "def example_batch(n): return torch.randn(n, 4), torch.randn(n, 2)\n"
        "def loss_fn(output, target): return (output.detach() - target).square().mean()\n"
    )
    assert run(["profile", str(tmp_path / "model.py"), "-o", str(tmp_path / "profile.yaml")]) == 2
    assert "the loss carries no gradient" in capsys.readouterr().err
    assert not (tmp_path / "profile.yaml").exists()
