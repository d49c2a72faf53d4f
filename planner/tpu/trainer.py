"""Training in an emitted `train_jax.py`: model, batches, weights, and the compiler's memory report.

The program does not update the running statistics of batch normalization. Before weights are saved, the statistics are
estimated from micro-batches that run through the trained model, with the code of the bundled executor. The method is
that of Wu and Johnson, "Rethinking 'Batch' in BatchNorm", arXiv:2105.07576, section 3.
"""

from collections.abc import Iterator
from itertools import chain, islice, starmap
from pathlib import Path
from typing import Any, NamedTuple

import jax
import torch
from jax import Array
from jax import numpy as jnp

from planner.core.errors import ExitCode
from planner.core.values.devices import accelerator
from planner.core.values.units import format_bytes
from planner.executor.build.building import check_same_model
from planner.executor.job import load_planned_model
from planner.executor.keep.weights import canonical_names, load_weights, model_state_dict, saved_tensors, write_weights
from planner.executor.run.loader import repeat_train_batches
from planner.executor.run.parts import micro_batches_of
from planner.files import check_writable, read_balance
from planner.model import Batch
from planner.model.batch_norm import BatchStatistics
from planner.model.calling import arguments_of
from planner.model.precision import convert_if_needed
from planner.model.seeding import example_mini_batch
from planner.model.state import trained_batch_norms
from planner.tpu.chips import chip_devices, platform_devices
from planner.tpu.compiler import OutOfMemoryError
from planner.tpu.optimizers import optimizer_rule
from planner.tpu.pipeline import JaxPipeline
from planner.tpu.programs import compile_lowered, compiler_options_for
from planner.tpu.stage import StageInput
from planner.tpu.training import CompiledMemory, JaxArguments, fit_report


class TrainingState(NamedTuple):
    """Parameters, buffers and optimizer state. The stage is the first dimension of each array."""

    trained: list[Array]
    optimizer: list[list[Array]]
    fixed: list[Array]


_NUM_ESTIMATE = 32
"""Number of micro-batches from which running statistics are estimated."""


class JaxTraining:
    """Training of a plan's JAX program with the optimizer of the model file.

    The random numbers of a step depend only on the seed and the step's index.

    Raises:
        PlannerError: The model or the plan cannot run as one JAX program.
    """

    def __init__(self, balance_path: str | Path, arguments: JaxArguments) -> None:
        self.balance = read_balance(str(balance_path))
        if arguments.save:
            check_writable(arguments.save)
        self._seed, self._chip = arguments.seed, arguments.compile
        torch.manual_seed(self._seed)  # before the model file is imported, because the import may build the model
        self.model = load_planned_model(self.balance, Path(balance_path).parent)
        torch.manual_seed(self._seed)
        self._built = built = convert_if_needed(self.model.build(), self.model.precision)
        layers = self.model.chain(built)
        check_same_model(self.balance, self.model, layers)
        if arguments.weights:
            casts = load_weights(arguments.weights, saved_tensors(built), canonical_names(built), built)
            if casts:
                print(f"cast on loading {arguments.weights}: {', '.join(casts)}", flush=True)
        self._rule = optimizer_rule(self.model.build_optimizer, list(built.parameters()))
        devices = (
            chip_devices(self._chip, self.balance.num_stages)
            if self._chip
            else platform_devices(arguments.device, self.balance.num_stages)
        )
        self.pipeline = JaxPipeline(self.model, layers, self.balance, devices)
        self._jitted = jax.jit(self._updated, donate_argnums=(0,), compiler_options=compiler_options_for(devices[0]))

    def begin(self) -> TrainingState:
        """Return the training state before the first step: the model's parameters, and zeros for the optimizer."""
        trained, fixed = self.pipeline.parameters()
        states = [[jnp.zeros_like(array) for array in trained] for _ in range(self._rule.num_states)]
        return TrainingState(trained, states, fixed)

    def batches(self, steps: int) -> Iterator[Batch]:
        """Yield `steps` mini-batches from the model's `train_batches`; without it, repeat its `example_batch`."""
        if self.model.train_batches is not None:
            yield from starmap(Batch, islice(repeat_train_batches(self.model, self.balance.batch), steps))
        else:
            for step in range(steps):
                yield example_mini_batch(self.model, self.balance.batch, seed=self._seed, step=step)

    def step(self, state: TrainingState, inputs: Any, targets: Any, number: int) -> tuple[float, TrainingState]:
        """Return the loss of a mini-batch of torch tensors, and the state after one step on it.

        Args:
            state: State before the step.
            inputs: Inputs of the mini-batch.
            targets: Targets of the mini-batch.
            number: Index of the step, from 0.
        """
        batch = StageInput(*self.pipeline.split_batch(inputs, targets), jax.random.key(self._seed))
        loss, state = self._jitted(state, batch, number)
        return float(loss), state

    def save(self, state: TrainingState, path: str) -> None:
        """Write trained parameters and buffers to a state dict: safetensors or `torch.save`, by the suffix of `path`.

        Raises:
            FileError: The file cannot be written.
        """
        parameters = dict(self._built.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, array in self.pipeline.arrays_by_name(state.trained).items():
                parameters[name].copy_(torch.from_numpy(array.astype("float32")))
        write_weights(model_state_dict(self._built), path)  # before the host may run out of memory in the estimation
        estimated = self._estimate_statistics()
        if estimated:
            write_weights(model_state_dict(self._built), path)
        text = f" (running statistics of {estimated} layers: over {_NUM_ESTIMATE} micro-batches)" if estimated else ""
        print(f"wrote {path}{text}", flush=True)

    def compiled_memory(self) -> CompiledMemory:
        """Return the memory that the compiler reports for the step on the TPU that `train_jax.py --compile` names.

        Raises:
            OutOfMemoryError: The step needs more memory than the chips have.
        """
        trained, fixed, batch = self.pipeline.argument_shapes()
        state = TrainingState(trained, [list(trained) for _ in range(self._rule.num_states)], fixed)
        number = jax.ShapeDtypeStruct((), jnp.int32, sharding=batch.key.sharding)
        memory = compile_lowered(self._jitted.lower(state, batch, number)).memory_analysis()
        # The state is an argument, and a result in the same memory.
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return CompiledMemory(held, memory.temp_size_in_bytes)

    def print_memory(self, predicted_bytes: int, plan_bytes: int) -> ExitCode:
        """Print the memory of the step on the TPU that `train_jax.py --compile` names, and whether the step fits.

        Return `OK` if it fits into the chip's memory and the plan's limit `plan_bytes` per device, otherwise `NO`.
        """
        try:
            needed = self.compiled_memory()
        except OutOfMemoryError as error:
            print(f"predicted: {format_bytes(predicted_bytes)}\ndoes not fit: {error}", flush=True)
            return ExitCode.NO
        text, code = fit_report(needed, predicted_bytes, plan_bytes=plan_bytes, chip=accelerator(f"tpu:{self._chip}"))
        print(text, flush=True)
        return code

    def _updated(self, state: TrainingState, batch: StageInput, number: Array) -> tuple[Array, TrainingState]:
        batch = batch._replace(key=jax.random.fold_in(batch.key, number))
        loss, gradients = self.pipeline.loss_and_gradients(state.trained, state.fixed, batch)
        columns = [
            self._rule.update(parameter, gradient, [column[n] for column in state.optimizer], number + 1)
            for n, (parameter, gradient) in enumerate(zip(state.trained, gradients, strict=True))
        ]
        optimizer = [[states[s] for _, states in columns] for s in range(self._rule.num_states)]
        return loss, TrainingState([parameter for parameter, _ in columns], optimizer, state.fixed)

    def _estimate_statistics(self) -> int:
        layers = trained_batch_norms(self._built)
        if not layers:
            return 0
        steps = -(-_NUM_ESTIMATE // self.balance.micro_batches)
        pieces = (micro_batches_of(batch.inputs, self.balance.micro_batches) for batch in self.batches(steps))
        statistics = BatchStatistics(self._built.named_modules())
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for inputs in islice(chain.from_iterable(pieces), _NUM_ESTIMATE):
                args, named = arguments_of(inputs)
                with statistics.collecting():
                    self._built(*args, **named)
        momentums = [layer.momentum for layer in layers]
        for layer in layers:
            layer.momentum = 1.0  # replace the previous statistics
        statistics.update_running_statistics()
        for layer, momentum in zip(layers, momentums, strict=True):
            layer.momentum = momentum
        return len(layers)
