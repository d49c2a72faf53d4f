"""Profile a model: cut it into a chain, and let a backend find the cost of every layer."""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError, PlannerError
from planner.core.values.partial import PartialProfile
from planner.core.values.profile import THIS_TOOL, Device, Environment, Model, Profile
from planner.device.kinds import kind_of
from planner.device.machine import LARGE_BYTES, keep_freed_memory
from planner.model.batch_norm import has_batch_norm
from planner.model.chain import Chain, chain_digest
from planner.model.growth import SIZES
from planner.model.inputs import tokens_of_sample
from planner.model.lean import build_lean
from planner.model.load import LoadedModel
from planner.model.optimizer_scope import check_optimizer
from planner.model.precision import parameter_dtype_name
from planner.model.seeding import preserve_torch_generators
from planner.model.shared_memory import num_hooks
from planner.model.user_errors import error_location
from planner.profile.backends.choice import backend_of
from planner.profile.structure import find_chain
from planner.profile.task import Measurements, ProfilerOptions, ProfilingTask, Progress, ProgressCounter


class InterruptedProfileError(KeyboardInterrupt):
    """Interruption by Ctrl-C, with the measurements so far."""

    def __init__(self, partial: PartialProfile) -> None:
        super().__init__()
        self.partial = partial


def profile_model(
    loaded: LoadedModel,
    options: ProfilerOptions,
    progress: Progress = lambda *_: None,
    *,
    warn: Callable[[str], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
    earlier: PartialProfile | None = None,
) -> Profile:
    """Return the costs of every layer of a model at every micro-batch size. The model is not changed.

    Args:
        loaded: The model.
        options: Options of the profile.
        progress: Function that is called before each measurement.
        warn: Function that is called with warnings for the user.
        note: Function that is called with notes about defaults.
        earlier: Measurements of an interrupted run, which are used if the model and the environment are equal.

    Raises:
        ModelError: The model cannot be built, cut, or run on its example batch.
        UsageError: The device is unknown, not on this machine, or does not support the model's precision.
        MeasurementError: Memory does not suffice.
        InterruptedProfileError: The user pressed Ctrl-C.
    """
    backend = backend_of(options.device)
    torch.set_num_threads(options.threads)
    if not kind_of(backend.device).has_own_memory:
        # Large blocks are still returned to the system, so that a large model does not take its memory several times.
        keep_freed_memory(below_bytes=LARGE_BYTES)
    chain, lean = find_chain(loaded, backend.device)
    backend.check(loaded, lean=lean)
    for text in (
        () if chain.outline is None else (chain.outline.note_on_repeated_code, chain.outline.note_on_missing_cuts)
    ):
        if text:
            warn(text)
    measurements = Measurements(header=_header(loaded, chain, backend.describe(), options))
    if earlier is not None:
        measurements.add_earlier(earlier, warn)
    task = ProfilingTask(
        loaded=loaded,
        chain=chain,
        lean=lean,
        buffer_bytes={layer.name: layer.buffer_bytes for layer in chain.layers},
        options=options,
        measurements=measurements,
        steps=ProgressCounter(progress),
        warn=warn,
        note=note,
    )
    try:
        with keep_model_unchanged(chain.model):
            measured = backend.measure(task)
    except KeyboardInterrupt as error:
        raise InterruptedProfileError(measurements.as_partial_profile()) from error
    except Exception as error:
        _raise_of_model(loaded, chain.model, error)
        raise
    return Profile(
        generator=THIS_TOOL,
        model=measurements.header.model,
        device=measurements.header.device,
        environment=measurements.header.environment,
        optimizer=loaded.optimizer_name,
        optimizer_peak="sum" if measured.optimizer_peaks_add else "largest",
        micro_batch_sizes=measured.sizes,
        fast_round_ratio=measured.round_ratios[0],
        slow_round_ratio=measured.round_ratios[1],
        layers=measured.layers,
    )


def check_optimizer_of(loaded: LoadedModel, device: str) -> None:
    """Raise an error if a model's optimizer or gradient hooks cannot work on stages.

    Raises:
        ModelError: The model cannot be built, or its optimizer or a hook is refused (`check_optimizer`, `check_hooks`).
        UsageError: The device is unknown or not on this machine.
    """
    backend_of(device)  # raises an error for a device that does not exist
    with preserve_torch_generators():
        model = None
        with suppress(Exception):  # a model that needs values is built normally below, which raises other errors again
            model = build_lean(loaded.build)
        parameters = list((loaded.build() if model is None else model).parameters())
    # The optimizer runs on the CPU: this process must not use CUDA before the equivalence check forks it.
    check_optimizer(loaded.build_optimizer, parameters, torch.device("cpu"))
    if any(map(num_hooks, parameters)):
        find_chain(loaded, torch.device("cpu"))


_MANY_SIZES = (
    "`profile` runs each layer many times, with micro-batches of all sizes in turn; if the layer keeps a tensor of the "
    "size of a micro-batch, measure a single size (`--batch-sizes 4`)"
)

_WITHOUT_GRADIENTS = (
    "an evaluation and the first forward of recomputed layers have no gradients: differentiate only `if "
    "torch.is_grad_enabled():`"
)


def _raise_of_model(loaded: LoadedModel, model: nn.Module, error: Exception) -> None:
    place = "" if isinstance(error, PlannerError) else error_location(model, loaded.loss_fn, error)
    if place:
        first_line = str(error).partition("\n")[0]
        raise ModelError(
            f"{place} raised {type(error).__name__} while layers were measured: {first_line}",
            hint=_WITHOUT_GRADIENTS if "does not require grad" in first_line else _MANY_SIZES,
        ) from error


@contextmanager
def keep_model_unchanged(model: nn.Module) -> Iterator[None]:
    """Restore a model's buffers and gradients, and the random generators, when the `with` block ends."""
    holders = [(module, dict(module._buffers)) for module in model.modules()]
    # Torch refuses to write into an expanded buffer, so its values cannot change.
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers() if not _is_expanded(buffer)]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    with preserve_torch_generators():
        try:
            yield
        finally:
            _put_back(holders, values)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _is_expanded(tensor: Tensor) -> bool:
    is_dense = tensor.layout == torch.strided
    return is_dense and any(size > 1 and not step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _put_back(
    holders: Sequence[tuple[nn.Module, Mapping[str, Tensor | None]]], values: Sequence[tuple[Tensor, Tensor]]
) -> None:
    for module, buffers in holders:
        module._buffers.update(buffers)
    with torch.no_grad():
        for buffer, before in values:
            if buffer.shape != before.shape:  # observers of quantization resize their buffers
                buffer.resize_(before.shape)
            buffer.copy_(before)


def _sample_tokens(loaded: LoadedModel) -> int:
    with preserve_torch_generators():
        return tokens_of_sample(loaded.example_batch(SIZES[0]).inputs)


def _header(loaded: LoadedModel, chain: Chain, device: Device, options: ProfilerOptions) -> PartialProfile:
    return PartialProfile(
        generator=THIS_TOOL,
        model=Model(
            source=loaded.source,
            settings=loaded.settings,
            inputs=loaded.inputs,
            granularity=loaded.granularity,
            uncut=loaded.uncut,
            counted_labels=loaded.counted_labels,
            sample_tokens=_sample_tokens(loaded),
            batch_norm=has_batch_norm(chain.model),
            digest=chain_digest(chain, loaded.settings, loaded.precision),
            parameters=sum(p.numel() for p in chain.model.parameters()),
        ),
        device=device,
        environment=Environment(
            torch=str(torch.__version__),
            python=platform.python_version(),
            dtype=loaded.precision or parameter_dtype_name(chain.model),
            threads=options.threads,
        ),
        optimizer=loaded.optimizer_name,
        measurements=(),
    )
