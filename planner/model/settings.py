"""Convert the text of `--set name=value` to the types in the signature of the model's builder."""

import contextlib
import inspect
import math
import typing
from collections.abc import Callable, Iterable
from typing import Any

from planner.core.errors import UsageError
from planner.core.values.profile import Setting


def typed_settings(owner: str, build: Callable[..., Any], settings: dict[str, str]) -> dict[str, Setting]:
    """Return settings by name, converted from texts to the types in a function's signature.

    Args:
        owner: Name of the function, for messages.
        build: The function or class.
        settings: Texts by name, as the user typed them.

    Raises:
        UsageError: The function has no such parameter, or the text does not fit its type.
    """
    parameters = inspect.signature(build).parameters
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    typed: dict[str, Setting] = {}
    for name, text in settings.items():
        if name not in parameters and not is_open:
            names = public_names_text(parameters)
            hint = f"it has {names}" if parameters else f"{owner} takes no settings: leave `--set` out"
            raise UsageError(f"{owner} has no setting `{name}`", hint=hint)
        wanted = _type_of_setting(build, parameters[name]) if name in parameters else _guessed(text)
        typed[name] = _typed(f"{owner}: `--set {name}={text}`", text, wanted)
    return typed


def public_names_text(names: Iterable[str]) -> str:
    """Return a text with the `names` that do not begin with an underscore, or `nothing` if there are none."""
    public = [f"`{name}`" for name in names if not name.startswith("_")]
    return ", ".join(public) or "nothing"


def _type_of_setting(build: Callable[..., Any], parameter: inspect.Parameter) -> type:
    try:
        hint = typing.get_type_hints(build.__init__ if inspect.isclass(build) else build).get(parameter.name)
    except Exception:  # an annotation with an unknown name is ignored
        hint = None
    for option in (hint, *typing.get_args(hint)):
        if option in (bool, int, float, str):
            return typing.cast("type", option)
    return type(parameter.default)


def _guessed(text: str) -> type:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            kind(text)
            return kind
    return bool if text.lower() in ("true", "false") else str


def _typed(where: str, text: str, wanted: type) -> Setting:
    if wanted is bool:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"{where}: expected true or false")
        return text.lower() == "true"
    expected = UsageError(f"{where}: expected {'an integer' if wanted is int else 'a number'}")
    try:
        value: Setting = int(text) if wanted is int else float(text) if wanted is float else text
    except ValueError:
        raise expected from None
    if isinstance(value, float) and not math.isfinite(value):
        raise expected
    return value
