"""Read the values of a config.json by key, and report all missing and wrong keys in one error."""

from collections.abc import Mapping
from typing import Any

from planner.core.errors import UsageError

_LARGEST = 2**32


class ConfigReader:
    """Reader of a config.json. Default values of the model's family replace missing keys, but not null."""

    def __init__(self, content: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._content, self._defaults = content, defaults
        self._missing: list[str] = []
        self._wrong: list[str] = []
        self.assumed: dict[str, int] = {}
        """Keys of sizes that the file leaves out, with the defaults that were used."""

    def integer(self, *names: str, default: int | None = None, least: int = 1, most: int = _LARGEST) -> int:
        """Return the integer of a key, which may have several equivalent names.

        The result is the first of these values that exists:

        1. value of the key in the file, unless it is null
        2. default of the model's family, unless the file has the key with the value null
        3. `default`, unless it is None

        If none exists, or the value in the file is wrong, the result is a placeholder. `raise_if_invalid` then raises
        an error.

        Args:
            names: Equivalent keys, in order of precedence.
            default: Value if the file and the family have none; None to require the key.
            least: Smallest valid integer.
            most: Largest valid integer.
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

    def check_multiple(self, name: str, value: int, divisor_name: str, divisor: int) -> None:
        """Record an error for `raise_if_invalid` if `value` is no multiple of `divisor`.

        Args:
            name: Key of the value.
            value: Number that must be a multiple.
            divisor_name: Key of the divisor.
            divisor: Number that must divide the value.
        """
        if value % divisor:
            self._wrong.append(f"`{name}` is {value}, expected a multiple of `{divisor_name}`, which is {divisor}")

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return the boolean of a key; False for null."""
        return bool(self._value(name, default))

    def text(self, name: str, default: str) -> str:
        """Return the text of a key; `default` if it is null or empty, or if neither file nor family has the key."""
        return str(self._value(name, default) or default)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return the list of integers of a key; empty if the key is missing."""
        value = self._content.get(name)
        return tuple(each for each in value if isinstance(each, int)) if isinstance(value, list) else ()

    def number(self, name: str) -> float:
        """Return the number of a key; 0 for null."""
        value = self._value(name, 0.0)
        return float(value) if isinstance(value, int | float) else 0.0

    def text_list(self, name: str, count: int) -> tuple[str, ...]:
        """Return the list of a key as texts; empty if the key has no list of exactly `count` items."""
        value = self._content.get(name)
        return tuple(map(str, value)) if isinstance(value, list) and len(value) == count else ()

    def raise_if_invalid(self, source: str) -> None:
        """Raise a `UsageError`, with the file's name `source`, if a key that was read is missing or wrong."""
        reasons = [f"{name} is missing" for name in dict.fromkeys(self._missing)]
        reasons += dict.fromkeys(self._wrong)
        if reasons:
            raise UsageError(
                f"{source}: {', '.join(reasons)}", hint="keys are those of a Hugging Face transformers configuration"
            )

    def _value(self, name: str, default: object) -> object:
        return self._content.get(name, self._defaults.get(name, default))
