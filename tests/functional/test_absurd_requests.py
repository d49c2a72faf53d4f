"""Tests of absurd numbers in options and files: one message at once, exit code 2, and no unreadable output."""

import json
from pathlib import Path

import pytest

from planner import files
from planner.core.errors import FileError
from tests.support import gate
from tests.support.cli import call
from tests.support.clocks import limited_cpu_time

DIGITS = "9" * 400


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a profile of six layers."""
    monkeypatch.chdir(tmp_path)
    files.write("profile.yaml", gate.two_sizes())
    return tmp_path


@pytest.mark.timed
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--devices 2 --mem 8GB --batch 1000000000000", "`--batch 1000000000000`: at most 1000000000 samples"),
        ("--devices 2 --mem 8GB --batch 1000000000", "at most 16384 micro-batches"),
        ("--devices 2 --mem 8GB --batch 999999937", "at most 16384 micro-batches"),
        ("--devices 2 --mem 8GB --batch 1000000000 --extrapolate --micro-batches 1000000000", "at most 16384"),
        ("--devices 1000000000 --mem 8GB", "at most 65536 devices"),
        (f"--devices {2**63} --mem 8GB", "at most 65536 devices"),
        ("--nodes 100000x100000 --mem 8GB", "at most 65536 devices"),
        (f"--nodes {DIGITS}x8 --mem 8GB", "expected nodes times devices"),
        (f"--devices 2 --mem {DIGITS}GB", "not a quantity: `--mem 9999"),
        ("--devices 2 --mem 99999999999999999999GB", "too large to compute with"),
        (f"--devices {DIGITS} --mem 8GB", "at most 65536 devices"),
        ("--devices 2 --mem 8GB --speed 1e308", "a speed is from 1e-06 to 1e+06"),
        ("--devices 2 --mem 8GB --speed 1e-320", "a speed is from 1e-06 to 1e+06"),
        ("--devices 2 --mem 8GB --speed nan", "a speed is above 0"),
        ("--devices 2 --mem 8GB --link 0.0000000000000001B/s", "a rate is from 1 B/s"),
        ("--devices 2 --mem 8GB --overhead 99999999999999999999s", "too large to compute with"),
        (f"--devices 2 --mem 8GB --balance {DIGITS},1", "too large to compute with"),
        (f"--devices 2 --mem 8GB --micro-batches {DIGITS}", "too large to compute with"),
        (f"--devices 2 --mem 8GB --balance {','.join(['1'] * 20000)}", "adds up to 20000 layers"),
        ("--devices 65536 --mem 8GB", "65536 devices for 6 layers"),
        (f"--devices 2 --mem {','.join(['1GB'] * 20000)}", "20000 limits for 2 devices"),
        (f"--devices 2 --mem 8GB --replicas {DIGITS}", "too large to compute with"),
        (f"--devices 2 --mem 8GB --time-limit {DIGITS}s", "not a quantity"),
    ],
)
def test_absurd_options_give_one_short_message(options: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with limited_cpu_time(20):
        ran = call(capsys, "solve", *options.split())
    assert ran.code == 2, ran
    assert message in ran.error
    assert "bug" not in ran.err
    assert len(ran.err) < 1200
    assert not Path("plan.yaml").exists()


@pytest.mark.parametrize("options", ["--speed 1e6", "--speed 1e-6", "--link 1B/s", "--mem 1000PB"])
def test_values_at_the_ends_of_ranges_are_solved_and_checked(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--devices", "2"] if "--devices" not in options else []
    asked += ["--mem", "8GB"] if "--mem" not in options else []
    assert call(capsys, "solve", *asked, "--batch", "8", *options.split()).code == 0
    ran = call(capsys, "check")
    assert (ran.code, "error" in ran.err) == (0, False)


def test_absurd_numbers_in_files_name_their_key(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(capsys, "solve", "--devices", "2", "--mem", "8GB", "--batch", "8").code == 0
    text = Path("plan.yaml").read_text()
    for old, new, message in (
        ("bytes_per_s: 0.0", "bytes_per_s: 1e-320", "`inputs.link.bytes_per_s`: must be from 1 to 1e18"),
        ("devices: 2", "speeds: [1e-320, 1]\n  devices: 2", "speeds"),
        ("gap: 0.0", "gap: -Infinity", "expected a number"),
        ("gap: 0.0", "gap: -.inf", "expected a number"),
        ("micro_batches: ", "micro_batches: 99999", "micro-batches"),
    ):
        assert old in text, old
        Path("bad.yaml").write_text(text.replace(old, new))
        for command in ("check", "show"):
            ran = call(capsys, command, "bad.yaml")
            assert (ran.code, "bug" in ran.err) == (2, False), ran
            assert message in ran.err or "is not YAML" in ran.err
    run = {"schema": "gpipe-plan/run/v1", "plan_digest": "", "seed": 0, "losses": [], "step_us": [], "stages": []}
    Path("run.json").write_text(json.dumps(run))
    ran = call(capsys, "show", "run.json")
    assert (ran.code, "bug" in ran.err) == (2, False)
    Path("nul.yaml").write_text(text.replace("path: profile.yaml", 'path: "a\\0b"'))
    ran = call(capsys, "check", "nul.yaml")
    assert (ran.code, "bug" in ran.err) == (2, False), ran
    with pytest.raises(FileError):
        files.read("x" * 5000)
    sizes = Path("profile.yaml").read_text().replace("micro_batch_sizes: [1, 2]", f"micro_batch_sizes: [1, {2**60}]")
    Path("large.yaml").write_text(sizes)
    ran = call(capsys, "solve", "large.yaml", "--devices", "2", "--mem", "8GB", "-o", "x.yaml")
    assert (ran.code, "`micro_batch_sizes`: at most 1000000000 samples" in ran.err) == (2, True)


def test_huge_terminal_widths_are_limited(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from planner.show.terminal.style import style_for

    class Terminal:
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            raise OSError

    for columns, width in (("9" * 5000, 9999), ("100000", 9999), ("²", 80), ("0", 80), ("120", 120)):
        assert style_for(Terminal(), {"COLUMNS": columns}).width == width
