"""House rules of CONTRIBUTING, checked on the source."""

import ast
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from math import ceil

import pytest

from tests.support.house import (
    ROOT,
    Function,
    Module,
    clock_readers,
    compared_words,
    functions,
    imported_parts,
    is_vague,
    modules,
    named_files,
    names,
    private_torch,
)

LONG_FILES: set[str] = set()

LONG_FUNCTIONS: set[str] = set()

DEEP_FUNCTIONS: set[str] = set()

MANY_ARGUMENTS = {
    "planner/core/cost/layer_memory.py:_peaks",
    "planner/core/cost/passing.py:_spanning",
}

SCHEDULES_BY_NAME: set[str] = set()

PRIVATE_TORCH = {
    # The store of an existing process group; torch has no public function for it.
    "torch.distributed.distributed_c10d._get_default_store",
    "torch._C",  # address of a tensor's storage, without materializing its lazy clones
    "torch._amp_foreach_non_finite_check_and_unscale_",
    "torch._lazy_clone",
    "torch._subclasses",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
}
"""Private names of torch that the executor needs; another release may lack them."""

VAGUE_NAMES: dict[str, int] = {}
"""Packages with 1 % or more vague names, and the percentage, rounded up."""


USERS_FILES = re.compile(r"(path/to/)?model\.py|train(_jax|_ray)?\.py|plan_\w+\.py|pip\.py")
"""Python files in the documents that are not in this repository: users' files, and files that `emit` writes."""

RECIPES = {
    "a schedule": 8,
    "a memory component": 4,
    "a solver option": 3,
    "a device": 3,
    "an emit format": 3,
    "a finding": 2,
}
"""Recipes of CONTRIBUTING and the largest number of modules that each may change."""

UNWRITTEN_RECIPES: set[str] = set()
LONG_RECIPES: set[str] = set()

PAGES = ("CONTRIBUTING.md", *(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").glob("*.md"))))


def is_command(function: Function) -> bool:
    """Return True for a typer command: its parameters are options, and no code calls it."""
    path, _, name = function.name.partition(":")
    return path == f"planner/cli/{name}.py"


def test_files_are_short() -> None:
    assert {module.path for module in modules() if module.num_lines > 420} == LONG_FILES


def test_functions_are_short() -> None:
    assert {function.name for function in functions() if function.num_lines > 60} == LONG_FUNCTIONS


def test_statements_are_not_deeply_nested() -> None:
    assert {function.name for function in functions() if function.nesting > 3} == DEEP_FUNCTIONS


def test_functions_have_few_positional_arguments() -> None:
    many = {function.name for function in functions() if function.num_positional > 4 and not is_command(function)}
    assert many == MANY_ARGUMENTS


def test_only_schedule_modules_compare_schedule_names() -> None:
    """Other modules use the properties of a schedule instead."""
    elsewhere = [module for module in modules() if not module.path.startswith("planner/core/schedule/")]
    words = ("gpipe", "1f1b", "interleaved")
    assert {module.path for module in elsewhere if compared_words(module, words)} == SCHEDULES_BY_NAME


def test_executor_uses_public_names_of_torch() -> None:
    executor = (module for module in modules() if module.room == "executor")
    assert set().union(*map(private_torch, executor)) == PRIVATE_TORCH


def test_few_names_are_vague() -> None:
    assert percent(names, is_vague) == VAGUE_NAMES


def percent(all_of: Callable[[Module], Iterable[str]], is_bad: Callable[[str], bool]) -> dict[str, int]:
    """Return the percentage of bad texts by package, rounded up, for packages with at least 1 %."""
    texts: dict[str, list[bool]] = {}
    for module in modules():
        texts.setdefault(module.room, []).extend(map(is_bad, all_of(module)))
    shares = {room: sum(bad) / len(bad) for room, bad in texts.items() if bad}
    return {room: ceil(100 * share) for room, share in shares.items() if share >= 0.01}


def test_solver_has_few_modules_and_few_imports_between_them() -> None:
    imports: dict[str, set[str]] = {}
    for module in modules():
        place, _, name = module.path.removesuffix(".py").removeprefix("planner/").partition("/")
        if place == "solve":
            imports.setdefault(name.partition("/")[0], set()).update(imported_parts(module.tree, "planner.solve"))
    between = {part: others - {part} for part, others in imports.items()}
    floors: list[set[str]] = []
    while left := {part for part in between if not any(part in floor for floor in floors)}:
        floors.append({part for part in left if not between[part] & left})
        assert floors[-1], f"a cycle in {sorted(left)}"
    assert len(between) <= 16
    assert sum(map(len, between.values())) <= 60
    assert len(floors) <= 9


def test_every_module_has_a_docstring() -> None:
    assert [module.path for module in modules() if ast.get_docstring(module.tree) is None] == []


@pytest.mark.parametrize("page", PAGES)
def test_documents_name_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    ours = {name for name in named_files(text) if not USERS_FILES.fullmatch(name)}
    assert {name for name in ours if not list(existing(name))} == set()


def existing(name: str) -> Iterator[object]:
    """Yield the files of this name; `<format>` matches any text."""
    pattern = re.sub(r"<\w+>", "*", name).rstrip("/")
    yield from ROOT.glob(pattern)
    if pattern.endswith(".py"):
        yield from ROOT.glob(f"planner/**/{pattern}")
        yield from ROOT.glob(f"sample_models/{pattern}")


def test_recipes_change_few_modules() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    written = dict(re.findall(r"^## Adding ([^\n]+)\n(.*?)(?=^## )", text, flags=re.MULTILINE | re.DOTALL))
    ours = {recipe: {n for n in named_files(page) if n.startswith("planner/")} for recipe, page in written.items()}
    assert {recipe for recipe, files in ours.items() if not files} == set()
    assert set(RECIPES) - set(ours) == UNWRITTEN_RECIPES
    long = {recipe for recipe in set(RECIPES) & set(ours) if len(ours[recipe]) > RECIPES[recipe]}
    assert long == LONG_RECIPES


@pytest.mark.slow
def test_only_nightly_tests_read_a_clock() -> None:
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    readers = {name for path in tests if not path.startswith("tests/gpu/") for name in clock_readers(path)}
    assert readers == set()


def test_layer_contracts_are_exhaustive() -> None:
    """A new package must be added to a layer before it can be imported."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layered = [contract for contract in settings["contracts"] if contract["type"] == "layers"]
    assert {"planner", "planner.core"} <= {room for contract in layered for room in contract["containers"]}
    assert [contract["name"] for contract in layered if not contract.get("exhaustive")] == []
