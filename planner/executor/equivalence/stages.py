"""Train one rank of a pipeline, and compare it with the reference (the model in a plain training loop).

Each step is compared in two phases:

    forwards, backwards    loss, gradients, buffers and Python numbers in modules are compared
    optimizer              parameters and the optimizer's state are compared; of large tensors, only a sample

After the first phase, the rank replaces its gradients by the reference's, so that rounding errors do not accumulate.
"""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from planner.core.values.balance import Balance
from planner.executor.build.initial_values import digest_of_tensor
from planner.executor.equivalence.differences import (
    NUMBER,
    StageDifferences,
    compare_gradients,
    compare_update,
)
from planner.executor.equivalence.isolation import return_freed_blocks_to_system
from planner.executor.pipeline import Pipeline
from planner.model.chain import Chain
from planner.model.ghosts import refuse_other_stages_tensors
from planner.model.gradient_files import keep_gradients_in_files
from planner.model.load import LoadedModel
from planner.model.module_tensors import attribute_tensors
from planner.model.python_state import (
    LENGTH,
    TENSOR,
    TENSORS,
    numbers_in_attributes,
    numbers_in_hooks,
    numbers_in_user_files,
    variables_read,
    without_leftover_tensors,
)
from planner.model.reference import ReferenceOptions
from planner.model.reference_state import (
    ReferenceState,
    largest_magnitude,
    optimizer_state,
    sampled_values,
    wait_for_state,
)
from planner.model.seeding import example_mini_batch


@dataclass(frozen=True, kw_only=True)
class PipelineTrial:
    """Pipeline to train and to compare with the reference: model, cuts and options."""

    loaded: LoadedModel
    chain: Chain
    """Chain on the meta device."""
    balance: Balance
    options: ReferenceOptions
    reference: Path
    """Folder in which the reference writes its states."""
    limit_s: float


def run_rank(trial: PipelineTrial, rank: int, rendezvous: Path, _connection: Connection) -> StageDifferences:
    """Train the stages of one rank, and return their differences from the unpartitioned model.

    Args:
        trial: Pipeline to train.
        rank: Rank of this process.
        rendezvous: File through which the ranks find each other.
    """
    if not trial.options.updates:  # the model barely fits in memory
        return_freed_blocks_to_system()
    world = trial.balance.num_processes
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    store = dist.FileStore(str(rendezvous), world)  # type: ignore[attr-defined]  # torch lists not all that is public
    timeout = timedelta(seconds=trial.limit_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
    pipeline = Pipeline(trial.balance, seed=trial.options.seed, device="cpu", built=(trial.loaded, trial.chain))
    return _RankTraining(trial, pipeline).train()


class _RankTraining:
    def __init__(self, trial: PipelineTrial, pipeline: Pipeline) -> None:
        self._trial, self._pipeline = trial, pipeline
        # A tied tensor may have different names on different ranks, so use its first name.
        first = pipeline.canonical_names
        self._named = {first.get(name, name): parameter for name, parameter in pipeline.named_parameters()}
        self._found = StageDifferences(receives_gradients=all(m.receives_gradients for m in pipeline.modules))
        self._before = self._wait_for_reference_state("initial")
        self._kept = self._kept_tensors()
        self._in_file: dict[str, float] = {}
        self._last_numbers: Mapping[str, float] | None = None

    def train(self) -> StageDifferences:
        pipeline, loaded, options = self._pipeline, self._trial.loaded, self._trial.options
        self._begin_as_reference()
        at_start = self._file_numbers()
        if not options.updates:
            keep_gradients_in_files(self._named.values(), self._trial.reference)
        optimizer = pipeline.optimizer(loaded.build_optimizer) if options.updates else None
        for step in range(options.steps + options.late_steps):
            if not wait_for_state(self._trial.reference, f"gradients-{step}"):
                break
            self._found.late_step = step + 1 if step >= options.steps else 0
            batch = example_mini_batch(
                loaded, options.micro_batches * options.micro_batch_size, seed=options.seed, step=step
            )
            inputs, targets = pipeline.own_part(*batch)
            versions = self._version_counters()
            with pipeline.step(inputs, targets) as loss:
                now = self._version_counters()
                self._found.writes_state |= any(now.get(key, version) != version for key, version in versions.items())
                self._compare_step(loss, step, at_start)
                if optimizer is not None:
                    self._update(optimizer, step)
        if optimizer is not None and self._found.late_step:
            self._compare_update(optimizer, self._found.late_step - 1)
        pipeline.close()
        return self._found

    def _update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        with refuse_other_stages_tensors(self._named):
            optimizer.step()
        if not self._found.late_step:  # of the late steps, only the last update is compared
            self._compare_update(optimizer, step)
        optimizer.zero_grad()

    def _wait_for_reference_state(self, name: str) -> ReferenceState:
        wait_for_state(self._trial.reference, name)
        return ReferenceState.load(self._trial.reference / name)

    def _begin_as_reference(self) -> None:
        """Set parameters and buffers to the reference's initial values, and record which values differed."""
        if self._trial.options.lean:
            self._before.use_as_parameters(self._named)
        # Values may differ if an unseeded generator made them. The check accepts this, unless copies of one tensor on
        # several ranks also differ from each other.
        for name, tensor in self._held_tensors().items():
            kind = "parameter" if name in self._named else "buffer"
            expected = self._before.tensors.get(f"{kind}:{name}")
            if expected is None or expected.shape != tensor.shape or tensor.is_meta:
                continue
            is_lent = tensor.data_ptr() == expected.data_ptr()
            if not is_lent and not torch.equal(tensor.detach(), expected):
                self._found.own_values[self._pipeline.canonical_names.get(name, name)] = digest_of_tensor(tensor)
                tensor.detach().copy_(expected)

    def _held_tensors(self) -> dict[str, Tensor]:
        buffers = {n: b for module in self._pipeline.modules for n, b in module.named_buffers(remove_duplicate=False)}
        return {**buffers, **self._named}

    def _version_counters(self) -> dict[int, int]:
        loose = [tensor for module in self._pipeline.modules for tensor in attribute_tensors(module)]
        return {id(tensor): tensor._version for tensor in (*self._held_tensors().values(), *loose)}

    def _compare_step(self, loss: float, step: int, at_start: dict[str, float]) -> None:
        reference = self._wait_for_reference_state(f"gradients-{step}")
        differences, pipeline = self._found, self._pipeline
        if pipeline.is_last:
            differences.compare_number("the loss", loss, reference.loss)
        if self._trial.options.updates:
            compare_gradients(differences, {n: p.grad for n, p in self._named.items() if p.requires_grad}, reference)
        else:
            self._compare_and_release(step)
        for name, buffer in self._held_tensors().items():
            if f"buffer:{name}" in reference.tensors:
                expected = reference.tensors[f"buffer:{name}"]
                differences.compare_tensor(f'the buffer "{name}"', buffer, expected, _least_divisor(name, reference))
        self._compare_numbers(reference, at_start)
        for name, parameter in self._named.items() if self._trial.options.updates else ():
            gradient = reference.tensors.get(f"gradient:{name}")
            if gradient is not None and parameter.grad is not None:
                parameter.grad.copy_(gradient)

    def _compare_and_release(self, step: int) -> None:
        for name, parameter in self._named.items():
            if parameter.requires_grad:
                # Load the state for each gradient separately, because pages of the file are released with the state:
                # the model barely fits in memory.
                reference = self._wait_for_reference_state(f"gradients-{step}")
                compare_gradients(self._found, {name: parameter.grad}, reference)
                parameter.grad = None

    def _kept_tensors(self) -> frozenset[str]:
        outline = self._trial.chain.outline
        at_start = frozenset(self._before.numbers)
        return at_start if outline is None else at_start & {state.name + TENSOR for state in outline.recording.states}

    def _file_numbers(self) -> dict[str, float]:
        return numbers_in_user_files(self._trial.chain.model, self._trial.loaded.loss_fn)

    def _compare_numbers(self, reference: ReferenceState, at_start: dict[str, float]) -> None:
        differences, used = self._found, set[str]()
        is_recomputed = self._trial.balance.stages[0].recompute != "never"
        counts = self._changed_counts(reference)
        for module in self._pipeline.modules:
            finished = module.finished_modules()
            used |= variables_read(finished)
            every = {**numbers_in_attributes(finished), **numbers_in_hooks(finished)}
            self._compare_counts(every, reference, [name for name in counts if self._owner(name) in finished])
            for name, number in without_leftover_tensors(every, self._kept).items():
                what = f'the tensor "{name.removesuffix(TENSOR)}"' if name.endswith(TENSOR) else f'{NUMBER} "{name}"'
                # An entry that began as a number may hold a tensor in the reference. A stage has deleted this tensor.
                if not name.endswith(LENGTH) or _num_entries(every, name) != _num_entries(reference.numbers, name):
                    # Stages of a Sequential delete no tensors, so a number that is missing there is a tensor.
                    missing = math.inf if self._trial.chain.outline is None and name in self._kept else number
                    differences.compare_number(what, number, reference.numbers.get(name, missing))

        def is_read(name: str) -> bool:
            file, _, variable = name.rpartition(":")
            return f"{file}:{variable.partition('.')[0]}" in used

        in_files = self._file_numbers()
        self._compare_counts(in_files, reference, filter(is_read, counts))
        for name, number in without_leftover_tensors(in_files, at_start).items():
            variable = name.rpartition(":")[2]
            if number != at_start.get(name) or is_read(name):
                what = "tensor" if name.endswith(TENSOR) else "number"
                what = f'the module-level {what} "{variable.removesuffix(TENSOR)}"'
                missing = math.inf if name in at_start else number  # it has become a tensor in the reference
                differences.compare_number(what, number, reference.numbers.get(name, missing))
                if differences.late_step and is_recomputed and number != self._in_file.get(name, number):
                    # A recomputation may run after the change, and its first forward before.
                    differences.record(f"{what}, which `forward` changes,", math.inf)
            self._in_file[name] = number

    def _changed_counts(self, reference: ReferenceState) -> list[str]:
        # A forward may leave tensors behind, which a stage deletes. But if their count changes from step to step in the
        # reference, later forwards may read them.
        before = reference.numbers if self._last_numbers is None else self._last_numbers
        self._last_numbers = reference.numbers
        return [n for n, count in reference.numbers.items() if n.endswith(TENSORS) and count != before.get(n, 0)]

    def _compare_counts(self, numbers: Mapping[str, float], reference: ReferenceState, names: Iterable[str]) -> None:
        for name in names:
            # A stage may also delete the container, or not make it.
            what = f'the number of tensors in "{name.rpartition(":")[2].removesuffix(TENSORS)}"'
            self._found.compare_number(what, numbers.get(name, 0), reference.numbers[name])

    def _owner(self, name: str) -> str | None:
        """Return the path of the `nn.Module` to which a recorded number belongs; None for a variable of a Python file.

        `name` is a key of `ReferenceState.numbers`.
        """
        paths = (path for path, _ in self._trial.chain.model.named_modules() if name.startswith(f"{path}."))
        return None if ":" in name else max(paths, key=len, default=None)

    def _compare_update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        reference, differences = self._wait_for_reference_state(f"updated-{step}"), self._found
        for name, parameter in self._named.items():
            expected, before = reference.tensors[f"parameter:{name}"], self._before.tensors[f"parameter:{name}"]
            assert expected is not None
            assert before is not None
            what = f'the updated parameter "{name}"'
            compare_update(
                differences, what, sampled_values(parameter), expected=expected, before=sampled_values(before)
            )
        tensors, groups = optimizer_state(optimizer, self._named)
        of_ours = {
            key for key in reference.tensors if key.startswith("optimizer:") and _split_state_key(key)[0] in self._named
        }
        for key in sorted(of_ours | tensors.keys()):
            name, kind = _split_state_key(key)
            what = f'the optimizer\'s "{kind}" of "{name}"'
            ours = tensors.get(key)
            if key not in reference.tensors:
                what += ", which gets no gradient in a plain loop (freeze it, `requires_grad_(False)`),"
            differences.compare_tensor(what, None if ours is None else sampled_values(ours), reference.tensors.get(key))
        for name, options in groups.items():
            for key, value in options.items():
                expected_option = reference.groups.get(name, {}).get(key, value)
                differences.compare_number(f'the optimizer\'s "{key}" for "{name}"', value, expected_option)
        self._before = reference


def _num_entries(numbers: Mapping[str, float], length: str) -> float:
    return numbers.get(length, 0) + numbers.get(length.removesuffix(LENGTH) + TENSORS, 0)


def _least_divisor(name: str, reference: ReferenceState) -> float:
    # A running mean may be near 0: its error is compared with 1 % of the largest running standard deviation.
    variance = reference.tensors.get(f"buffer:{name.removesuffix('running_mean')}running_var")
    return (
        0.0 if not name.endswith("running_mean") or variance is None else 0.01 * math.sqrt(largest_magnitude(variance))
    )


def _split_state_key(key: str) -> tuple[str, str]:
    name, _, kind = key.removeprefix("optimizer:").rpartition(":")
    return name, kind
