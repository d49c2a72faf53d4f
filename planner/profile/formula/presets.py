"""Read the configurations of well-known models, and the defaults of keys that a config.json leaves out."""

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return, by name of the model, the keys of its public config.json that formulas read."""
    return _content("presets.json")


@cache
def defaults() -> dict[str, dict[str, Any]]:
    """Return, by `model_type`, the defaults of transformers for missing keys, without those that are 0 or false."""
    return _content("defaults.json")


def _content(name: str) -> dict[str, dict[str, Any]]:
    text = resources.files("planner.profile.formula").joinpath(name).read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = json.loads(text)
    return content
