"""Profile backend that takes the costs of layers from the TPU's compiler. No TPU needs to be attached.

Each layer is compiled as several executables (`planner.tpu.layer_programs`). Layers with equal operators and shapes are
compiled once. For each executable, the compiler reports the bytes of arguments, results and temporaries, including
padding, and an estimate of the run time. The optimizer step for a layer's parameters is also an executable
(`planner.tpu.optimizers`).

If a TPU is attached, the executables run on the TPU, and their times are measured. Results for chips that are not
attached are cached on disk, so an interrupted profile does not compile them again.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from planner.core.cost.storages import CrossingStorages
from planner.core.errors import UsageError
from planner.core.extras import check_installed
from planner.core.values.cluster import ExecutorCost
from planner.core.values.devices import Accelerator, accelerator
from planner.core.values.profile import Device, LayerProfile, ProgramMemory
from planner.model.load import LoadedModel
from planner.profile.backends.estimated import GhostMeter, as_ghosts_if_lean
from planner.profile.layers import BackendResult, MeasuredCosts, layer_profiles
from planner.profile.memory import measure_weight_casts
from planner.profile.optimizer import OptimizerCost, trained_parameters
from planner.profile.records import LayerAtSize, LayerRecords, MeasurementHooks, record_layers
from planner.profile.task import ProfilingTask
from planner.profile.timing import LayerTimes
from planner.profile.units import LayerKey
from planner.tpu.compiler import Compiler
from planner.tpu.extra import chip_of_device, disable_tpu_search
from planner.tpu.optimizers import OptimizerRule, optimizer_rule
from planner.tpu.outcomes import CompiledLayer

_TPU = "tpu:"
_PRECISIONS = ("", "fp32", "bf16")


def backend_of(name: str) -> "CompiledBackend":
    """Return the backend for the attached TPU (`tpu`), or for another chip (such as `tpu:v2`).

    Raises:
        UsageError: No TPU is attached, or the chip is unknown.
        MissingPackageError: A package of the extra `tpu` is not installed.
    """
    check_installed("tpu")
    if name == "tpu":
        return CompiledBackend.of_attached()
    disable_tpu_search()
    return CompiledBackend.of_absent(accelerator(name))


class CompiledBackend:
    """Profile backend that compiles layers for a `chip` such as `v2`. Without a chip, it uses the attached TPU."""

    device = torch.device("cpu")

    def __init__(self, described: Device, rates: Accelerator, chip: str = "") -> None:
        self._described, self._rates, self._chip = described, rates, chip

    @classmethod
    def of_absent(cls, absent: Accelerator) -> "CompiledBackend":
        """Return the backend for a TPU that is not attached.

        Links get the chip's nominal speed, and the executor is assumed to take no time.
        """
        described = Device(
            kind="tpu",
            name=absent.full_name,
            memory_bytes=absent.memory_bytes,
            how="compiled",
            executor=ExecutorCost(overhead_us=0.0, link=absent.link),
        )
        return cls(described, absent, absent.name.removeprefix(_TPU))

    @classmethod
    def of_attached(cls) -> "CompiledBackend":
        """Return the backend for the attached TPU.

        Raises:
            UsageError: No TPU is attached.
        """
        from planner.tpu.chips import attached_tpu  # noqa: PLC0415 - jax

        name, memory_bytes = attached_tpu()
        rates = accelerator(f"{_TPU}{chip_of_device(name) or 'v2'}")
        return cls(Device(kind="tpu", name=name, memory_bytes=memory_bytes), rates)

    def describe(self) -> Device:
        """Return a description of the TPU, for the field `device` of a profile."""
        return self._described

    def check(self, loaded: LoadedModel, *, lean: bool) -> None:  # noqa: ARG002
        """Raise `UsageError` if the model is trained under autocast, which TPUs do not support.

        Args:
            loaded: The model.
            lean: True if the model's parameters have no values; not used.

        Raises:
            UsageError: The model is trained under autocast.
        """
        if loaded.precision not in _PRECISIONS:
            raise UsageError(
                f"`--dtype {loaded.precision}`: autocast is a feature of torch, which programs for TPUs lack",
                hint="use `--dtype bf16` or `--dtype fp32`",
            )

    def measure(self, task: ProfilingTask) -> BackendResult:
        """Compile each layer at each micro-batch size, and the optimizer steps. Equal layers are compiled once."""
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "gpipe-plan", "tpu")
        compiler = Compiler(self._chip, self._rates, folder, task.options.repeats)
        rule = optimizer_rule(task.loaded.build_optimizer, list(task.chain.model.parameters()))
        layers: dict[LayerKey, CompiledLayer] = {}
        hooks = MeasurementHooks(
            device=self.device, record=partial(_compile, task=task, compiler=compiler, layers=layers)
        )
        with as_ghosts_if_lean(task):
            records = record_layers(task, hooks)
            distinct = records.distinct
            optimizer = _optimizer_costs(records, compiler, rule)
            costs = MeasuredCosts(
                records=records,
                casts_bytes=records.measure_distinct(partial(measure_weight_casts, meter=GhostMeter())),
                # A program writes into no buffer.
                rewritten_bytes=dict.fromkeys(distinct, 0),
                idle=dict.fromkeys(distinct, ()),  # a program computes all gradients
                optimizer=[optimizer[unit.digest] for unit in records.units],
                optimizer_boundary_peaks=[0] * len(records.units),
                flops=dict.fromkeys(distinct, 0),
                times={
                    key: LayerTimes(forward_us=layers[key].forward_us, backward_us=layers[key].backward_us, spread=0.0)
                    for key in records.inputs
                },
            )
            profiles = layer_profiles(task, costs)
        chains = [[layers[profile.digest, size] for profile in profiles] for size in records.sizes]
        kept = list(map(_outputs_kept_for_backward, chains))
        received = list(map(_received_sizes, chains))
        last = records.inputs[records.units[-1].digest, records.sizes[-1]]
        num_targets = sum(isinstance(target, Tensor) for target in tree_leaves(last.targets))
        return BackendResult(
            sizes=records.sizes,
            optimizer_peaks_add=False,  # a program updates one array after another
            layers=tuple(
                _with_compiled_memory(
                    profile,
                    task.buffer_bytes[profile.name],
                    [layers[profile.digest, size] for size in records.sizes],
                    stored_outputs=[of_size[n] for of_size in kept],
                    received_sizes=[of_size[n] for of_size in received],
                    is_first=n == 0,
                    num_targets=num_targets if n == len(profiles) - 1 else 0,
                )
                for n, profile in enumerate(profiles)
            ),
        )


def _compile(
    jobs: Sequence[LayerAtSize], task: ProfilingTask, compiler: Compiler, layers: dict[LayerKey, CompiledLayer]
) -> None:
    _, size = jobs[0].key
    task.steps.begin(f"{len(jobs)} layers of {size} samples", size * len(jobs))
    for n, layer in compiler.compile_layers([(job.unit, job.received) for job in jobs]):
        layers[jobs[n].key] = layer
        task.measurements.memory[jobs[n].key] = layer.memory_detail()
        task.steps.end(jobs[n].unit.name, size)


def _with_compiled_memory(
    profile: LayerProfile,
    buffer_bytes: int,
    compiled: Sequence[CompiledLayer],
    *,
    stored_outputs: Sequence[Mapping[int, bool]],
    received_sizes: Sequence[Sequence[tuple[int, int]]],
    is_first: bool,
    num_targets: int,
) -> LayerProfile:
    """Return `profile` with the memory that the compiler reported, in the field `program`.

    `compiled`, `stored_outputs` and `received_sizes` have one item per micro-batch size. The last two are described in
    `CompiledLayer.memory_in_program`. The last `num_targets` inputs of the layer are targets of the loss.
    """
    programs = [
        _program(layer, stored_outputs[place], received_sizes[place], is_first=is_first, num_targets=num_targets)
        for place, layer in enumerate(compiled)
    ]
    return replace(
        profile,
        buffer_bytes=buffer_bytes,
        forward_flops=tuple(round(layer.flops) for layer in compiled),
        detail=(),
        program=tuple(programs),
    )


def _outputs_kept_for_backward(compiled: Sequence[CompiledLayer]) -> list[dict[int, bool]]:
    """Return, for each layer, the outputs that the backward of any layer reads.

    The key is the output's index. The value is True if all backwards read the output only as a matmul operand. If
    several outputs share a storage, only one of them is listed.
    """
    storages = CrossingStorages([layer.memory_detail() for layer in compiled])
    wide = {
        storage
        for layer, received in zip(compiled, storages.received, strict=True)
        for storage, kept, narrow in zip(received, layer.kept_inputs, layer.narrow_inputs, strict=False)
        if kept and not narrow
    }
    kept_outputs: list[dict[int, bool]] = [{} for _ in compiled]
    for storage in storages.storages:
        if storage.kept and storage.origin >= 0:
            array = compiled[storage.origin].output_kinds[storage.place]
            kept_outputs[storage.origin][storage.place] = array.loop_bytes < array.bytes and storage not in wide
    return kept_outputs


def _received_sizes(compiled: Sequence[CompiledLayer]) -> list[list[tuple[int, int]]]:
    """Return, per layer, two sizes of each received tensor in bytes, as `CompiledLayer.memory_in_program` reads them.

    The first is the size as sent. Layers that read the tensor may need different memory layouts. The second is the size
    in the largest of these layouts.
    """
    wanted: list[Sequence[int]] = [compiled[-1].wanted]
    for layer in reversed(compiled[:-1]):
        sizes = list(layer.wanted)
        for place, origin in enumerate(layer.aliases):
            if origin >= 0:
                sizes[origin] = max(sizes[origin], wanted[-1][place])
        wanted.append(sizes)
    sent = [compiled[0].inputs, *([array.bytes for array in layer.output_kinds] for layer in compiled[:-1])]
    return [list(zip(*sizes, strict=False)) for sizes in zip(sent, reversed(wanted), strict=True)]


def _program(
    layer: CompiledLayer,
    stored_outputs: Mapping[int, bool],
    received_sizes: Sequence[tuple[int, int]],
    *,
    is_first: bool,
    num_targets: int,
) -> ProgramMemory:
    targets = layer.inputs[len(layer.inputs) - num_targets :]
    program = replace(layer.memory_in_program(stored_outputs, received_sizes), target_bytes=sum(targets))
    if not is_first:
        return program
    return replace(
        program,
        input_bytes=sum(layer.inputs[: len(layer.inputs) - len(targets)]),
        narrowed_input_bytes=layer.narrowed_inputs_bytes,
        laid_out_bytes=sum(layer.laid_out),
    )


def _optimizer_costs(records: LayerRecords, compiler: Compiler, rule: OptimizerRule) -> dict[str, OptimizerCost]:
    units = records.distinct
    trained = {digest: trained_parameters(unit.module) for digest, unit in units.items()}
    digests = [digest for digest, parameters in trained.items() if parameters]
    names, parameters = [units[digest].name for digest in digests], [trained[digest] for digest in digests]
    costs = dict.fromkeys(trained, OptimizerCost())
    for n, step in compiler.compile_steps(names, parameters, rule):
        state_bytes = rule.num_states * sum(parameter.nbytes for parameter in parameters[n])
        costs[digests[n]] = OptimizerCost(state_bytes=state_bytes, peak_bytes=step.peak_bytes, step_us=step.step_us)
    return costs
