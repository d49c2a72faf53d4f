"""Modules are copied although their attributes hold objects that Python cannot copy."""

import copy
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from planner.model.copying import copy_module


class Logs(nn.Module):
    """Module with an open file, and with a lock beside numbers in a dict."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.file = path.open("w")
        self.meters: dict[str, Any] = {"lock": threading.Lock(), "sums": [1.0]}


class Builds(nn.Linear):
    """Layer that is copied by building a new one."""

    def __deepcopy__(self, _memo: Any) -> "Builds":
        return Builds(2, 2)


def test_copies_by_a_method_of_the_module_are_replaced_by_copies_of_its_attributes() -> None:
    """The method would make new parameters."""
    module = nn.Sequential(Builds(2, 2))
    other = nn.Parameter(torch.zeros(2))
    made: Any = copy_module(module, {id(module[0].bias): other})[0]
    assert made.bias is other
    assert torch.equal(made.weight, module[0].weight)
    assert isinstance(made, Builds)
    assert "__deepcopy__" in vars(Builds)
    assert copy.deepcopy(made).bias is not other


def test_a_copy_shares_only_objects_that_cannot_be_copied(tmp_path: Path) -> None:
    module = nn.Sequential(Logs(tmp_path / "log"))
    other = nn.Parameter(torch.zeros(2))
    made: Any = copy_module(module, {id(module[0].layer.bias): other})[0]
    assert made.file is module[0].file
    assert made.meters["lock"] is module[0].meters["lock"]
    assert made.meters["sums"] is not module[0].meters["sums"]
    assert made.layer.bias is other
    assert made.layer.weight is not module[0].layer.weight
    made.file.close()


class Tied(nn.Module):
    """Model whose head is a function that refers to the model, as in libraries with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.heads = [lambda hidden: hidden @ self.embed.weight.T]
        self.embed.register_forward_hook(lambda _module, _args, output: output + self.embed.weight.sum())

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.heads[0](self.embed(words))


def test_functions_of_a_copy_refer_to_the_copy() -> None:
    model = Tied()
    words, copied = torch.tensor([0, 2]), copy_module(model)
    before = model(words)
    assert torch.equal(copied(words), before)
    nn.init.zeros_(copied.embed.weight)
    assert not copied(words).any()
    assert torch.equal(model(words), before)


class Settings(dict[str, Any]):
    """Dict with attributes, a common idiom. Python cannot copy it, because `copy` reads `__deepcopy__`."""

    __getattr__ = dict.__getitem__


def test_an_object_that_raises_any_error_when_it_is_copied_is_shared() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].settings = Settings(width=2)
    made: Any = copy_module(module)[0]
    assert made.settings is module[0].settings
    assert made.weight is not module[0].weight


class Options(dict[str, Any]):
    """Dict whose attributes are its items, another common idiom. Python copies it without the attributes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.__dict__ = self


def test_the_copy_of_a_dict_with_attributes_has_them_too() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    inner = Options(width=2, layer=module[0])
    module.options = [Options(inner=inner, numbers=[1])]
    made: Any = copy_module(module).options[0]
    assert made.inner.width == 2
    assert made.inner.layer is not module[0]
    made.numbers.append(2)
    made.count = 3
    assert made["count"] == 3
    assert module.options[0] == {"inner": inner, "numbers": [1]}


def test_a_copy_draws_from_the_default_generators() -> None:
    layer = nn.Module()
    layer.choose, layer.generator = random.choice, np.random.mtrand._rand
    copied = copy_module(layer)
    assert copied.choose == random.choice
    assert copied.generator is np.random.mtrand._rand
