"""Configurations of well-known models, with the keys that formulas read, from their public config.json."""

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return the configurations by name."""
    text = resources.files("planner.profile.formula").joinpath("presets.json").read_text(encoding="utf-8")
    content: dict[str, dict[str, Any]] = json.loads(text)
    return content
