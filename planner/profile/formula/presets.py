"""Configurations of well-known models, and values of keys that a configuration leaves out."""

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return the configurations by name, with the keys that formulas read, from their public config.json."""
    return _content("presets.json")


@cache
def defaults() -> dict[str, dict[str, Any]]:
    """Return, by `model_type`, what transformers assumes for keys that a config.json leaves out, unless 0 or false."""
    return _content("defaults.json")


def _content(name: str) -> dict[str, dict[str, Any]]:
    text = resources.files("planner.profile.formula").joinpath(name).read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = json.loads(text)
    return content
