"""Other releases of torch, each in an environment of its own: a row of docs/measurements/torch-versions.md.

    make matrix TORCH=2.15.0
    python benchmarks/torch_versions.py 2.15.0 --write
    python benchmarks/torch_versions.py 2.13.0 --with numpy==1.26.4 --only memory,profile
    python benchmarks/torch_versions.py 2.8.0 --lowest

An environment is made once, in .venv-matrix, with the other packages as constraints.txt pins them; `--with` puts others
in their place, and `--lowest` the lowest of all that pyproject.toml allows: then pip chooses the rest. What is measured
is kept there, so that a row can be measured in parts (`--only`); `--write` puts the row in the page, where cells
that were not run stay what they are. A column is

    a workflow  gradients of short trainings on two processes beside those of the same micro-batches in one: the largest
                relative difference of any model, of all gradients together
    memory      peaks of two processes, predicted from a profile that is made there, beside the allocator's
    tests       what pytest says of some files

Exit code 1: something differs from what it should be. `PYTEST_ADDOPTS="-n auto"` makes the tests faster.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/measurements/torch-versions.md"
WORKFLOWS = ("GPipe", "1F1B", "interleaved", "halves", "recompute")
TESTS = {
    "training": ("tests/functional/test_training.py", "tests/functional/test_split_training.py"),
    "model": ("tests/unit/model",),
    "profile": ("tests/unit/profile",),
    "executor": ("tests/unit/executor",),
}
COLUMNS = (*WORKFLOWS, "memory", *TESTS)
CLOSEST = 1e-5
"""Largest relative difference of gradients: stages add gradients of tied parameters in another order."""


def main() -> int:
    """Measure, and print the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", help="its release, such as 2.15.0")
    parser.add_argument("--with", dest="others", action="append", default=[], metavar="PACKAGE==VERSION")
    parser.add_argument("--lowest", action="store_true", help="the lowest versions that are declared")
    parser.add_argument("--only", default=",".join(COLUMNS), metavar="COLUMNS", help=f"some of {', '.join(COLUMNS)}")
    parser.add_argument("--write", action="store_true", help=f"put the row in {PAGE.relative_to(ROOT)}")
    options = parser.parse_args()
    columns = [column for column in options.only.split(",") if column]
    if not set(columns) <= set(COLUMNS):
        parser.error(f"columns are {', '.join(COLUMNS)}")
    name = "-".join([f"torch-{options.torch}", *(re.sub(r"\W+", "-", each) for each in options.others)])
    folder = ROOT / ".venv-matrix" / (f"{name}-lowest" if options.lowest else name)
    make_environment(folder, options.torch, options.others, is_lowest=options.lowest)
    cells = folder / "cells"
    cells.mkdir(exist_ok=True)
    for column in columns:
        (cells / column).unlink(missing_ok=True)
    for name, cell in chain.from_iterable(found.items() for found in measured(folder, columns)):
        (cells / name).write_text(cell, encoding="utf-8")
    row = {path.name: path.read_text(encoding="utf-8") for path in cells.iterdir()}
    line = row_of(row)
    print(line)
    if options.write:
        write(line)
    return int(any("failed" in row.get(column, "failed") for column in columns))


def measured(folder: Path, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the cells of some columns as they are measured."""
    yield from inside(folder, [column for column in columns if column not in TESTS])  # versions, too
    for column in columns:
        if column in TESTS:
            yield passed(folder, column)


# ---- environments


def make_environment(folder: Path, torch: str, others: Sequence[str], *, is_lowest: bool) -> None:
    """Create a virtual environment with this release, and everything that the package and its tests need."""
    ready = folder / ".ready"
    if ready.exists():
        return
    python = str(folder / "bin/python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    needed = [*requirements(others, is_lowest=is_lowest), f"torch=={torch}", "torchvision", "timm", *others]
    with tempfile.TemporaryDirectory() as place:
        constraints = Path(place, "constraints.txt")
        pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        # With other versions of some packages, those that are pinned for the usual ones do not fit.
        kept = [] if others or is_lowest else [pin for pin in pins if not pin.startswith(("torch==", "torchvision=="))]
        constraints.write_text("\n".join(kept), encoding="utf-8")
        install = [python, "-m", "pip", "install", "--quiet", "--no-compile"]
        subprocess.run([*install, "--constraint", str(constraints), *needed], check=True)
        # The package itself without its range of torch: releases beyond it are tried, too.
        subprocess.run([*install, "--no-deps", "--editable", str(ROOT)], check=True)
    if subprocess.run([python, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        # One for CUDA, beside a CPU torch: as `make` does, for transformers fails where one is that does not load.
        (folder / "aside").mkdir()
        for path in folder.glob("lib/python*/site-packages/torchvision*"):
            path.rename(folder / "aside" / path.name)
    ready.touch()


def requirements(others: Sequence[str], *, is_lowest: bool) -> list[str]:
    """Return the requirements of pyproject.toml, except for torch and those in `others`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *of_extra("test", project)]
    elsewhere = {"torch", *(name_of(other) for other in others)}
    wanted = [each for each in declared if name_of(each) not in elsewhere]
    return [re.sub(r">=([^,]+).*", r"==\1", each) for each in wanted] if is_lowest else wanted


def of_extra(extra: str, project: Mapping[str, Any]) -> Iterator[str]:
    """Yield the requirements of an extra, and of extras of the package itself that it names."""
    for requirement in project["optional-dependencies"][extra]:
        if name_of(requirement) == project["name"]:
            for named in re.findall(r"\w+", requirement.partition("[")[2]):
                yield from of_extra(named, project)
        else:
            yield requirement


def name_of(requirement: str) -> str:
    """Return the package's name."""
    return re.split(r"[<>=!~ ;\[]", requirement, maxsplit=1)[0].lower()


# ---- tests


def passed(folder: Path, column: str) -> dict[str, str]:
    """Return pytest's summary of the files of a column."""
    print(f"{folder.name}: {column}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory() as place:
        report = Path(place, "report.xml")
        command = [str(folder / "bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run([*command, *TESTS[column]], cwd=ROOT, env=environment(), check=False, stdout=sys.stderr)
        if not report.exists():
            return {column: "failed: pytest did not end"}
        cases = list(ET.parse(report).iter("testcase"))  # noqa: S314 - pytest's own
    bad = [
        case.get("name", "?") for case in cases if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    words = [f"{len(cases) - len(bad) - skipped} passed"]
    words += [f"{skipped} skipped"] if skipped else []
    words += [f"{len(bad)} failed: {', '.join(bad[:3])}{', …' if len(bad) > 3 else ''}"] if bad else []
    return {column: ", ".join(words)}


def environment() -> dict[str, str]:
    """Return the processes' variables: one thread each, and this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


# ---- workflows and memory, which are run with the environment's own interpreter


def inside(folder: Path, columns: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the output of `measure` in the environment."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import torch_versions as it; it.measure("
    command = [str(folder / "bin/python"), "-c", f"{code}{columns!r})"]
    with subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)


def measure(columns: Sequence[str]) -> None:
    """Print the installed versions, and cells."""
    import platform  # noqa: PLC0415 - here everything is imported by the interpreter that is tried
    from importlib.metadata import version  # noqa: PLC0415

    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    versions = {name: version(name) for name in ("numpy", "transformers")}
    print(json.dumps({"torch": torch.__version__, "python": platform.python_version(), **versions}), flush=True)
    for column in columns:
        print(json.dumps({column: memory() if column == "memory" else train_workflow(column)}), flush=True)


def train_workflow(column: str) -> str:
    """Return results of one workflow's trainings, each compared with the same micro-batches in one process."""
    from tests.support.training import run_cases  # noqa: PLC0415

    cases, results = list(cases_of(column)), []
    for case in cases:
        with tempfile.TemporaryDirectory() as place:
            try:
                results += run_cases([case], Path(place))
            except AssertionError as error:
                print(error, file=sys.stderr)
                return f"failed: {case.model.stem} under {case.schedule}"
    worst = max(max(result["split_loss_relative"], result["split_all_relative"]) for result in results)
    return f"{len(cases)} runs, {worst:.0e}" + ("" if worst <= CLOSEST else " failed")


def cases_of(column: str) -> Iterator[Any]:
    """Yield a Transformer (also in bfloat16 under autocast), convolutions, tied and awkward layers on two processes."""
    from planner.core.schedule import SCHEDULES  # noqa: PLC0415
    from tests.support.peaks import even  # noqa: PLC0415
    from tests.support.training import Case  # noqa: PLC0415

    schedules = {"GPipe": "gpipe", "1F1B": "1f1b", "interleaved": "interleaved"}
    # Schedules and recomputation of each workflow.
    ways: dict[str, Sequence[tuple[Any, Any]]] = {
        **{title: [(name, "never")] for title, name in schedules.items()},
        "halves": [("zb-h1", "never"), ("interleaved-zb", "never"), ("zbv", "never")],
        "recompute": [("gpipe", "except-last"), ("1f1b", "always"), ("interleaved", "layers"), ("zb-h1", "always")],
    }
    sizes = {"layers": 4, "width": 32, "feed_forward": 64, "heads": 2, "vocabulary": 64, "tokens": 16}
    models: list[tuple[str, int, dict[str, Any], str]] = [
        ("sample_models/transformer_lm.py", 6, {**sizes, "dropout": 0.2}, ""),
        ("sample_models/transformer_lm.py", 6, sizes, "bf16-mixed"),
        ("sample_models/amoebanet_d.py", 9, {"num_layers": 3, "num_filters": 8, "image_size": 33}, ""),
        ("tests/zoo/models/awkward.py", 8, {}, ""),
    ]
    for (schedule, recompute), (path, layers, settings, dtype) in product(ways[column], models):
        chunks = 2 if SCHEDULES[schedule].is_chunked else 1
        yield Case(
            model=ROOT / path,
            balance=even(layers, 2 * chunks),
            settings=tuple(settings.items()),
            schedule=schedule,
            chunks=chunks,
            recompute=recompute,
            dtype=dtype,
            steps=2,
        )


def memory() -> str:
    """Return the errors of predicted peaks of every device and plan.

    For per-layer recomputation with split backward, the cost model is an upper bound.
    """
    from planner.core.cost.costs import costs_at  # noqa: PLC0415
    from planner.core.schedule import SCHEDULES  # noqa: PLC0415
    from planner.model.load import load_model  # noqa: PLC0415
    from planner.model.precision import in_precision  # noqa: PLC0415
    from tests.support.measure import profile_of_model  # noqa: PLC0415
    from tests.support.peaks import PROMISED, even, measured_peaks  # noqa: PLC0415
    from tests.support.training import Case, predicted_peaks  # noqa: PLC0415

    sizes = {"layers": 6, "width": 64, "feed_forward": 256, "heads": 4, "vocabulary": 512, "tokens": 64}
    models: list[tuple[str, dict[str, Any], str]] = [
        ("transformer_lm", sizes, "bf16-mixed"),
        ("amoebanet_d", {"num_layers": 3, "num_filters": 16}, ""),
    ]
    rows: list[tuple[int, int]] = []
    bounds: list[tuple[int, int]] = []
    for name, settings, dtype in models:
        path = ROOT / f"sample_models/{name}.py"
        loaded = load_model(str(path), settings={key: str(value) for key, value in settings.items()})
        costs = costs_at(profile_of_model(in_precision(loaded, dtype), sizes=(4,)), 4)
        cases = [
            Case(
                model=path,
                balance=even(len(costs.names), 2 * (1 + SCHEDULES[schedule].is_chunked)),
                settings=tuple(settings.items()),
                schedule=schedule,
                chunks=1 + SCHEDULES[schedule].is_chunked,
                recompute=recompute,
                micro_batches=4,
                batch=16,
                dtype=dtype,
            )
            for schedule, recompute in product(("gpipe", "1f1b", "interleaved", "zb-h1"), ("never", "always", "layers"))
        ]
        for case in cases:
            with tempfile.TemporaryDirectory() as place:
                (peaks,) = measured_peaks([case], Path(place))
            kind = bounds if SCHEDULES[case.schedule].splits_backward and case.recompute == "layers" else rows
            kind += zip(predicted_peaks(case, costs), peaks, strict=False)  # the first chunks, in order of devices
    # A bound that lies above what is measured is right.
    judged = [*rows, *((min(predicted, measured), measured) for predicted, measured in bounds)]
    outside = sum(not PROMISED.allows_peak(predicted=predicted, measured=measured) for predicted, measured in judged)
    ranges = f"{len(rows)} rows, {spread(rows)}; {len(bounds)} bounds, {spread(bounds)}"
    return ranges + (f", {outside} failed" if outside else "")


def spread(pairs: Sequence[tuple[int, int]]) -> str:
    """Return the largest errors below and above the measurement."""
    errors = [predicted / measured - 1 for predicted, measured in pairs]
    return f"{min(errors):+.2%} to {max(errors):+.2%}"


# ---- the page


def row_of(row: dict[str, str]) -> str:
    """Return a line of the table."""
    cells = {name: row.get(name, "not run") for name in ("torch", "python", "numpy", "transformers", *COLUMNS)}
    others = "Python {python}, numpy {numpy}, transformers {transformers}".format_map(cells)
    return f"| {' | '.join([cells['torch'], others, *(cells[name] for name in COLUMNS)])} |"


def write(line: str) -> None:
    """Write a row into the page's table; cells that were not run keep their values if the versions are equal."""
    head = f"| torch | with | {' | '.join(COLUMNS)} |"
    before, begin, behind = PAGE.read_text(encoding="utf-8").partition(head)
    if not begin:
        raise SystemExit(f"error: {PAGE} has no table that begins with\n{head}")
    ruler, *lines = behind.lstrip("\n").split("\n")
    count = next((n for n, each in enumerate(lines) if not each.startswith("|")), len(lines))
    versions: dict[tuple[str, ...], list[str]] = {}
    for cells in (each.split("|") for each in [*lines[:count], line]):
        known = versions.get(tuple(cells[1:3]), cells)
        pairs = zip(known, cells, strict=True)
        versions[tuple(cells[1:3])] = [old if new.strip() == "not run" else new for old, new in pairs]
    rows = sorted(
        ("|".join(cells) for cells in versions.values()),
        key=lambda each: [int(part) for part in re.findall(r"\d+", each)[:3]],
    )
    PAGE.write_text(before + "\n".join([head, ruler, *rows, *lines[count:]]), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
