"""Check that an optimizer updates each parameter independently of the others.

Each rank of a pipeline updates only the parameters of its own stages. The result equals that of a plain loop only if no
parameter's update depends on another parameter. Counterexamples are a gradient clip within `step()`, and a step size
computed from all gradients (D-Adaptation, Prodigy).

The check gives random gradients to a few small parameters. One optimizer updates all of them, and two optimizers update
one half each, like two ranks. Parameters, gradients and optimizer state must be equal. An optimizer may begin to clip
in any later step. The comparison therefore continues alongside a run, except for optimizers of torch.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from inspect import unwrap
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from planner.core.errors import ModelError
from planner.model.optimizers import OptimizerBuilder, ParameterGroup, WholeModelOptimizer
from planner.model.python_state import function_of, variables_read
from planner.model.seeding import preserve_torch_generators

_STEPS = (
    *((1.0, 1.0), (1.0, 1.0), (1e3, 1e-3), (1e3, 1e3), (1e-2, 1e-2), (1.0, 1.0), (1.0, 1.0)),
    *[(1e-3, 1e3), (1e3, 1e-3)] * 5,
)
"""Steps of `check_optimizer`. Each has two factors of random gradients: for parameters with even and odd indices."""
# Some gradients exceed the limit of any gradient clip, others do not. If only one half exceeds the limit, the check
# also finds a clip by the largest gradient of all parameters.

_STEPS_OF_TORCH = _STEPS[1:5]
"""Steps for optimizers of torch. A few are enough: none of these optimizers clips all gradients by a common norm."""

_REPETITIONS = 20
"""Number of repetitions of `_STEPS` for optimizers that are not from torch, which may begin to clip late."""

_NOT_FINITE = ((1.0, 1.0), (1.0, math.inf))
"""Factors that make one half of the gradients infinite. An optimizer must not skip parameters of the other half."""

_MOST_PARAMETERS = 32
"""Largest number of small parameters that `check_optimizer` updates."""

_MOST_WATCHED = 4
"""Largest number of small parameters that are updated in every step of a run (`optimizer_step_check`)."""

_LONGEST = 8
"""Largest length of a dimension of the small parameters that `check_optimizer` updates."""

_LIMIT = 1e-5
"""Largest relative difference that can be a rounding error."""

_HINT = (
    "clip with `pipeline.clip_gradients(max_norm)` in train.py instead of within `step()`, and skip steps by the norm "
    "that it returns; else choose an optimizer that steps each parameter by itself (`--optimizer adamw`)"
)

_Item = TypeVar("_Item")
_Value = Tensor | int | float


def check_optimizer(build: OptimizerBuilder, parameters: Iterable[Tensor], device: torch.device) -> None:
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
    whole = WholeModelOptimizer(build, parameters)
    with preserve_torch_generators():
        sample = _sample(_groups(whole), _MOST_PARAMETERS)
        is_of_torch = _is_of_torch(whole.build_for([]))
        differing = _num_differing(whole, sample, _STEPS_OF_TORCH if is_of_torch else _STEPS, device)
        if not differing:
            with suppress(ModelError):  # an optimizer that raises for an infinite gradient would end any run
                differing = _num_differing(whole, sample, _NOT_FINITE, device)
        if not differing and not is_of_torch:
            sample = _sample(whole.groups(), _MOST_WATCHED)
            with suppress(_FailedStepError):  # it may have a largest number of steps
                differing = _num_differing(whole, sample, _STEPS * _REPETITIONS, device)
    if differing:
        raise _refusal(whole.name, len(sample), differing)


def optimizer_step_check(
    optimizer: torch.optim.Optimizer, build: OptimizerBuilder, parameters: Iterable[Tensor]
) -> Callable[[], None] | None:
    """Return a function that tests the optimizer like `check_optimizer`; None for an optimizer of torch.

    Call the function before each step of a run. It raises a `ModelError` if an update depends on other parameters or on
    random numbers.

    Args:
        optimizer: Optimizer of the run.
        build: Function that builds the optimizer from parameters.
        parameters: Parameters of the whole model, in the model's order. Their values are not read.
    """
    if _is_of_torch(optimizer):
        return None
    return _StepCheck(optimizer, WholeModelOptimizer(build, parameters)).check_next_step


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the functions of other packages that the optimizer calls before and after each step.

    These include hooks for the steps of all optimizers, such as those of `register_optimizer_step_pre_hook`.
    """
    kinds = (getattr(optimizer, f"_optimizer_step_{kind}_hooks", {}) for kind in ("pre", "post"))
    of_all = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    foreign = [hook for hook in of_all if getattr(hook, "__module__", "").partition(".")[0] not in ("torch", "planner")]
    return [hook for hooks in kinds for hook in hooks.values()] + foreign


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    is_changed = "step" in vars(optimizer) or bool(step_hooks(optimizer))
    return type(optimizer).__module__.startswith("torch.optim") and not is_changed


def _refusal(name: str, tried: int, differing: int, step: str = "") -> ModelError:
    return ModelError(
        f"{name} reads all parameters in `step()`{step} (for a clip, a step size, a count, a skip or noise), and a "
        f"rank of a pipeline has those of its own stages only: in a test with {tried} parameters, {differing} were "
        "updated differently when each of two optimizers had one half of them",
        hint=_HINT,
    )


def _num_differing(
    whole: WholeModelOptimizer, sample: Sequence[Tensor], steps: Sequence[tuple[float, float]], device: torch.device
) -> int:
    comparison = _UpdateComparison(whole, sample, device)
    return len(set().union(*(comparison.differing(step, scales) for step, scales in enumerate(steps))))


def _groups(whole: WholeModelOptimizer) -> list[ParameterGroup]:
    try:
        return whole.groups()
    except (ModelError, RuntimeError, NotImplementedError) as error:
        if "meta tensor" not in str(error):
            raise
        hint = "choose parameters by shape, position or an attribute: a rank has no values of other stages' parameters"
        raise ModelError(f"the builder of the optimizer reads values of parameters: {error}", hint=hint) from error


def _sample(groups: Sequence[ParameterGroup], most: int) -> list[Tensor]:
    by_group = [[p for p in group.parameters if p.requires_grad] for group in groups]
    trained = _spread([parameters for parameters in by_group if parameters], most // 2)
    each = most // max(1, len(trained))
    return [p for parameters in trained for p in _spread(parameters, each)]


def _spread(items: Sequence[_Item], most: int) -> Sequence[_Item]:
    if len(items) <= most:
        return items
    return [items[round(n * (len(items) - 1) / (most - 1))] for n in range(most)]


class _StepCheck:
    def __init__(self, optimizer: torch.optim.Optimizer, whole: WholeModelOptimizer) -> None:
        self._optimizer = optimizer
        self._sample = _sample(whole.groups(), _MOST_WATCHED)
        self._comparison: _UpdateComparison | None = _UpdateComparison(whole, self._sample, torch.device("cpu"))
        self._num_steps = 0

    def check_next_step(self) -> None:
        if self._comparison is None:
            return
        with preserve_torch_generators():
            self._comparison.take_numbers(self._optimizer)
            try:
                scales = _STEPS[self._num_steps % len(_STEPS)]
                differing = self._comparison.differing(self._num_steps, scales)
            except _FailedStepError:  # it may need another device, or raise for gradients as large as these
                self._comparison = None
                return
        self._num_steps += 1
        if differing:
            name = type(self._optimizer).__name__
            step = f" from step {self._num_steps} of this run on"
            raise _refusal(name, len(self._sample), len(differing), step)


class _UpdateComparison:
    """Comparison of one optimizer for all parameters with two optimizers for one half of the parameters each."""

    def __init__(self, whole: WholeModelOptimizer, sample: Sequence[Tensor], device: torch.device) -> None:
        self._steady_gradients = [_random(tensor, 1000 + n) for n, tensor in enumerate(sample)]
        every = range(len(sample))
        self._together, *self._apart = (
            _SmallParameters(whole, sample, part, device) for part in (every, every[::2], every[1::2])
        )

    def take_numbers(self, optimizer: torch.optim.Optimizer) -> None:
        # Numbers are, for example, learning rates and step counts.
        for parameters in (self._together, *self._apart):
            parameters.take_numbers(optimizer)

    def differing(self, step: int, scales: tuple[float, float]) -> set[int]:
        """Run a step with one optimizer and with two. Return the indices of the parameters whose results differ.

        Args:
            step: Index of the step, which seeds the random gradients.
            scales: Factor of the gradients of parameters with even indices, and factor for odd indices.
        """
        steady = self._steady_gradients
        gradients = [_gradient(tensor, 100 * step + n, scales[n % 2]) for n, tensor in enumerate(steady)]
        together = self._together.step(gradients)
        apart: dict[int, list[_Value]] = {}
        for parameters in self._apart:
            apart |= parameters.step(gradients)
        return {n for n, results in together.items() if not _is_same(results, apart[n])}


class _SmallParameters:
    """Small random parameters, which represent some of the model's parameters, and their optimizer."""

    def __init__(
        self, whole: WholeModelOptimizer, sample: Sequence[Tensor], part: Sequence[int], device: torch.device
    ) -> None:
        self._initial = {n: _random(sample[n], n).to(device) for n in part}
        self._tensors = {n: nn.Parameter(tensor.clone()) for n, tensor in self._initial.items()}
        self._optimizer = whole.build_for((sample[n], tensor) for n, tensor in self._tensors.items())
        self._shared = _SharedNumbers(type(self._optimizer))

    def take_numbers(self, optimizer: torch.optim.Optimizer) -> None:
        vars(self._optimizer).update(_numbers(vars(optimizer)))
        for group, other in zip(self._optimizer.param_groups, optimizer.param_groups, strict=True):
            group.update(_numbers(other))

    def step(self, gradients: Sequence[Tensor]) -> dict[int, list[_Value]]:
        """Make a step. Return each parameter's new values, gradient, state and options, by the parameter's index."""
        # Each step begins with the initial parameters, so that rounding errors do not add up in a long run.
        for n, tensor in self._tensors.items():
            tensor.data.copy_(self._initial[n])
            tensor.grad = gradients[n].to(tensor.device, copy=True)
        before, shared = torch.get_rng_state(), self._shared.numbers()
        _step(self._optimizer)
        changed = sorted(name for name, *_ in shared ^ self._shared.numbers())
        if changed:
            raise ModelError(
                f'{type(self._optimizer).__name__} changes "{changed[0]}", which all optimizers of its class share, in '
                "`step()`: on several ranks it would have other values than in a plain loop",
                hint="count in an attribute of the optimizer (`self.steps`), or in its `state[parameter]`",
            )
        if not torch.equal(before, torch.get_rng_state()):
            raise ModelError(
                f"{type(self._optimizer).__name__} draws random numbers in `step()`: ranks would draw different ones "
                "than a plain loop, also for a parameter that two of them share",
                hint="use an optimizer that draws none (`--optimizer adamw`), or draw the noise in the model",
            )
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        results: dict[int, list[_Value]] = {}
        for n, tensor in self._tensors.items():
            # An update may be smaller than `_LIMIT`.
            results[n] = [tensor.detach().clone(), torch.equal(tensor, self._initial[n])]
            results[n] += [] if tensor.grad is None else [tensor.grad]
            # A step size that is computed from all parameters is an option of their group.
            for numbers in (self._optimizer.state.get(tensor, {}), groups.get(id(tensor), {})):
                results[n] += [
                    value.clone() if isinstance(value, Tensor) else value
                    for _, value in sorted(numbers.items())
                    if isinstance(value, (int, float, Tensor))
                ]
        self._optimizer.zero_grad()
        return results


class _SharedNumbers:
    """Numbers that all optimizers of a class share: class attributes, and module-level variables that methods read."""

    def __init__(self, kind: type) -> None:
        self._classes = [cls for cls in kind.__mro__ if cls is not object and not cls.__module__.startswith("torch.")]
        functions = [f for cls in self._classes for value in vars(cls).values() if (f := function_of(value))]
        # The `step` in the class of an optimizer is wrapped in a function of torch.
        variables = variables_read({}, *functions, *map(unwrap, functions))
        files = {cls.__module__ for cls in self._classes} & sys.modules.keys()
        self._read = [(file, name) for file, _, name in (each.partition(":") for each in variables) if file in files]

    def numbers(self) -> set[tuple[str, str, int | float]]:
        """Return names, owners and values of the numbers."""
        owners = {f"{cls.__module__}.{cls.__qualname__}": vars(cls) for cls in self._classes}
        found = {(name, owner, n) for owner, values in owners.items() for name, n in _numbers(values).items()}
        for file, name in self._read:
            found |= {(name, file, n) for n in _numbers({name: vars(sys.modules[file]).get(name)}).values()}
        return found


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float))}


class _FailedStepError(ModelError):
    """Error that `step()` of an optimizer failed for small parameters with random gradients."""


def _step(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    try:
        optimizer.step()
    except Exception as error:  # the user's optimizer may raise any error
        text = str(error).partition("\n")[0]
        if "closure" in text:
            raise _FailedStepError(
                f"{name} needs a closure in `step()`, to compute the loss again; a pipeline computes gradients once "
                f"a step ({text})",
                hint="use an optimizer that steps with existing gradients (`--optimizer adamw`)",
            ) from error
        raise _FailedStepError(
            f"`step()` of {name} raised {type(error).__name__} for small parameters with random gradients: {text}",
            hint="`step()` must work as `build_optimizer` returns it, and for the parameters of one stage alone; else "
            "`--optimizer adamw`",
        ) from error


def _random(like: Tensor, seed: int) -> Tensor:
    shape = [min(size, _LONGEST) for size in like.shape]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(like.dtype)


def _gradient(steady: Tensor, seed: int, scale: float) -> Tensor:
    # The direction of the gradient hardly changes between steps, but its size does.
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(steady.shape, generator=generator).to(steady.dtype)
    size: float = 10 ** (2 * torch.rand((), generator=generator).item() - 1.5)
    return (steady + 0.3 * noise) * (scale * size)


def _is_same(one: Sequence[_Value], other: Sequence[_Value]) -> bool:
    return len(one) == len(other) and all(map(_is_close, one, other))


def _is_close(one: _Value, other: _Value) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return _are_close_tensors(one, other)
    if isinstance(one, Tensor) or isinstance(other, Tensor) or type(one) is not type(other):
        return False
    return one == other or math.isclose(one, other, rel_tol=_LIMIT) or (math.isnan(one) and math.isnan(other))


def _are_close_tensors(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    if one.is_complex():
        one, other = torch.view_as_real(one.detach()), torch.view_as_real(other.detach())
    if not one.is_floating_point():
        return torch.equal(one, other)
    atol = _LIMIT * float(one.detach().nan_to_num(0.0, 0.0, 0.0).abs().max()) if one.numel() else 0.0
    return torch.allclose(one, other, rtol=_LIMIT, atol=atol, equal_nan=True)
