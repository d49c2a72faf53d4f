"""Profile a model: cut it into a chain, and let a backend find the cost of every layer."""

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from planner.core.errors import ModelError, PlannerError
from planner.core.values.partial import Partial
from planner.core.values.profile import GENERATOR, Device, Environment, Model, Profile
from planner.device.kinds import kind_of
from planner.device.machine import LARGE_BYTES, keep_freed_memory
from planner.model.batch_norm import has_batch_norm
from planner.model.chain import Chain, chain_digest
from planner.model.lean import build_lean
from planner.model.load import LoadedModel
from planner.model.optimizer_scope import check_optimizer
from planner.model.precision import dtype_of
from planner.model.shared_memory import has_hooks
from planner.model.user_errors import place_in_model
from planner.profile.backends.choice import backend_of
from planner.profile.structure import find_chain
from planner.profile.task import Measurements, ProfilerOptions, Progress, Steps, Task


class InterruptedProfileError(KeyboardInterrupt):
    """Ctrl-C, with the measurements so far."""

    def __init__(self, partial: Partial) -> None:
        super().__init__()
        self.partial = partial


def profile_model(
    loaded: LoadedModel,
    options: ProfilerOptions,
    progress: Progress = lambda *_: None,
    *,
    warn: Callable[[str], None] = lambda _: None,
    note: Callable[[str], None] = lambda _: None,
    earlier: Partial | None = None,
) -> Profile:
    """Measure every layer of the model at every micro-batch size. The model is not changed.

    Args:
        loaded: The model.
        options: Options of the profile.
        progress: Called before each measurement.
        warn: Called with warnings for the user.
        note: Called with notes about defaults.
        earlier: Measurements of an interrupted run; used if it was of the same model in the same environment.

    Returns:
        The profile.

    Raises:
        ModelError: The model cannot be built, cut, or run on its example batch.
        UsageError: The device does not exist here.
        MeasurementError: Memory does not suffice.
        InterruptedProfileError: The user pressed Ctrl-C.
    """
    backend = backend_of(options.device)
    torch.set_num_threads(options.threads)
    if not kind_of(backend.device).has_own_memory:
        # A large model must not use the memory of several before anything is timed.
        keep_freed_memory(below=LARGE_BYTES)
    backend.check_model(loaded)
    chain, lean = find_chain(loaded, backend.device)
    backend.check_chain(lean=lean)
    for text in () if chain.outline is None else (chain.outline.widened, chain.outline.prevented):
        if text:
            warn(text)
    measurements = Measurements(header=_header(loaded, chain, backend.described(), options))
    if earlier is not None:
        measurements.take_over(earlier, warn)
    task = Task(
        loaded=loaded,
        chain=chain,
        lean=lean,
        buffer_bytes={layer.name: layer.buffer_bytes for layer in chain.layers},
        options=options,
        measurements=measurements,
        steps=Steps(progress),
        warn=warn,
        note=note,
    )
    try:
        with untouched(chain.model):
            measured = backend.measure(task)
    except KeyboardInterrupt as error:
        raise InterruptedProfileError(measurements.partial()) from error
    except Exception as error:
        _raise_of_model(loaded, chain.model, error)
        raise
    return Profile(
        generator=GENERATOR,
        model=measurements.header.model,
        device=measurements.header.device,
        environment=measurements.header.environment,
        optimizer=loaded.optimizer_name,
        optimizer_peak="sum" if measured.optimizer_peaks_add else "largest",
        micro_batch_sizes=measured.sizes,
        layers=measured.layers,
    )


def check_optimizer_of(loaded: LoadedModel, device: str) -> None:
    """Refuse an optimizer, or hooks, that change parameters of stages in another way than in a plain loop.

    Raises:
        ModelError: The model cannot be built, or its optimizer or a hook is refused; see `check_optimizer` and
            `check_hooks`.
        UsageError: The device does not exist here.
    """
    where = backend_of(device).device
    with torch.random.fork_rng(devices=[]):
        model = None
        with suppress(Exception):  # a model that needs values is built whole; an error of the user's is raised again
            model = build_lean(loaded.build)
        parameters = list((loaded.build() if model is None else model).parameters())
    check_optimizer(loaded.build_optimizer, parameters, where)
    if any(map(has_hooks, parameters)):
        find_chain(loaded, where)


_MANY_SIZES = (
    "layers run many times there, with micro-batches of all sizes in turn; if this one keeps something of the size of "
    "a micro-batch, measure a single size (`--batch-sizes 4`)"
)

_WITHOUT_GRADIENTS = (
    "an evaluation and the first forward of what is recomputed have no gradients: differentiate only `if "
    "torch.is_grad_enabled():`"
)


def _raise_of_model(loaded: LoadedModel, model: nn.Module, error: Exception) -> None:
    """Raise an explained error if the model's own code failed although its layers had run before."""
    place = "" if isinstance(error, PlannerError) else place_in_model(model, loaded.loss_fn, error)
    if place:
        first_line = str(error).partition("\n")[0]
        raise ModelError(
            f"{place} raised {type(error).__name__} while layers were measured: {first_line}",
            hint=_WITHOUT_GRADIENTS if "does not require grad" in first_line else _MANY_SIZES,
        ) from error


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restore buffers, gradients and the random state after the block."""
    holders = [(module, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            _put_back(holders, values)
            for parameter, gradient in gradients:
                parameter.grad = gradient


def _put_back(
    holders: Sequence[tuple[nn.Module, Mapping[str, Tensor | None]]], values: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """Restore the buffers of modules, and their values."""
    for module, buffers in holders:
        module._buffers.update(buffers)
    with torch.no_grad():
        for buffer, before in values:
            if buffer.shape != before.shape:  # observers of quantization resize theirs
                buffer.resize_(before.shape)
            buffer.copy_(before)


def _header(loaded: LoadedModel, chain: Chain, device: Device, options: ProfilerOptions) -> Partial:
    return Partial(
        generator=GENERATOR,
        model=Model(
            source=loaded.source,
            settings=loaded.settings,
            inputs=loaded.inputs,
            granularity=loaded.granularity,
            uncut=loaded.uncut,
            counted_labels=loaded.counted_labels,
            batch_norm=has_batch_norm(chain.model),
            digest=chain_digest(chain, loaded.settings, loaded.precision),
            parameters=sum(p.numel() for p in chain.model.parameters()),
        ),
        device=device,
        environment=Environment(
            torch=str(torch.__version__),
            python=platform.python_version(),
            dtype=loaded.precision or dtype_of(chain.model),
            threads=options.threads,
        ),
        optimizer=loaded.optimizer_name,
        measurements=(),
    )
