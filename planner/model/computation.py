"""Compute digests of a model's code: loss function, activation functions, and forwards of the user's classes.

The digests show whether a resumed run still trains the same model. Comments, docstrings, formatting and the
Python version do not count. Of installed packages, such as torch, only the names of functions and classes count.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any, Final

from torch import Tensor, nn

from planner.model.chain import json_digest, without_addresses
from planner.model.load import LoadedModel
from planner.model.python_state import closure_variables, function_of, global_names, is_user_module

_SCALARS: Final = (bool, int, float, str, type(None))


def code_digests(model: nn.Module, loaded: LoadedModel) -> dict[str, str]:
    """Return two digests: of the code of the loss (`loss`), and of the code of the model (`layers`)."""
    # The constants that a loss reads count as well. Those of a layer are mostly sizes, which its tensors show.
    reader = _CodeReader(constants=True)
    loss = [reader.described(loaded.loss_fn), reader.described(loaded.loss_count)]
    reader = _CodeReader(constants=False)
    layers = [[name, *reader.of_module(part)] for name, part in model.named_modules()]
    classes = {type(part).__qualname__: reader.described(type(part)) for part in model.modules()}
    return {"loss": json_digest(loss), "layers": json_digest([layers, classes])}


class _CodeReader:
    def __init__(self, *, constants: bool) -> None:
        self._constants = constants
        self._seen: set[int] = set()

    def of_module(self, module: nn.Module) -> list[Any]:
        held = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        functions = {name: self.described(value) for name, value in held.items() if _is_function(value)}
        return [type(module).__qualname__, without_addresses(module.extra_repr()), functions]

    def described(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            return ["partial", self._all([value.func, *value.args]), self._named(value.keywords)]
        if isinstance(value, MethodType):
            return [self.described(value.__func__), self.described(value.__self__)]
        if isinstance(value, nn.Module):
            constants = {name: held for name, held in vars(value).items() if isinstance(held, _SCALARS)}
            weight = {name: held.tolist() for name, held in value.named_buffers() if held.numel() < 1000}
            return [self.described(type(value)), constants, weight, self._all(list(value.children()))]
        if isinstance(value, FunctionType | type):
            return self._code(value)
        if isinstance(value, _SCALARS) or (isinstance(value, list | tuple) and len(value) < 1000):
            return value if isinstance(value, _SCALARS) else self._all(value)
        return _name_of(value if callable(value) and hasattr(value, "__qualname__") else type(value))

    def _all(self, values: Any) -> list[Any]:
        return [self.described(value) for value in values]

    def _named(self, values: Any) -> dict[str, Any]:
        return {str(name): self.described(value) for name, value in sorted(values.items())}

    def _code(self, thing: Any) -> Any:
        name = _name_of(thing)
        if id(thing) in self._seen or not is_user_module(thing.__module__):
            return name
        self._seen.add(id(thing))
        functions = filter(None, map(function_of, [thing] if isinstance(thing, FunctionType) else vars(thing).values()))
        refers: dict[str, Any] = {}
        for function in functions:
            outside = _outer_variables(function)
            refers |= {n: self.described(v) for n, v in sorted(outside.items()) if self._counts(v) and v is not thing}
        bases = [] if isinstance(thing, FunctionType) else [self._code(base) for base in thing.__bases__]
        return [name, _normalized_source(thing), dict(sorted(refers.items())), bases]

    def _counts(self, value: Any) -> bool:
        return _is_function(value) or isinstance(value, type) or (self._constants and isinstance(value, _SCALARS))


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, nn.Module | Tensor | type)


def _name_of(thing: Any) -> str:
    module = str(getattr(thing, "__module__", None) or "")
    # A user's file is imported under a generated module name.
    return f"{'' if is_user_module(module) else module}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def _outer_variables(function: FunctionType) -> dict[str, Any]:
    names = global_names(function.__code__) & function.__globals__.keys()
    return {name: function.__globals__[name] for name in names} | closure_variables(function)


def _normalized_source(thing: Callable[..., Any]) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        return ""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a lambda in the middle of a call
        return " ".join(source.split())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not body or not isinstance(body[0], ast.Expr):
            continue
        if isinstance(body[0].value, ast.Constant) and isinstance(body[0].value.value, str):
            body[0].value.value = ""
    return ast.unparse(tree)
