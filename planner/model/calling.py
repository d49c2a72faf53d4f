"""Call a model with its inputs, and intercept calls of its modules."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a model's inputs as positional arguments, or as keyword arguments if they are a dict."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


@contextmanager
def intercept_calls(modules: Iterable[nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    """Replace each module's forward in the `with` block by `run(module, forward, args, kwargs)`."""
    with ExitStack() as stack:
        for module in dict.fromkeys(modules):
            stack.callback(restore_forward, module, vars(module).get("forward"))
            module.__dict__["forward"] = _wrapper(module, module.forward, run)
        yield


def _wrapper(module: nn.Module, forward: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)  # some libraries inspect the signature of a forward
    def call(*args: Any, **kwargs: Any) -> Any:
        return run(module, forward, args, kwargs)

    return call


def restore_forward(module: nn.Module, forward: Any) -> None:
    """Set `forward` in the `__dict__` of `module`, or remove it there if the argument `forward` is None."""
    if forward is None:
        module.__dict__.pop("forward", None)
    else:
        module.__dict__["forward"] = forward
