"""Tests that terminals and CI runners never execute control characters from files."""

import contextlib
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from planner import files
from planner.cli.console import Console
from planner.cli.main import run
from planner.core.errors import FileError, PlannerError
from planner.core.values.printable import escape_unprintable, printable, printable_lines
from tests.support.cli import call
from tests.support.profiles import profile_of

NASTY = [
    "::error title=x::boo",
    " ::stop-commands::y",
    "##[error]z",
    "\x1b[31mred\x07",
    "a\u202eb\u2066c",
    "l\n::add-mask::q",
]
SOLVE = ("--devices", "2", "--mem", "8GB", "--batch", "2")


def unsafe(text: str) -> list[str]:
    """Return lines that a terminal or runner would execute."""
    return [
        line for line in text.split("\n") if not line.isprintable() or line.lstrip().startswith("::") or "##[" in line
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a profile with control characters in all free texts, and plans of it."""
    folder = tmp_path_factory.mktemp("finished")
    measured = profile_of([float(n + 1) for n in range(len(NASTY))], parameter_bytes=10**9, output_bytes=1000)
    layers = tuple(replace(layer, name=name) for layer, name in zip(measured.layers, NASTY, strict=True))
    model = replace(measured.model, source=f"{NASTY[0]}.py:{NASTY[3]}", settings=dict.fromkeys(NASTY, NASTY[4]))
    device = replace(measured.device, name=f"{NASTY[0]}{NASTY[3]}{NASTY[4]}")
    measured = replace(measured, layers=layers, model=model, device=device, optimizer=NASTY[1])
    common = ("--mem", "80GB", "--batch", "2")
    with contextlib.chdir(folder):
        files.write("p.yaml", measured)
        assert files.read_profile("p.yaml") == measured
        for name, devices in (("plan.yaml", "2"), ("other.yaml", "3")):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run(["solve", "p.yaml", "--devices", devices, *common, "-o", name, "--quiet"])
            assert (code, unsafe(out.getvalue() + err.getvalue())) == (0, [])
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: Path) -> Path:
    """Change to a copy of `finished`."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "p.yaml"),
        ("show", "plan.yaml"),
        ("show", "plan.yaml", "--format", "json"),
        ("solve", "p.yaml", "--devices", "2", "--mem", "80GB", "--batch", "2", "-o", "-"),
        ("solve", "p.yaml", "--devices", "2", "--mem", "80GB", "--explain", "--frontier", "-o", "x.yaml"),
        ("solve", "p.yaml", "--devices", "2", "--mem", "1GB", "--batch", "2"),
        ("solve", "p.yaml", "--devices", "2", "--mem", "80GB", "--together", f"{NASTY[0]},{NASTY[1]}x"),
        ("solve", "p.yaml", "--devices", "2", "--mem", NASTY[0]),
        ("solve", NASTY[3], "--devices", "2", "--mem", "8GB"),
        ("check", "plan.yaml", "--mem", "1GB"),
        ("check", "plan.yaml", "--mem", "1GB", "--format", "json"),
        ("check", "plan.yaml", "--mem", "1GB", "--format", "markdown"),
        ("check", "plan.yaml", "--against", "other.yaml"),
        ("check", "plan.yaml", "--format", NASTY[0]),
        ("compare", "plan.yaml", "other.yaml"),
        ("compare", "plan.yaml", "other.yaml", "--format", "markdown"),
        ("sweep", "p.yaml", "--devices", "1,2", "--mem", "80GB"),
        ("emit", "plan.yaml"),
        ("emit", "plan.yaml", "--format", "megatron"),
        ("emit", "plan.yaml", "--format", "device-map"),
        pytest.param(("verify", "plan.yaml"), marks=pytest.mark.nightly),
        (NASTY[0],),
        ("show", "broken.yaml"),
    ],
)
def test_commands_print_no_control_characters(folder, arguments, capsys):
    text = Path("plan.yaml").read_text().replace("schedule: gpipe", 'schedule: "gpipe\\n::error::x"')
    Path("broken.yaml").write_text(text)
    ran = call(capsys, *arguments)
    assert ran.out + ran.err
    assert unsafe(ran.out) == []
    assert unsafe(ran.err) == []
    assert "bug" not in ran.err


def test_each_finding_is_one_annotation(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = call(capsys, "check", "plan.yaml", "--mem", "1GB", "--format", "github")
    assert ran.code == 1
    lines = ran.out.splitlines()
    assert all(line.isprintable() for line in lines)
    assert {line.partition(" ")[0] for line in lines[:-1]} <= {"::error", "::warning", "::notice"}
    assert not lines[-1].startswith("::")


def test_written_files_have_no_control_characters(folder: Path) -> None:
    for name in ("p.yaml", "plan.yaml"):
        assert [line for line in Path(name).read_text().split("\n") if not line.isprintable()] == []
    assert json.loads(files.dump(files.read("p.yaml"), as_json=True))["layers"][2]["name"] == NASTY[2]


def test_later_lines_of_messages_are_indented(capsys: pytest.CaptureFixture[str]) -> None:
    Console(quiet=False).error(FileError("bad\nerror: not mine\n  more", path="a\nb", hint="do\nerror: this"))
    Console(quiet=False).error(PlannerError("one"))
    Console(quiet=False).warning("\x1b]0;title\x07")
    assert capsys.readouterr().err == (
        "a\n  b: error: bad\n  error: not mine\n  more\n\nhint: do\n  error: this\n"
        "error: one\nwarning: \\x1b]0;title\\x07\n"
    )
    assert printable("a::b\n") == r"a:\x3ab\n"
    assert printable_lines("::x") == r"\x3a:x"
    assert escape_unprintable("é…") == "é…"
