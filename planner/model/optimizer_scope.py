"""Check that an optimizer updates each parameter independently of the others.

Each rank of a pipeline updates only the parameters of its own stages. The result equals that of a plain loop only if no
parameter's update depends on another parameter. A gradient clip within `step()` violates this, as does a step size
computed from all gradients (D-Adaptation, Prodigy). To check it, a few small parameters get random gradients. They are
updated together, and then in two parts, as two ranks would update them. Parameters, gradients and optimizer state must
be equal.
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from planner.core.errors import ModelError
from planner.model.optimizers import Builder, ModelOptimizer, ParameterGroup

_STEPS = (
    *((1.0, 1.0), (1.0, 1.0), (1e3, 1e-3), (1e3, 1e3), (1e-2, 1e-2), (1.0, 1.0), (1.0, 1.0)),
    *[(1e-3, 1e3), (1e3, 1e-3)] * 5,
)
"""Scales of the gradients of each step, in the first part and in the second.

Some gradients exceed the limit of any gradient clip, others do not. If only one part exceeds the limit, the comparison
also finds a clip by the largest gradient of all parameters. The last steps find one that begins after a few steps."""

_NOT_FINITE = ((1.0, 1.0), (1.0, math.inf))
"""Scales with infinite gradients in one part: if an optimizer skips a parameter for them, it must not skip others."""

_MOST_PARAMETERS = 32
"""Largest number of parameters that are updated in the check; all others are absent."""

_LONGEST = 8
"""Length to which each dimension of a parameter is cut for the check."""

_LIMIT = 1e-5
"""Largest relative difference that can be a rounding error."""

_HINT = (
    "clip with `pipeline.clip_gradients(max_norm)` in train.py instead of within `step()`, and skip steps by the norm "
    "that it returns; else choose an optimizer that steps each parameter by itself (`--optimizer adamw`)"
)

_Item = TypeVar("_Item")


def check_optimizer(build: Builder, parameters: Iterable[Tensor], device: torch.device) -> None:
    """Raise an error if an update of one parameter depends on other parameters.

    Args:
        build: Function that builds the optimizer from parameters.
        parameters: Parameters of the whole model, in the model's order. Their values are not read.
        device: Device on which the optimizer runs.

    Raises:
        ModelError: `step()` uses other parameters, draws random numbers, needs a closure, or fails; or the builder
            reads values of parameters.
    """
    parameters = list(parameters)
    if any(map(is_lazy, parameters)):
        return  # `chain_of` refuses a lazy model, with its own message
    whole = ModelOptimizer(build, parameters)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        sample = _sample(_groups(whole))
        differing = _num_differing(whole, sample, _STEPS, device)
        if not differing:
            with suppress(ModelError):  # an optimizer that raises for an infinite gradient would end any run
                differing = _num_differing(whole, sample, _NOT_FINITE, device)
    if differing:
        raise ModelError(
            f"{whole.name} reads all parameters in `step()` (for a clip, a step size, or a skip), and a rank of a "
            f"pipeline has those of its own stages only: of {len(sample)} parameters that were tried, {differing} are "
            "stepped differently in two parts than together",
            hint=_HINT,
        )


def _num_differing(
    whole: ModelOptimizer, sample: Sequence[Tensor], steps: Sequence[tuple[float, float]], device: torch.device
) -> int:
    together = _stepped(whole, sample, range(len(sample)), steps=steps, device=device)
    apart: dict[int, list[Tensor]] = {}
    for part in (range(0, len(sample), 2), range(1, len(sample), 2)):
        apart |= _stepped(whole, sample, part, steps=steps, device=device)
    return sum(not _is_same(results, apart[n]) for n, results in together.items())


def _groups(whole: ModelOptimizer) -> list[ParameterGroup]:
    try:
        return whole.groups()
    except (ModelError, RuntimeError, NotImplementedError) as error:
        if "meta tensor" not in str(error):
            raise
        hint = "choose parameters by shape, position or an attribute: a rank has no values of other stages' parameters"
        raise ModelError(f"the builder of the optimizer reads values of parameters: {error}", hint=hint) from error


def _sample(groups: Sequence[ParameterGroup]) -> list[Tensor]:
    by_group = [[p for p in group.parameters if p.requires_grad] for group in groups]
    trained = _spread([parameters for parameters in by_group if parameters], _MOST_PARAMETERS // 2)
    each = _MOST_PARAMETERS // max(1, len(trained))
    return [p for parameters in trained for p in _spread(parameters, each)]


def _spread(items: Sequence[_Item], most: int) -> Sequence[_Item]:
    if len(items) <= most:
        return items
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)]


def _stepped(
    whole: ModelOptimizer,
    sample: Sequence[Tensor],
    part: Sequence[int],
    *,
    steps: Sequence[tuple[float, float]],
    device: torch.device,
) -> dict[int, list[Tensor]]:
    tensors = {n: nn.Parameter(_random(sample[n], n).to(device)) for n in part}
    optimizer = whole.build_for((sample[n], tensor) for n, tensor in tensors.items())
    results: dict[int, list[Tensor]] = {n: [tensor] for n, tensor in tensors.items()}
    before = torch.get_rng_state()
    for step, scales in enumerate(steps):
        former = {n: tensor.detach().clone() for n, tensor in tensors.items()}
        for n, tensor in tensors.items():
            tensor.grad = _gradient(sample[n], n, step, scales[n % 2]).to(device)
        _step(optimizer)
        for n, tensor in tensors.items():
            results[n] += [] if tensor.grad is None else [tensor.grad]
            results[n].append(torch.tensor(torch.equal(tensor, former[n])))  # an update may be smaller than `_LIMIT`
        optimizer.zero_grad()
    if not torch.equal(before, torch.get_rng_state()):
        raise ModelError(
            f"{type(optimizer).__name__} draws random numbers in `step()`: ranks would draw different ones than a "
            "plain loop, also for a parameter that two of them share",
            hint="use an optimizer that draws none (`--optimizer adamw`), or draw the noise in the model",
        )
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for n, tensor in tensors.items():
        # A step size that is computed from all parameters is an option of their group.
        for numbers in (optimizer.state.get(tensor, {}), groups.get(id(tensor), {})):
            results[n] += [torch.as_tensor(value) for _, value in sorted(numbers.items()) if _is_number(value)]
    return results


def _step(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    try:
        optimizer.step()
    except Exception as error:  # the user's optimizer may raise any error
        text = str(error).partition("\n")[0]
        if "closure" in text:
            raise ModelError(
                f"{name} needs a closure in `step()`, to compute the loss again; a pipeline computes gradients once "
                f"a step ({text})",
                hint="use an optimizer that steps with existing gradients (`--optimizer adamw`)",
            ) from error
        raise ModelError(
            f"`step()` of {name} raised {type(error).__name__} for small parameters with random gradients: {text}",
            hint="`step()` must work as `build_optimizer` returns it, and for the parameters of one stage alone; else "
            "`--optimizer adamw`",
        ) from error


def _random(like: Tensor, seed: int) -> Tensor:
    shape = [min(size, _LONGEST) for size in like.shape]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(like.dtype)


def _gradient(like: Tensor, n: int, step: int, scale: float) -> Tensor:
    """Return a random gradient of about the same direction in every step, and of random size."""
    steady, noise = _random(like, 1000 + n), _random(like, 2000 + 100 * step + n)
    generator = torch.Generator().manual_seed(100 * step + n)
    size = 10 ** (2 * torch.rand((), generator=generator) - 1.5)
    return (steady + 0.3 * noise) * (scale * size).to(like.dtype)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, Tensor))


def _is_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(_is_close, one, other))


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one.detach()), torch.view_as_real(other.detach())
    if not one.is_floating_point():
        return torch.equal(one, other)
    atol = _LIMIT * float(one.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=_LIMIT, atol=atol, equal_nan=True)
