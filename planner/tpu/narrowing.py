"""Which arrays of a traced function only products read.

A TPU's products take factors of 16 bits unless the model asks for more. What nothing else reads the compiler holds in
16 bits from the start, in the arrays of loops, too (jax 0.10.2, libtpu 0.0.52).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax

from planner.tpu.halves import Halves, LayerFunction, random_key

_PRODUCTS: Final = frozenset(("conv_general_dilated", "dot_general"))
_MOVING: Final = frozenset(("copy", "copy_p", "expand_dims", "reshape", "rev", "squeeze", "transpose"))
"""What hands numbers on as they are."""

_LOOPS: Final = frozenset(("cond", "scan", "while"))
"""What runs another function otherwise than once."""


@dataclass(frozen=True, kw_only=True)
class Readers:
    """Whether nothing but products reads each of a layer's arrays; of 32 bits alone it makes a difference."""

    received: tuple[bool, ...]
    """Per input, forward and backward."""
    inputs: tuple[bool, ...]
    """Per input, in the backward."""
    outputs: tuple[bool, ...]
    """Per output, in the backward."""
    made: tuple[bool, ...]
    """Per residual that is made."""


def readers_of(function: LayerFunction, halves: Halves) -> Readers:
    """Who reads what in a layer."""
    state = (function.trained, function.fixed, list(function.inputs), random_key())
    pulled = [halves.outputs[n] for n in halves.differentiable]
    forward = read_by_products(jax.make_jaxpr(halves.forward)(*state).jaxpr)
    backward = read_by_products(
        jax.make_jaxpr(halves.backward)(state, halves.outputs, halves.made_shapes, pulled).jaxpr
    )
    first = len(function.trained) + len(function.fixed)
    inputs = slice(first, first + len(function.inputs))
    outputs = slice(inputs.stop + 1, inputs.stop + 1 + len(halves.outputs))  # behind the random key
    made = slice(outputs.stop, outputs.stop + len(halves.made_shapes))
    both = zip(forward[inputs], backward[inputs], strict=True)
    return Readers(
        received=tuple(a and b for a, b in both),
        inputs=tuple(backward[inputs]),
        outputs=tuple(backward[outputs]),
        made=tuple(backward[made]),
    )


def read_by_products(jaxpr: jax.extend.core.Jaxpr, results: Sequence[bool] | None = None) -> list[bool]:
    """Whether nothing but products reads each argument.

    Args:
        jaxpr: The function.
        results: Of each result, whether that holds for it; without them for none.
    """
    narrow: dict[Any, bool] = {}

    def note(variables: Sequence[Any], kinds: Sequence[bool]) -> None:
        for variable, kind in zip(variables, kinds, strict=True):
            if not hasattr(variable, "val"):  # a literal is nobody's
                narrow[variable] = narrow.get(variable, True) and kind

    note(jaxpr.outvars, results or [False] * len(jaxpr.outvars))
    for eqn in reversed(jaxpr.eqns):
        note(eqn.invars, _read_in(eqn, [narrow.get(variable, True) for variable in eqn.outvars]))
    return [narrow.get(variable, True) for variable in jaxpr.invars]


def _read_in(eqn: Any, results: Sequence[bool]) -> list[bool]:
    """Whether nothing but products reads each argument of an equation, there and behind it."""
    name, num = eqn.primitive.name, len(eqn.invars)
    if name in _PRODUCTS:
        return [_takes_16_bits(eqn)] * num
    if name in _MOVING:
        return [all(results)] * num
    called = [body for body in eqn.params.values() if hasattr(body, "eqns") or hasattr(body, "jaxpr")]
    if len(called) == 1:
        body = getattr(called[0], "jaxpr", called[0])
        if (len(body.invars), len(body.outvars)) == (num, len(results)) and name not in _LOOPS:
            return read_by_products(body, results)
    return [False] * num


def _takes_16_bits(product: Any) -> bool:
    precision = product.params.get("precision")
    asked = precision if isinstance(precision, tuple) else (precision,)
    return all(each in (None, jax.lax.Precision.DEFAULT) for each in asked)
