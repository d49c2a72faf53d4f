"""What every emitted `train_jax.py` shares: command line, state, optimizer, weights, the compiler's report on memory.

The program leaves running statistics of batch normalisations alone. Those of weights that are saved are taken anew from
micro-batches that run through the finished model (Wu and Johnson, "Rethinking 'Batch' in BatchNorm",
arXiv:2105.07576, section 3), by what collects them in the bundled executor.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from planner.bridge.torchax_adapter import (
    CHIPS,
    OutOfMemoryError,
    check_installed,
    compiled,
    expect_no_tpu,
    jax_modules,
    named_chips,
)
from planner.core.errors import ExitCode, ModelError, PlannerError, UsageError
from planner.core.values.balance import Balance
from planner.core.values.devices import Accelerator, accelerator
from planner.core.values.printable import printable_lines
from planner.core.values.units import format_bytes
from planner.executor.build.building import check_same_model
from planner.executor.jax.pipeline import JaxPipeline
from planner.executor.keep.weights import first_names, load_weights, whole_state, write_weights
from planner.executor.run.batch_norm import BatchStatistics
from planner.executor.run.parts import micro_batches_of
from planner.files import check_writable, read_balance
from planner.model import Batch, LoadedModel, load_again
from planner.model.calling import arguments_of
from planner.model.precision import converted
from planner.model.statistics import collecting_layers

__all__ = ["CompiledMemory", "JaxArguments", "JaxTraining", "State", "fitting", "jax_arguments", "jax_training"]

_ESTIMATED = 32
"""Micro-batches that running statistics are taken from."""


@dataclass(frozen=True, kw_only=True)
class JaxArguments:
    """The command line of an emitted script."""

    steps: int
    seed: int
    device: str | None
    compile: str | None
    weights: str | None = None
    save: str | None = None


class State(NamedTuple):
    """What a step changes, each array with the stage in front; and what it does not."""

    trained: list[Any]
    optimizer: list[list[Any]]
    fixed: list[Any]


class CompiledMemory(NamedTuple):
    """Of every device of a program, in bytes."""

    held: int
    """Parameters, optimizer state, and the mini-batch."""
    temporary: int


def fitting(found: CompiledMemory, predicted_bytes: int, *, cap_bytes: int, chip: Accelerator) -> tuple[str, ExitCode]:
    """Whether a compiled program fits the plan's cap and the chip: in words, and as an exit code."""
    total = found.held + found.temporary
    limit_bytes, whose = chip.memory_bytes, f"what programs can use of a {chip.name}"
    if cap_bytes <= limit_bytes:
        limit_bytes, whose = cap_bytes, "the plan's cap"
    fits = total <= limit_bytes
    told = (
        f"every device: {format_bytes(total)} (parameters, optimizer and data {format_bytes(found.held)}, "
        f"temporaries {format_bytes(found.temporary)})\n"
        f"predicted: {format_bytes(predicted_bytes)}, {predicted_bytes / total:.2f} of that\n"
        f"{'fits' if fits else 'does not fit'}: {whose} is {format_bytes(limit_bytes)}"
    )
    return told, ExitCode.OK if fits else ExitCode.NO


def jax_arguments(description: str | None, *, steps: int, seed: int) -> JaxArguments:
    """Parses the command line; the defaults are the script's own knobs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=steps, help=f"optimizer steps (default {steps})")
    parser.add_argument("--seed", type=int, default=seed, help=f"of parameters, data and dropout (default {seed})")
    parser.add_argument("--device", choices=("cpu", "tpu", "gpu"), help="which of JAX's platforms; default: its choice")
    parser.add_argument(
        "--compile", metavar="v2", choices=CHIPS, help="only compile for TPUs that are not here: does it fit?"
    )
    parser.add_argument("--weights", metavar="FILE", help="begin with a state dict of the whole model")
    parser.add_argument("--save", metavar="FILE", help="write one in the end; .pt or .safetensors")
    given = parser.parse_args()
    if given.steps < 1:
        parser.error(f"--steps must be at least 1, got {given.steps}")
    return JaxArguments(**vars(given))


@contextmanager
def jax_training(balance_path: str | Path, given: JaxArguments) -> "Iterator[JaxTraining]":
    """The training for the block; errors of ours end the process with one message and exit code 2."""
    try:
        yield JaxTraining(balance_path, given)
    except PlannerError as error:
        hint = f"\n\n{printable_lines(f'hint: {error.hint}')}" if error.hint else ""
        print(f"{printable_lines(f'error: {error}')}{hint}", file=sys.stderr, flush=True)
        sys.exit(ExitCode.ERROR)


class JaxTraining:
    """A plan's program with the model file's optimizer.

    Args:
        balance_path: The balance configuration.
        given: How to run it.

    Raises:
        PlannerError: The model or the plan cannot be run so.
    """

    def __init__(self, balance_path: str | Path, given: JaxArguments) -> None:
        check_installed()
        if given.compile:
            expect_no_tpu()
        self.balance = read_balance(str(balance_path))
        if given.save:
            check_writable(given.save)
        self._seed, self._chip = given.seed, given.compile
        torch.manual_seed(given.seed)  # a model that is made while its file is imported starts from it, too
        self.model = _load(self.balance, Path(balance_path).parent)
        torch.manual_seed(given.seed)
        self._built = built = converted(self.model.build(), self.model.precision)
        layers = self.model.chain(built)
        check_same_model(self.balance, self.model, layers)
        if given.weights:
            load_weights(given.weights, built.state_dict(), first_names(built))
        jax, _ = jax_modules()
        self._jax = jax
        self._update, self._num_states = _optimizer(self.model, built)
        devices = (
            named_chips(given.compile, self.balance.num_stages)
            if given.compile
            else _devices(given.device, self.balance.num_stages)
        )
        self.pipeline = JaxPipeline(self.model, layers, self.balance, devices)
        self._step = jax.jit(self._whole_step, donate_argnums=(0,))

    def begin(self) -> State:
        """The state in front of the first step."""
        trained, fixed = self.pipeline.parameters()
        numpy = self._jax.numpy
        optimizer = [[numpy.zeros_like(array) for array in trained] for _ in range(self._num_states)]
        return State(trained, optimizer, fixed)

    def batches(self, steps: int) -> Iterator[Batch]:
        """`steps` mini-batches: the model's `train_batches`, else its `example_batch`."""
        own = self.model.train_batches
        made = 0
        while made < steps:
            before = made
            for pair in own(self.balance.batch) if own is not None else [self._example(made)]:
                if made == steps:
                    return
                yield Batch(*pair)
                made += 1
            if made == before:
                raise ModelError("`train_batches` is empty")

    def step(self, state: State, inputs: Any, targets: Any, number: int) -> tuple[float, State]:
        """Loss of a mini-batch, and the state after the optimizer's step, the `number`-th from 0."""
        key = self._jax.random.key(self._seed)
        loss, state = self._step(state, *self.pipeline.batch(inputs, targets), key, number)
        return float(loss), state

    def save(self, state: State, path: str) -> None:
        """Writes trained parameters and buffers as one state dict, which the model in one piece takes.

        Args:
            state: After the last step.
            path: Safetensors by its suffix, else `torch.save`.

        Raises:
            FileError: It cannot be written.
        """
        parameters = dict(self._built.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, array in self.pipeline.by_name(state.trained).items():
                parameters[name].copy_(torch.from_numpy(array.astype("float32")))
        write_weights(whole_state(self._built), path)  # first: the host may have no room for what follows
        estimated = self._estimate_statistics()
        if estimated:
            write_weights(whole_state(self._built), path)
        told = f" (running statistics of {estimated} layers: over {_ESTIMATED} micro-batches)" if estimated else ""
        print(f"wrote {path}{told}", flush=True)

    def compiled_memory(self) -> "CompiledMemory":
        """What the compiler says that the step needs on the chips asked for.

        Raises:
            OutOfMemoryError: More than they have.
        """
        memory = compiled(self._lowered()).memory_analysis()
        # State is both an argument and, in the same place, a result.
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return CompiledMemory(held, memory.temp_size_in_bytes)

    def print_memory(self, predicted_bytes: int, cap_bytes: int) -> ExitCode:
        """Compiles the step for the chips asked for, and prints what it needs, what was predicted, and whether it fits.

        Args:
            predicted_bytes: Of every device.
            cap_bytes: The plan's.

        Returns:
            `NO` where the program needs more than the plan's cap, or than a chip of this kind has for programs.
        """
        try:
            found = self.compiled_memory()
        except OutOfMemoryError as error:
            print(f"predicted: {format_bytes(predicted_bytes)}\ndoes not fit: {error}", flush=True)
            return ExitCode.NO
        told, code = fitting(found, predicted_bytes, cap_bytes=cap_bytes, chip=accelerator(f"tpu:{self._chip}"))
        print(told, flush=True)
        return code

    # Private methods

    def _lowered(self) -> Any:
        """The step, ready to be compiled."""
        jax = self._jax
        trained, fixed, inputs, targets, key = self.pipeline.shapes()
        state = State(trained, [list(trained) for _ in range(self._num_states)], fixed)
        number = jax.ShapeDtypeStruct((), jax.numpy.int32, sharding=key.sharding)
        return self._step.lower(state, inputs, targets, key, number)

    def _whole_step(self, state: State, inputs: Any, targets: Any, key: Any, number: Any) -> tuple[Any, State]:
        own = self._jax.random.fold_in(key, number)
        loss, gradients = self.pipeline.gradients(state.trained, state.fixed, inputs, targets, own)
        columns = [
            self._update(parameter, gradient, [column[n] for column in state.optimizer], number + 1)
            for n, (parameter, gradient) in enumerate(zip(state.trained, gradients, strict=True))
        ]
        optimizer = [[states[s] for _, states in columns] for s in range(self._num_states)]
        return loss, State([parameter for parameter, _ in columns], optimizer, state.fixed)

    def _estimate_statistics(self) -> int:
        """Of how many batch normalisations."""
        layers = collecting_layers(self._built)
        if not layers:
            return 0
        steps = -(-_ESTIMATED // self.balance.micro_batches)
        pieces = (micro_batches_of(batch.inputs, self.balance.micro_batches) for batch in self.batches(steps))
        statistics = BatchStatistics(self._built.named_modules())
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for inputs in islice(chain.from_iterable(pieces), _ESTIMATED):
                args, named = arguments_of(inputs)
                with statistics.collecting():
                    self._built(*args, **named)
        momentums = [layer.momentum for layer in layers]
        for layer in layers:
            layer.momentum = 1.0  # nothing of what was there before
        statistics.commit()
        for layer, momentum in zip(layers, momentums, strict=True):
            layer.momentum = momentum
        return len(layers)

    def _example(self, step: int) -> Batch:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed * 1_000_003 + step)
            return self.model.example_batch(self.balance.batch)


# Private functions

_Update = Callable[[Any, Any, list[Any], Any], tuple[Any, list[Any]]]
"""(parameter, gradient, states, number of the step from 1) -> (parameter, states)."""


def _load(balance: Balance, folder: Path) -> LoadedModel:
    path, colon, entry = balance.model.source.rpartition(":")
    source = f"{path if Path(path).is_absolute() else folder / path}{colon}{entry}"
    loaded = load_again(source, balance.model, balance.dtype, optimizer=balance.optimizer)
    return replace(loaded, source=balance.model.source)


def _devices(platform: str | None, num: int) -> Sequence[Any]:
    jax, _ = jax_modules()
    if platform == "cpu" or (platform is None and not _accelerators(jax)):
        # Before JAX has begun: as many devices as stages, on one machine.
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", num)
    devices = jax.devices(platform) if platform else jax.devices()
    if len(devices) < num:
        raise UsageError(f"the plan has {num} stages, JAX finds {len(devices)} devices ({devices[0].device_kind})")
    return list(devices[:num])


def _accelerators(jax: Any) -> bool:
    """Whether there may be any; asking JAX itself would begin it."""
    if jax._src.xla_bridge._backends:
        return bool(jax.default_backend() != "cpu")
    return (
        any(Path("/dev").glob("accel*"))
        or any(Path("/dev").glob("nvidia[0-9]*"))
        or any(Path("/dev/vfio").glob("[0-9]*"))
    )


def _optimizer(model: LoadedModel, built: nn.Module) -> tuple[_Update, int]:
    """The model's optimizer, number by number, and how many numbers of state it has for each.

    Raises:
        UsageError: It is none of those known here, or has options that differ between parameters.
    """
    own = model.build_optimizer(p for p in built.parameters() if p.requires_grad)
    name, options = type(own).__name__, own.defaults
    if len(own.param_groups) > 1:
        raise UsageError(f"the JAX program knows one group of parameters, the model's {name} has several")
    odd = [option for option in ("amsgrad", "maximize", "centered", "nesterov") if options.get(option)]
    if name not in _OPTIMIZERS or odd:
        told = f"{name} with {odd[0]}" if odd else name
        raise UsageError(
            f"the JAX program does not know the optimizer {told}",
            hint=f"one of {', '.join(_OPTIMIZERS)}: `--optimizer`",
        )
    make, num_states = _OPTIMIZERS[name]
    momentum = bool(options.get("momentum"))
    return make(options), num_states if name not in ("SGD", "RMSprop") else num_states + momentum


def _sgd(options: dict[str, Any]) -> _Update:
    def update(parameter: Any, gradient: Any, states: list[Any], number: Any) -> tuple[Any, list[Any]]:
        gradient = gradient + options["weight_decay"] * parameter
        if not options["momentum"]:
            return parameter - options["lr"] * gradient, []
        jax, _ = jax_modules()
        # torch begins with the first gradient as it is.
        damped = jax.numpy.where(number == 1, 1.0, 1.0 - options["dampening"]).astype(gradient.dtype)
        moving = options["momentum"] * states[0] + damped * gradient
        return parameter - options["lr"] * moving, [moving]

    return update


def _rmsprop(options: dict[str, Any]) -> _Update:
    def update(parameter: Any, gradient: Any, states: list[Any], _number: Any) -> tuple[Any, list[Any]]:
        gradient = gradient + options["weight_decay"] * parameter
        square = options["alpha"] * states[0] + (1 - options["alpha"]) * gradient * gradient
        step = gradient / (square**0.5 + options["eps"])
        if not options["momentum"]:
            return parameter - options["lr"] * step, [square]
        moving = options["momentum"] * states[1] + step
        return parameter - options["lr"] * moving, [square, moving]

    return update


def _adam(options: dict[str, Any], *, decoupled: bool) -> _Update:
    beta1, beta2 = options["betas"]

    def update(parameter: Any, gradient: Any, states: list[Any], number: Any) -> tuple[Any, list[Any]]:
        if decoupled:
            parameter = parameter * (1 - options["lr"] * options["weight_decay"])
        else:
            gradient = gradient + options["weight_decay"] * parameter
        mean = beta1 * states[0] + (1 - beta1) * gradient
        square = beta2 * states[1] + (1 - beta2) * gradient * gradient
        scale = ((1 - beta2**number) ** 0.5).astype(parameter.dtype)
        rate = (options["lr"] / (1 - beta1**number)).astype(parameter.dtype)
        return parameter - rate * mean / (square**0.5 / scale + options["eps"]), [mean, square]

    return update


_OPTIMIZERS: dict[str, tuple[Callable[[dict[str, Any]], _Update], int]] = {
    "SGD": (_sgd, 0),
    "RMSprop": (_rmsprop, 1),
    "Adam": (lambda options: _adam(options, decoupled=False), 2),
    "AdamW": (lambda options: _adam(options, decoupled=True), 2),
}
