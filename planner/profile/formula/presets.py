"""Read the configurations of well-known models, and the defaults of keys that a config.json leaves out."""

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def model_presets() -> dict[str, dict[str, Any]]:
    """Return the sizes of well-known models, as in their config.json, by name of the model."""
    return _content("presets.json")


@cache
def config_defaults() -> dict[str, dict[str, Any]]:
    """Return the defaults of the package `transformers` for keys of a config.json, by `model_type`."""
    return _content("defaults.json")


def _content(name: str) -> dict[str, dict[str, Any]]:
    text = resources.files("planner.profile.formula").joinpath(name).read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = json.loads(text)
    return content
