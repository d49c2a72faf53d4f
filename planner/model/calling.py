"""Call a model with its inputs, and intercept calls of its modules."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a model's inputs as positional arguments, or as keyword arguments if they are a dict."""
    if isinstance(inputs, dict):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, tuple | list) else ((inputs,), {})


def copy_containers(value: Any) -> Any:
    """Return nested dicts, lists and tuples as new objects with the same leaves.

    Code that removes an item, such as `targets.pop("weight")`, then does not change the original.
    """
    return tree_map(lambda leaf: leaf, value)


def is_compiled(module: nn.Module) -> bool:
    """Return True if a module is compiled, by `torch.compile(module)` or `module.compile()`."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def modules_not_inside_compiled(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model, except the submodules of compiled modules.

    A model cannot be cut inside a compiled module.
    """
    inside = {id(m) for outer in model.modules() if is_compiled(outer) for m in outer.modules() if m is not outer}
    return [module for module in model.modules() if id(module) not in inside]


@contextmanager
def intercept_calls(modules: Iterable[nn.Module], run: Callable[..., Any]) -> Iterator[None]:
    """Replace each module's forward in the `with` block by `run(module, forward, args, kwargs)`.

    Of a compiled module (`module.compile()`), the compiled forward is replaced, so that `run` is not compiled.
    """
    with ExitStack() as stack:
        for module in dict.fromkeys(modules):
            compiled = module._compiled_call_impl
            if compiled is not None:
                stack.callback(setattr, module, "_compiled_call_impl", compiled)
                module._compiled_call_impl = _wrapper(module, compiled, run)
            else:
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
