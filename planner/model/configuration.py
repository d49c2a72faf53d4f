"""Create a Python module for the model of a Hugging Face config.json, with the functions of a model.py.

The model has random weights, because `transformers` builds it from the configuration alone.
"""

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from planner.core.errors import UsageError
from planner.core.extras import check_configuration_packages


class _Task(NamedTuple):
    """Task for which a Hugging Face model is trained."""

    auto_class: str
    endings: tuple[str, ...]
    """Suffixes by which the class names in `architectures` show the task."""
    labels_per_sample: bool = False
    """True if there is one label per sample; otherwise there is one per token."""


TASKS: Final = {
    "causal-lm": _Task("AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel")),
    "seq2seq": _Task("AutoModelForSeq2SeqLM", ("ForConditionalGeneration",)),
    "masked-lm": _Task("AutoModelForMaskedLM", ("ForMaskedLM",)),
    "sequence-classification": _Task(
        "AutoModelForSequenceClassification", ("ForSequenceClassification",), labels_per_sample=True
    ),
}
"""Tasks for which models of a config.json can be trained, by name."""


def model_module_from_configuration(path: str) -> ModuleType:
    """Return a module with `build_model` and `example_batch` for the model of a config.json; needs transformers."""
    check_configuration_packages()
    transformers = import_module("transformers")

    def build_model(sequence: int, task: str = "") -> nn.Module:  # noqa: ARG001 - a setting of the batch
        configuration, is_part = _language_configuration(transformers, path)
        kind = getattr(transformers, TASKS[_task(path, task, is_part=is_part)].auto_class)
        # Parameters are in float32 whatever the checkpoint's type; `--dtype` converts them.
        model: nn.Module = kind.from_config(configuration, dtype=torch.float32)
        return model

    def example_batch(batch_size: int, sequence: int, task: str = "") -> tuple[dict[str, Tensor], None]:
        configuration, is_part = _language_configuration(transformers, path)
        tokens = torch.randint(configuration.vocab_size, (batch_size, sequence))
        if TASKS[_task(path, task, is_part=is_part)].labels_per_sample:
            return {"input_ids": tokens, "labels": torch.randint(configuration.num_labels, (batch_size,))}, None
        return {"input_ids": tokens, "labels": tokens.clone()}, None

    module = ModuleType("configuration")
    vars(module).update(build_model=build_model, example_batch=example_batch)
    return module


def _language_configuration(transformers: ModuleType, path: str) -> tuple[Any, bool]:
    """Return the configuration of the language model, and True if the language model is a part of a larger model."""
    whole = transformers.AutoConfig.from_pretrained(path)
    configuration = whole.get_text_config()
    configuration.use_cache = False  # training does not use the cache of keys and values
    return configuration, configuration is not whole


def _task(path: str, task: str, *, is_part: bool) -> str:
    """Return the name of the task: `task` if given, else a default.

    The default is `causal-lm` for a language model in a larger model, else the task of the class in `architectures`.
    """
    if task in TASKS:
        return task
    if task:
        raise UsageError(f"unknown `--task {task}`", hint=f"one of {', '.join(TASKS)}")
    if is_part:
        return "causal-lm"
    names = json.loads(Path(path).read_text(encoding="utf-8")).get("architectures") or ["of an unknown class"]
    for name, known in TASKS.items():
        if str(names[0]).endswith(known.endings):
            return name
    raise UsageError(
        f"{path}: the model is {names[0]}, whose inputs are not known",
        hint=f"`--task` with one of {', '.join(TASKS)}, or write a model.py that builds it",
    )
