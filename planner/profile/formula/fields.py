"""Values of a config.json, read by key; missing and wrong keys are collected and reported together."""

from collections.abc import Mapping
from typing import Any

from planner.core.errors import UsageError

_LARGEST = 2**32


class Fields:
    """Content of a config.json."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content = content
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = _LARGEST) -> int:
        """Return the integer of the first present key; all of these keys mean the same.

        With neither a key nor a default, a placeholder is returned, and `check` raises.
        """
        for name in names:
            value = self._content.get(name)
            if value is None:
                continue
            if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
                return value
            self._wrong.append(f"`{name}` is {value!r}, expected an integer from {least} to {most}")
            return 1
        if default is None:
            self._missing.append(f"`{names[0]}`")
        return 1 if default is None else default

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._content.get(name)
        return default if value is None else bool(value)

    def text(self, name: str, default: str) -> str:
        """Return a string."""
        return str(self._content.get(name) or default)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers; empty if it is missing."""
        value = self._content.get(name)
        return tuple(each for each in value if isinstance(each, int)) if isinstance(value, list) else ()

    def number(self, name: str, default: float = 0.0) -> float:
        """Return a number; 0 for null."""
        value = self._content.get(name, default)
        return float(value) if isinstance(value, int | float) else 0.0

    def texts(self, name: str, count: int) -> tuple[str, ...]:
        """Return a list of strings; empty if it is missing or has another length."""
        value = self._content.get(name)
        return tuple(map(str, value)) if isinstance(value, list) and len(value) == count else ()

    def check(self, source: str) -> None:
        """Raise UsageError if a key was missing or wrong.

        Args:
            source: Name of the file, for the message.
        """
        reasons = [f"{name} is missing" for name in dict.fromkeys(self._missing)]
        reasons += dict.fromkeys(self._wrong)
        if reasons:
            raise UsageError(
                f"{source}: {', '.join(reasons)}", hint="keys are those of a Hugging Face transformers configuration"
            )
