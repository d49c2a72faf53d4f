"""Equivalence check: compare stages, in separate processes, with the user's model in a plain training loop.

    the caller                forks the check
     └─ the check             forks the reference, finds the model's layers and its distinct cuts, forks stages
         ├─ the reference     trains the model as the user wrote it (`planner.model.reference`), writes its states
         └─ ranks 0, 1, …     train the same steps as the stages of a pipeline, and compare (`stages`)

Each pipeline has several cuts. If a rank differs from the reference, the check tries each cut of its pipeline alone. It
removes wrong cuts and their equivalent cuts, and starts again. If a pipeline differs only with recomputation, the check
reports the difference and keeps the cuts.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, cast

import torch

from planner.core.errors import ModelError
from planner.core.values.proof import Proof
from planner.executor.build.building import build_structure
from planner.executor.equivalence.isolation import (
    ChildError,
    ChildProcess,
    return_freed_blocks_to_system,
    run_in_child,
)
from planner.executor.equivalence.rehearsal import check_repeated_forwards
from planner.executor.equivalence.rounds import EquivalenceRound, RoundResult
from planner.executor.equivalence.subject import (
    STEPS,
    CheckedModel,
    CheckRequest,
    DigestFunction,
    is_large_model,
    layer_starts,
)
from planner.model.autocast import autocast_dtype
from planner.model.load import LoadedModel
from planner.model.python_state import numbers_in_attributes, without_leftover_tensors
from planner.model.reference import ReferenceOptions, train_reference
from planner.model.reference_state import ReferenceState
from planner.model.seeding import seed_process

_MOST_ATTEMPTS = 4
"""Largest number of attempts: with random and with the user's parameter values, each with one and two samples."""


class EquivalenceResult(NamedTuple):
    """Result of the equivalence check: a record of the comparison, and the model, whose failed cuts are excluded."""

    loaded: LoadedModel
    """The model. Its field `uncut` names the layers that must not be the last of a stage."""
    proof: Proof
    """Record of the comparison, with the largest differences."""
    warnings: tuple[str, ...]
    """Cuts that were removed, and why."""
    is_failure: bool = False
    """True if an error prevented the comparison. Lack of time or memory is no error."""

    def raise_if_failed(self) -> None:
        """Raise a `ModelError` if an error prevented the comparison."""
        if self.is_failure:
            loop = "a plain loop"
            if autocast_dtype(self.loaded.precision) is not None:
                loop += f" under `torch.autocast` (`--dtype {self.loaded.precision}`)"
            raise ModelError(
                f"the stages cannot be compared with the model in a plain loop: {self.proof.reason}",
                hint=f"check that the model trains in {loop} with `example_batch(1)` and `example_batch(2)`; "
                "`--proof-budget 0s` plans without the comparison",
            )


def check_equivalence(
    loaded: LoadedModel,
    *,
    budget_s: float,
    digests: DigestFunction = lambda _chain, _loaded: (),
    cuts: Sequence[int] | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> EquivalenceResult:
    """Compare the stages of a model with the model in a plain training loop, on the CPU.

    Args:
        loaded: Loaded model file.
        budget_s: Approximate time limit in seconds. Cuts for which no time remains are not compared.
        digests: Function that returns a digest of each layer's operators. Layers with equal digests count as equal.
        cuts: Cuts to compare. Cut i is between layers i - 1 and i. None compares one cut of each class of equivalent
            cuts. Two cuts are equivalent if the layers directly before them are equal, and the layers directly after
            them are equal.
        progress: Function that is called with a text about the current activity.

    Returns:
        The model without the cuts that failed, the record of the comparison, and warnings.

    Raises:
        ModelError: All cuts failed, or the model does not train in a plain loop.
    """
    deadline = time.monotonic() + budget_s
    warnings: list[str] = []
    while True:
        request = CheckRequest(loaded=loaded, budget_s=budget_s, deadline=deadline, cuts=cuts, digests=digests)
        try:
            result = _run_round_in_child(request, progress)
        except ModelError as error:
            if not warnings:
                raise
            raise ModelError(f"{error.message} ({warnings[-1]})", hint=error.hint) from error
        if result.random or result.is_failure:
            _check_builds(request)
        if not result.wrong:
            return EquivalenceResult(loaded, result.proof, tuple(warnings), result.is_failure)
        warnings.extend(f'the model cannot be cut after "{end}": {why}' for end, why in result.wrong.items())
        if result.random:
            raise ModelError(
                f"the model trains differently every time, also in a plain loop ({result.random}): stages cannot be "
                "compared with it",
                hint="let the model draw only from generators of torch, NumPy or Python that a seed sets, and not read "
                "the clock; keep values that change from step to step in the model, not in module-level objects",
            )
        if len(result.wrong) == result.num_cuts:
            why = next(iter(result.wrong.values()))
            raise ModelError(
                f"the model cannot be cut: its stages do not train as it does in a plain loop ({why.text})",
                hint=why.hint
                or "let `forward` return what later modules need, instead of passing it in global variables, "
                "closures, methods or hooks, keep values that last from step to step in buffers of the module "
                "(`register_buffer`), and what the backward of an autograd function reads in its `ctx`",
            )
        loaded = replace(loaded, uncut=(*loaded.uncut, *result.wrong))


def _check_builds(request: CheckRequest) -> None:
    """Raise a `ModelError` if a second call of `build_model` returns another model."""
    try:
        difference = run_in_child(lambda: _difference_of_builds(request.loaded), limit_s=request.time_limit_s)
    except ChildError:  # the model cannot be built without values, so the cause stays unknown
        return
    if difference:
        name = request.loaded.source.rpartition(":")[2]
        raise ModelError(
            f"`{name}()` returns another model when it is called again: {difference}",
            hint="gpipe-plan builds the model several times: give each layer its number as an argument instead of "
            f"counting instances, and create lists of layers within `{name}`",
        )


def _difference_of_builds(loaded: LoadedModel) -> str:
    models, numbers = [], []
    for _ in range(2):
        seed_process(0)
        with torch.device("meta"):
            models.append(loaded.build())
        numbers.append(without_leftover_tensors(numbers_in_attributes(dict(models[-1].named_modules())), ()))
    first, second = (set(model.modules()) for model in models)
    if first != second and first & second:
        return "it contains modules that the first call made"
    for name, number in numbers[0].items():
        if numbers[1].get(name, number) != number:
            return f'"{name}" is {number:.4g}, then {numbers[1][name]:.4g}'
    return ""


def reference_losses(loaded: LoadedModel, *, micro_batches: int, micro_batch_size: int, limit_s: float) -> list[float]:
    """Train the unpartitioned model for two steps in a plain loop, in a separate process.

    Args:
        loaded: Loaded model file.
        micro_batches: Number of micro-batches of a step, over all replicas.
        micro_batch_size: Number of samples in a micro-batch.
        limit_s: Seconds after which the process is ended.

    Returns:
        Loss of each step.

    Raises:
        ModelError: The model does not train, or not within `limit_s` seconds.
    """

    def work() -> list[float]:
        starts = layer_starts(build_structure(loaded))
        options = ReferenceOptions(
            seed=0, steps=STEPS, micro_batches=micro_batches, micro_batch_size=micro_batch_size, starts=starts
        )
        return train_reference(loaded, options, None)

    try:
        losses: list[float] = run_in_child(work, limit_s=limit_s)
    except ChildError as error:
        raise error.as_model_error() from None
    return losses


def _run_round_in_child(request: CheckRequest, progress: Callable[[str], None]) -> RoundResult:
    folder = Path(tempfile.mkdtemp(prefix="gpipe-plan-check-"))
    child = ChildProcess(partial(_run_round, request, folder), limit_s=request.time_limit_s)
    try:
        return cast("RoundResult", child.result(progress))
    except ChildError as error:
        if error.is_user_error:
            raise error.as_model_error() from None
        return RoundResult(proof=Proof(layers=0, cuts=0, reason=error.message), is_failure=error.is_unexpected_error)
    finally:
        child.end()
        shutil.rmtree(folder, ignore_errors=True)


def _run_round(request: CheckRequest, folder: Path, connection: Connection) -> RoundResult:
    # Fork the references before any code of the model runs here, so that module-level state is as in a new process.
    prepared: dict[Path, ChildProcess] = {}
    for each in (folder / str(attempt) for attempt in range(_MOST_ATTEMPTS)):
        work = partial(_train_reference_on_request, request.loaded, each)
        prepared[each] = ChildProcess(work, limit_s=request.time_limit_s)
    try:
        return _first_successful_attempt(request, prepared, lambda text: connection.send(("progress", text)))
    finally:
        for child in prepared.values():
            child.end()


def _train_reference_on_request(loaded: LoadedModel, folder: Path, connection: Connection) -> None:
    options: ReferenceOptions = connection.recv()
    if not options.updates:
        return_freed_blocks_to_system()
    folder.mkdir(exist_ok=True)
    train_reference(loaded, options, folder)


def _first_successful_attempt(
    request: CheckRequest, prepared: Mapping[Path, ChildProcess], progress: Callable[[str], None]
) -> RoundResult:
    progress("finding the layers")
    chain = build_structure(request.loaded)
    if len(chain.layers) == 1:
        return RoundResult(proof=Proof(layers=0, cuts=0, reason="there is a single layer"))
    first: ChildError | None = None
    can_retry_with_user_values = True
    blind: RoundResult | None = None
    # With one sample, a contrastive loss has no gradient. The activations of two samples take twice the memory.
    sizes = (1, 2) if is_large_model(chain) else (2, 1)
    # First let parameters of a shortened model have random values, then those of the user's code.
    attempts = product((True, False), sizes)
    for (lean, size), (folder, child) in zip(attempts, prepared.items(), strict=True):
        if not lean and not can_retry_with_user_values:
            break
        try:
            subject = CheckedModel.choose(request, chain, size, lean=lean)
            can_retry_with_user_values = subject.can_retry_with_user_values
            result = EquivalenceRound(
                request=request, subject=subject, folder=folder, child=child, progress=progress
            ).compare()
        except ChildError as error:  # batch normalization, for example, needs two samples
            first = first or error
            continue
        gradient = ReferenceState.load(folder / "gradients-0").largest_gradient
        if size == 1 and not gradient and blind is None:
            blind = result
            continue
        if not result.wrong and request.cuts is None:
            progress("repeating forwards")
            differs = check_repeated_forwards(request.loaded, chain, limit_s=request.time_limit_s)
            recomputed = result.proof.differs_recomputed or differs
            return replace(result, proof=replace(result.proof, differs_recomputed=recomputed))
        return result
    if blind is not None:
        return blind
    assert first is not None
    raise first
