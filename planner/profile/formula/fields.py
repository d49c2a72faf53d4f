"""Values of a config.json, read by key; missing and wrong keys are collected and reported together."""

from collections.abc import Mapping
from typing import Any

from planner.core.errors import UsageError

_LARGEST = 2**32


class Fields:
    """Content of a config.json, with the defaults of its family.

    A default replaces a key that is absent. For null, transformers derives a value from other keys, as callers do.
    """

    def __init__(self, content: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._content, self._defaults = content, defaults
        self._missing: list[str] = []
        self._wrong: list[str] = []
        self.assumed: dict[str, int] = {}
        """Sizes that the file leaves out, and their defaults."""

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = _LARGEST) -> int:
        """Return the integer of the first present key; all of these keys mean the same.

        Without a key, its default in the family and `default`, a placeholder is returned, and `check` raises.
        """
        name = next((name for name in names if self._content.get(name) is not None), None)
        if name is not None:
            value = self._content[name]
            if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
                return value
            self._wrong.append(f"`{name}` is {value!r}, expected an integer from {least} to {most}")
            return 1
        is_null = any(name in self._content for name in names)
        known = next((name for name in names if name in self._defaults and not is_null), None)
        if known is not None:
            value = int(self._defaults[known])
            if default is None:
                self.assumed[known] = value
            return value
        if default is None:
            self._missing.append(f"`{names[0]}`")
        return 1 if default is None else default

    def check_multiple(self, name: str, value: int, of: str, divisor: int) -> None:
        """Let `check` raise if the value of a key is no multiple of that of another one."""
        if value % divisor:
            self._wrong.append(f"`{name}` is {value}, expected a multiple of `{of}`, which is {divisor}")

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a boolean; False for null."""
        return bool(self._value(name, default))

    def text(self, name: str, default: str) -> str:
        """Return a string."""
        return str(self._value(name, default) or default)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers; empty if it is missing."""
        value = self._content.get(name)
        return tuple(each for each in value if isinstance(each, int)) if isinstance(value, list) else ()

    def number(self, name: str) -> float:
        """Return a number; 0 for null."""
        value = self._value(name, 0.0)
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

    def _value(self, name: str, default: object) -> object:
        return self._content.get(name, self._defaults.get(name, default))
