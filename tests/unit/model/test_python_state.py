"""Python values that a model's code keeps between forwards are read by their paths."""

import ctypes
import functools
import importlib.util
import itertools
import math
import multiprocessing
import random
import subprocess
import sys
import threading
from argparse import Namespace
from array import array
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from planner.model.ghosts import ghost_like
from planner.model.python_state import (
    is_user_module,
    numbers_in_attributes,
    numbers_in_hooks,
    numbers_in_user_files,
    numbers_in_values,
    variables_read,
    without_leftover_tensors,
)

STATE = {"calls": 1}
TICKS = ContextVar("TICKS", default=6)
UNREAD = 5


class Clock:
    def __init__(self) -> None:
        self.ticks = 3


@dataclass(slots=True)
class Slotted:
    ticks: int = 3


LOCAL = threading.local()
LOCAL.ticks = 3


def counter(value: int) -> Any:
    """Return a function that holds a number in a closure."""

    def tick() -> int:
        return value

    return tick


def count() -> int:
    return STATE["calls"]


class Reads(nn.Module):
    seen: list[int] = [7]  # noqa: RUF012 - it is shared on purpose

    def forward(self, value: Tensor) -> Tensor:
        return value * count()


CASES = {
    "number": (3, {"x": 3}),
    "dict": ({"calls": 3}, {"x.calls": 3, "x.length": 1}),
    "deque": (deque([1.0, 2.0]), {"x.length": 2, "x.0": 1.0, "x.1": 2.0}),
    "array": (np.array([1, -2]), {"x": 3.0}),
    "object": (Clock(), {"x.ticks": 3}),
    "namespace": (SimpleNamespace(ticks=3), {"x.ticks": 3}),
    "arguments": (Namespace(ticks=3, nested={"n": 4}), {"x.ticks": 3, "x.nested.n": 4}),
    "user dict": (UserDict(ticks=3), {"x.data.ticks": 3}),
    "object of a library": (subprocess.CompletedProcess([], 3), {"x.returncode": 3}),
    "enumeration": (enumerate("ab", start=3), {"x.1": 3}),
    "mapped iterator": (map(str, iter(range(9))), {"x.1": 9}),
    "closure": (counter(4), {"x.value": 4, "x.defaults.length": 0}),
    "partial": (functools.partial(counter(4), 2), {"x.0.value": 4, "x.1.0": 2}),
    "iterator": (iter(range(9)), {"x": 9}),
    "slots": (Slotted(), {"x.ticks": 3}),
    "context": (TICKS, {"x.value": 6}),
    "thread": (LOCAL, {"x.ticks": 3}),
    "tensor": (torch.full((2,), -2.0), {"x.tensor": 4.0}),
    "tensor without values": (torch.ones(2, device="meta"), {}),
    "leftover": ({"first": torch.ones(2)}, {"x.length": 0, "x.tensors": 1, "x.first.tensor": 2.0}),
    "library": (torch.nn.init.xavier_normal_, {}),
}


def numbers_of_attribute(value: Any) -> dict[str, float]:
    """Return the numbers found in a module with this attribute."""
    module = nn.Module()
    vars(module)["x"] = value
    return {name.removeprefix("m."): number for name, number in numbers_in_attributes({"m": module}).items()}


@pytest.mark.parametrize("case", CASES)
def test_numbers_and_lengths_are_found_by_path(case: str) -> None:
    value, expected = CASES[case]
    found = numbers_of_attribute(value)
    assert expected.items() <= found.items()
    assert bool(found) == bool(expected)


def test_leftover_tensors_are_dropped() -> None:
    found = numbers_of_attribute({"kept": torch.ones(2), "left": torch.ones(2)})
    assert without_leftover_tensors(found, ["x.kept.tensor"]) == {"x.length": 0, "x.kept.tensor": 2.0}


def test_entries_of_a_cache_that_have_only_tensors_do_not_count() -> None:
    pair = (torch.ones(2), {"sin": torch.ones(2)})
    assert numbers_of_attribute({8: pair})["x.length"] == 0
    assert numbers_of_attribute({8: (*pair, 1)})["x.length"] == 1


@pytest.mark.parametrize(
    "draw",
    [
        (torch.Generator(), lambda g: torch.rand(1, generator=g)),
        (np.random.default_rng(0), lambda g: g.random()),
        (np.random.RandomState(0), lambda g: g.rand()),
        (random.Random(0), lambda g: g.random()),
        (itertools.count(), next),
        (iter([1, 2, 3]), next),
    ],
)
def test_a_draw_changes_the_number_of_its_generator(draw: Any) -> None:
    """Stages that share a generator draw other numbers than one process does."""
    generator, call = draw
    before = numbers_of_attribute(generator)
    call(generator)
    assert numbers_of_attribute(generator) != before


@pytest.mark.parametrize("method", [random.randrange, np.random.mtrand._rand.rand, torch.default_generator.seed])
def test_generators_that_are_seeded_for_every_layer_have_no_number(method: Any) -> None:
    """`from random import randrange` imports a method of such a generator."""
    assert not numbers_of_attribute(method.__self__)


def test_cycles_are_followed_to_a_limited_depth() -> None:
    one, other = Clock(), Clock()
    one.other, other.other = other, one
    assert len(numbers_of_attribute(one)) < 10


def test_numbers_in_closures_of_hooks_are_found() -> None:
    module = nn.Linear(2, 2)
    module.weight.register_hook(counter(4))
    module.register_forward_hook(counter(5))
    found = numbers_in_hooks({"m": module})
    assert found["m.weight.hooks.0.value"] == 4
    assert found["m.hooks.0.value"] == 5


def test_module_level_values_and_their_readers_are_found() -> None:
    found = {name.rpartition(":")[2]: number for name, number in numbers_in_user_files(Reads(), count).items()}
    assert (found["STATE.calls"], found["UNREAD"], found["Reads.seen.0"]) == (1, 5, 7)
    read = {name.rpartition(":")[2] for name in variables_read({"": Reads()})}
    assert {"STATE", "count", "Reads"} <= read
    assert "UNREAD" not in read


class CountsSteps(torch.optim.SGD):
    """Optimizer with a count of all steps."""

    steps = 3


def test_counts_in_the_class_of_an_optimizer_are_no_state_of_a_forward() -> None:
    assert not any("CountsSteps" in name for name in numbers_in_user_files(Reads(), count))


@pytest.mark.parametrize("name", ["torch_layers", "colorsys"])
def test_a_users_file_may_have_the_name_of_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It may begin with the name of a package, or be that of a module of the standard library."""
    (tmp_path / f"{name}.py").write_text("from torch import nn\nCALLS = 4\nclass Layer(nn.Module):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    layers = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, layers)
    assert numbers_in_user_files(layers.Layer(), count)[f"{name}:CALLS"] == 4


def ticks() -> Iterator[int]:
    held = 0
    while True:
        held += 1
        yield held


def counted() -> Tensor:
    tensor: Any = torch.zeros(1)
    tensor.calls = 0
    return tensor


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (ticks(), next),
        (bytearray(1), lambda data: data.append(1)),
        (array("i", [0]), lambda data: data.append(1)),
        ([Decimal(0)], lambda held: held.append(held.pop() + 1)),
        (ctypes.c_int(0), lambda held: setattr(held, "value", 1)),
        (multiprocessing.Value("i", 0), lambda held: setattr(held, "value", 1)),
        ([0] * 100, lambda held: held.__setitem__(80, 1)),
        ({"a": {"b": {"c": {"d": [0]}}}}, lambda held: held["a"]["b"]["c"]["d"].__setitem__(0, 1)),
        (counted(), lambda tensor: setattr(tensor, "calls", 1)),
        (
            torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 2),
            lambda held: held.load_state_dict({"last_epoch": 5}),
        ),
    ],
    ids=[
        "generator",
        "bytes",
        "array",
        "decimal",
        "number of C",
        "shared memory",
        "long list",
        "deep",
        "tensor",
        "schedule",
    ],
)
def test_a_change_in_an_unusual_place_changes_a_number(value: Any, change: Callable[[Any], Any]) -> None:
    before = numbers_of_attribute(value)
    change(value)
    assert numbers_of_attribute(value) != before


def test_nan_equals_itself() -> None:
    before = numbers_of_attribute([math.nan, torch.tensor(math.nan)])
    assert numbers_of_attribute([math.nan, torch.tensor(math.nan)]) == before
    assert numbers_of_attribute([0.0, torch.tensor(math.nan)]) != before


def test_modules_that_import_others_lazily_are_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The other module may not be installed: the import would fail."""
    (tmp_path / "late.py").write_text("raise ImportError")
    spec = importlib.util.spec_from_file_location("late_module_of_a_test", tmp_path / "late.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    late = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, late)
    spec.loader.exec_module(late)
    assert is_user_module(spec.name)

    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ImportError(name)

    lazy = Lazy("lazy_module_of_a_test")
    monkeypatch.setitem(sys.modules, lazy.__name__, lazy)
    assert not is_user_module(lazy.__name__)


def test_stand_ins_for_tensors_of_other_stages_hold_no_state() -> None:
    kept = {"skip": ghost_like(torch.ones(2), torch.device("cpu"), "0.weight")}
    assert numbers_in_values({"kept": kept}) == {"kept.length": 0, "kept.tensors": 1}
