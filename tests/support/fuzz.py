"""A fuzzer: valid files of every kind and valid command lines, spoilt at random; whatever comes, an answer must follow.

Every input is made from one number alone, so a failure is repeated by its number: `python -m tests.support.fuzz 123`.
An answer is exit code 0, 1 or 2, within ten seconds of CPU time and a gigabyte, without a traceback or the word "bug".
"""

import io
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import FrameType

from planner.cli.main import run
from planner.core.errors import PlannerError
from tests.support.fuzz_stored import prepare, read_weights, spoilt_checkpoint, spoilt_weights

SEEDS = Path(__file__).parents[1] / "fuzz" / "seeds"
NUMBERS = SEEDS / "numbers.txt"
"""Inputs that something was wrong with once; they are tried first."""

LONGEST_S = 10
MOST_BYTES = 10**9

_VALUES = (
    *(
        "0",
        "-1",
        "1",
        "1e308",
        "1e-320",
        "-0.0",
        "nan",
        ".inf",
        "-Infinity",
        "9" * 30,
        "9" * 400,
        str(2**63),
        str(2**60),
    ),
    *("null", "true", "~", "[]", "{}", "''", "x", "[[[]]]", "{a: 1}", "'\\n'", '"\\ud800"', '"\\u202e"', '"\\0"', "*a"),
    *("&a [*a]", "!!python/object/apply:os.getcwd []", "!!binary AAAA", "? x", "1:30", "0x10", "1_000", "|", ">-"),
    *("::error::x", "../../x", "/dev/zero", "-", "--", "a" * 3000, "[" * 60, "%", "\x00", "\x85", "\u2028", "é", "😀"),
)
_OPTION_VALUES = (
    *("8GB", "1B", "0B", "80GB,1B", "auto", "1", "2", "3", "1,2,3", "25GB/s,5us", "5%", "100%", "60s", "4x8", "2x1"),
    *(
        "gpipe",
        "1f1b",
        "interleaved",
        "layers",
        "always",
        "json",
        "text",
        "github",
        "junit",
        "sarif",
        "markdown",
        "h100",
    ),
    *(
        "h.0,h.1",
        "profile.yaml",
        "plan.yaml",
        "other.yaml",
        "links.yaml",
        "balance.yaml",
        "calibration.yaml",
        "out.yaml",
    ),
    *("git:HEAD", "native", "megatron", "deepspeed", "torch", "torchgpipe", "torchtitan", "automodel"),
    *("device-map", "dp", "milp", "run.json"),
)
_READERS = ("show", "check", "compare", "solve", "emit", "sweep")
_OPTIONS_OF = """
show: plan profile run html svg trace format quiet
check: mem device headroom balance against profile format strict
compare: format
solve: devices mem batch micro-batches speed schedule chunks replicas recompute link links nodes inter-link allreduce
solve: overhead reserve calibration headroom balance together apart format frontier explain
solve: extrapolate output quiet
emit: output profile format force
sweep: devices mem batch micro-batches schedule recompute link reserve format output
explain: format
schema:
export: output
profile-links: device
verify: run steps tolerance-time tolerance-memory
profile: batch-sizes batch device dtype set input threads granularity repeat
"""
_OPTIONS: dict[str, list[str]] = {}
for _line in _OPTIONS_OF.strip().split("\n"):
    _name, _, _words = _line.partition(":")
    _OPTIONS.setdefault(_name, []).extend(f"--{_word}" for _word in _words.split())

_FLAGS = frozenset(f"--{name}" for name in ("quiet", "strict", "frontier", "explain", "extrapolate", "force"))


class TooLongError(BaseException):
    """An input took more than ten seconds."""


def fuzz(number: int, folder: Path) -> str | None:
    """Return a message on a wrong answer to an input, or None.

    Args:
        number: Number of the input.
        folder: An empty folder to work in; it is empty afterwards.
    """
    draw = random.Random(number)
    if number % 10 == 9:
        arguments = (
            spoilt_checkpoint(draw, folder) if draw.random() < 0.5 else ["weights", spoilt_weights(draw, folder)]
        )
    else:
        arguments = _input(draw, folder)
    with _inside(folder), _no_longer_than(LONGEST_S):
        problem = _answer(arguments)
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    return None if problem is None else f"input {number}: {' '.join(arguments)[:300]!r}: {problem}"


def campaign(inputs: int, first: int = 0, wrong: int = 20) -> tuple[int, list[str]]:
    """Run `inputs` numbers, first those that were wrong once.

    Returns:
        The number of inputs run, and the messages.
    """
    known = [int(line) for line in NUMBERS.read_text().split("\n") if line.strip() and line[0] != "#"]
    prepare()  # an alarm in the middle of an import of torch would spoil all that follows
    count, problems = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for number in _numbers(known, first):
            if count == inputs or len(problems) == wrong:
                break
            problem = fuzz(number, Path(folder))
            problems += [problem] if problem else []
            count += 1
    return count, problems


# Private functions


def _numbers(known: list[int], first: int) -> Iterator[int]:
    yield from known
    number = first
    while True:
        yield number
        number += 1


def _answer(arguments: list[str]) -> str | None:  # noqa: PLR0911 - one for each thing that may be wrong
    out, err = io.StringIO(), io.StringIO()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = run(arguments) if arguments[0] != "weights" else _weights(arguments[1])
    except TooLongError:
        return f"no answer within {LONGEST_S} s"
    except BaseException:  # whatever comes out of a command is what we are looking for
        return traceback.format_exc()
    said = err.getvalue()
    more_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if code not in (0, 1, 2):
        return f"exit code {code}: {said[-500:]}"
    if "Traceback" in said or "this is a bug" in said:
        return said[-800:]
    if code == 2 and "error: " not in said:
        return f"exit code 2 without an error: {said[-500:]}"
    if more_bytes > MOST_BYTES:
        return f"took {more_bytes / 1e9:.1f} GB"
    return None


def _weights(path: str) -> int:
    try:
        read_weights(path)
    except PlannerError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return 0


def _input(draw: random.Random, folder: Path) -> list[str]:
    seeds = {path.name: path.read_text(encoding="utf-8") for path in sorted(SEEDS.iterdir()) if path != NUMBERS}
    for name, text in seeds.items():
        (folder / name).write_text(text, encoding="utf-8")
    kind = draw.random()
    if kind < 0.6:
        name = draw.choice(sorted(seeds))
        spoilt = _spoilt(draw, seeds[name], list(seeds.values()))
        (folder / name).write_bytes(spoilt.encode("utf-8", "surrogatepass"))
        return _about(draw, name)
    return _command(draw, spoilt=kind < 0.95)


def _about(draw: random.Random, name: str) -> list[str]:
    """Return a command that reads a file."""
    command = draw.choice(_READERS)
    usual = {"solve": ["--devices", "2", "--mem", "8GB"], "compare": ["other.yaml"], "sweep": ["--mem", "8GB"]}
    arguments = [command, name, *usual.get(command, [])]
    if name.startswith(("links", "calibration", "balance")) and draw.random() < 0.6:
        return ["solve", "profile.yaml", "--devices", "2", "--mem", "8GB", f"--{name.partition('.')[0]}", name]
    if name.startswith("profile") and draw.random() < 0.3:
        return [draw.choice(("check", "show", "emit")), "plan.yaml", "--profile", name]
    if command == "check":
        arguments += ["--format", draw.choice(("text", "json", "github", "junit", "sarif", "markdown"))]
    if command == "show" and draw.random() < 0.5:
        arguments += [draw.choice(("--html", "--svg", "--trace")), "out.x"]
    return arguments


def _command(draw: random.Random, *, spoilt: bool) -> list[str]:
    command = draw.choice(sorted(_OPTIONS))
    arguments = [command]
    if command not in ("profile-links", "verify", "profile"):
        arguments += draw.sample(("profile.yaml", "plan.yaml", "other.yaml", "run.json", "GP101"), draw.randrange(3))
    if command == "solve" and draw.random() < 0.8:
        arguments += ["--devices", str(draw.randrange(1, 5)), "--mem", draw.choice(("8GB", "1MB", "10kB,1GB"))]
    for option in draw.sample(_OPTIONS[command], min(len(_OPTIONS[command]), draw.randrange(4))):
        arguments.append(option)
        if option not in _FLAGS:
            values = (*_VALUES, *_OPTION_VALUES) if spoilt else _OPTION_VALUES
            # No argument of a process holds a zero.
            arguments.append(draw.choice(values).replace("\x00", ""))
    if command in ("verify", "profile"):
        arguments.append("nothing.yaml")
    return arguments


def _spoilt(draw: random.Random, text: str, others: list[str]) -> str:
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        text = draw.choice(_WAYS)(draw, text, others)
    return text


def _other_value(draw: random.Random, text: str, _others: list[str]) -> str:
    places = list(re.finditer(r"(?<=[:\[,] )[^,\[\]{}\n]+", text))
    if not places:
        return text
    place = draw.choice(places)
    return text[: place.start()] + draw.choice(_VALUES) + text[place.end() :]


def _other_number(draw: random.Random, text: str, _others: list[str]) -> str:
    places = list(re.finditer(r"\d+(?:\.\d+)?", text))
    if not places:
        return text
    place = draw.choice(places)
    number = draw.choice(("0", "1", "-1", "2", "7", "1000000", str(10**12), str(2**60), "0.5", "1e18", place[0] + "0"))
    return text[: place.start()] + number + text[place.end() :]


def _lines(draw: random.Random, text: str, _others: list[str]) -> str:
    lines = text.split("\n")
    at = draw.randrange(len(lines))
    way = draw.randrange(4)
    if way == 0:
        del lines[at]
    elif way == 1:
        lines.insert(draw.randrange(len(lines)), lines[at])
    elif way == 2:
        lines[at] = " " * draw.randrange(1, 5) + lines[at]
    else:
        lines = lines[:at]
    return "\n".join(lines)


def _characters(draw: random.Random, text: str, _others: list[str]) -> str:
    at = draw.randrange(len(text) + 1)
    way = draw.randrange(3)
    if way == 0:
        return text[:at] + text[at + draw.randrange(1, 9) :]
    inserted = draw.choice("[]{}:,-&*!|>'\"%@`#?\n\t \x00\x7f\ud800é") * draw.choice((1, 1, 2, 40, 2000))
    return text[:at] + inserted + text[at + (way == 1) :]


def _splice(draw: random.Random, text: str, others: list[str]) -> str:
    other = draw.choice(others)
    return text[: draw.randrange(len(text) + 1)] + other[draw.randrange(len(other) + 1) :]


def _renamed(draw: random.Random, text: str, _others: list[str]) -> str:
    words = re.findall(r"[A-Za-z_][\w.-]*", text)
    return text.replace(draw.choice(words), draw.choice((*words, *_VALUES))) if words else text


_WAYS: tuple[Callable[[random.Random, str, list[str]], str], ...] = (
    *(_other_value,) * 4,
    *(_other_number,) * 4,
    *(_lines,) * 2,
    _characters,
    _splice,
    _renamed,
)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _no_longer_than(seconds: int) -> Iterator[None]:
    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        with tempfile.TemporaryDirectory() as place:
            sys.stdout.write(f"{fuzz(int(sys.argv[1]), Path(place))}\n")
    else:
        tried, found = campaign(int(sys.argv[2]), first=int(sys.argv[1]), wrong=500)
        sys.stdout.write("\n".join([f"{tried} inputs, {len(found)} wrong", *found, ""]))
