"""Check equivalence: stages in separate processes are compared with the user's model in a plain training loop.

    the caller                forks
     └─ the check             forks the reference, finds the model's layers and its distinct cuts, forks stages
         ├─ the reference     trains the model as the user wrote it (`planner.model.reference`), writes its states
         └─ ranks 0, 1, …     train the same steps as the stages of a pipeline, and compare (`stages`)

Each group of cuts is one pipeline. If a rank differs, the cuts of its group are tried one by one. A wrong cut and all
equivalent cuts are removed, and the check starts again. If only recomputation differs, the check reports it and keeps
the cut.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, cast

from planner.core.errors import ModelError
from planner.core.values.proof import Proof
from planner.executor.build.building import build_structure
from planner.executor.equivalence.isolation import Child, ChildError, return_large_blocks
from planner.executor.equivalence.rehearsal import rehearse
from planner.executor.equivalence.rounds import Round, RoundResult
from planner.executor.equivalence.subject import STEPS, CheckRequest, Digests, Subject, is_large, layer_starts
from planner.model.load import LoadedModel
from planner.model.reference import ReferenceOptions, train_reference
from planner.model.reference_state import ReferenceState


class _Attempt(NamedTuple):
    """Options of one attempt to train the model; if it fails, the next one is tried."""

    micro_batch_size: int
    lean: bool
    """True if parameters of a shortened model have random values, not those of the user's code."""


_ATTEMPTS = (_Attempt(2, True), _Attempt(1, True), _Attempt(2, False), _Attempt(1, False))
"""One sample alone hides what samples have to do with each other: a contrastive loss of it has no gradient."""

_ATTEMPTS_OF_LARGE = (_Attempt(1, True), _Attempt(2, True), _Attempt(1, False), _Attempt(2, False))
"""Activations of one sample take half of the memory."""


class EquivalenceResult(NamedTuple):
    """Result of the check."""

    loaded: LoadedModel
    """Model, with the layers that no stage may end with."""
    proof: Proof
    warnings: tuple[str, ...]
    """Cuts that were removed, and why."""
    is_failure: bool = False
    """True if the model or the comparison raised an error; if nothing was compared otherwise, it would take too long or
    too much memory."""

    def expect_comparison(self) -> None:
        """Check that no error has prevented the comparison.

        Raises:
            ModelError: One has.
        """
        if self.is_failure:
            raise ModelError(
                f"the stages cannot be compared with the model in a plain loop: {self.proof.reason}",
                hint="does it train in a plain loop on an `example_batch` of 1 and of 2? `--proof-budget 0s` plans "
                "without the comparison",
            )


def check_equivalence(
    loaded: LoadedModel,
    *,
    budget_s: float,
    digests: Digests = lambda _chain, _loaded: (),
    ends: Sequence[int] | None = None,
    progress: Callable[[str], None] = lambda _text: None,
) -> EquivalenceResult:
    """Compare the stages of a model with the user's model in a plain training loop, on the CPU.

    Args:
        loaded: The model.
        budget_s: Approximate time limit in seconds; cuts that exceed it are not compared.
        digests: Returns digests of layers that are equal for equal operators, so that like cuts need one comparison.
        ends: Cuts to compare, each the index of the layer after it; by default all distinct ones.
        progress: Called with the current activity.

    Returns:
        The result.

    Raises:
        ModelError: No cut is right, or the model does not train in a plain loop.
    """
    deadline = time.monotonic() + budget_s
    warnings: list[str] = []
    while True:
        request = CheckRequest(loaded=loaded, budget_s=budget_s, deadline=deadline, ends=ends, digests=digests)
        found = _in_child(request, progress)
        if not found.wrong:
            return EquivalenceResult(loaded, found.proof, tuple(warnings), found.is_failure)
        warnings.extend(f'the model cannot be cut after "{end}": {why}' for end, why in found.wrong.items())
        if found.random:
            raise ModelError(
                f"the model trains differently every time, also in a plain loop ({found.random}): stages cannot be "
                "compared with it",
                hint="let it draw from the generators of torch, NumPy or Python that a seed reaches, and read no clock",
            )
        if len(found.wrong) == found.num_cuts:
            why = next(iter(found.wrong.values()))
            raise ModelError(
                f"the model cannot be cut: its stages do not train as it does in a plain loop ({why})",
                hint="hand on what later modules need in what `forward` returns, not in global variables, closures or "
                "hooks, and keep what lasts from step to step in buffers of the module (`register_buffer`)",
            )
        loaded = replace(loaded, uncut=(*loaded.uncut, *found.wrong))


def reference_losses(loaded: LoadedModel, *, micro_batches: int, micro_batch_size: int, limit_s: float) -> list[float]:
    """Train the unpartitioned model for two steps in a plain loop, in a separate process.

    Args:
        loaded: The model.
        micro_batches: Micro-batches of a step, over all replicas.
        micro_batch_size: Samples of each.
        limit_s: Seconds after which the process is ended.

    Returns:
        The losses.

    Raises:
        ModelError: It does not train, or not within that time.
    """

    def work(_connection: Connection) -> list[float]:
        starts = layer_starts(build_structure(loaded))
        options = ReferenceOptions(
            seed=0, steps=STEPS, micro_batches=micro_batches, micro_batch_size=micro_batch_size, starts=starts
        )
        return train_reference(loaded, options, None)

    child = Child(work, limit_s=limit_s)
    try:
        losses: list[float] = child.result()
    except ChildError as error:
        raise error.as_model_error() from None
    finally:
        child.end()
    return losses


def _in_child(request: CheckRequest, progress: Callable[[str], None]) -> RoundResult:
    """Run a round of the check in a separate process, so that this one is not changed."""
    folder = Path(tempfile.mkdtemp(prefix="gpipe-plan-check-"))
    child = Child(partial(_round, request, folder), limit_s=request.limit_s)
    try:
        return cast("RoundResult", child.result(progress))
    except ChildError as error:
        if error.is_user_error:
            raise error.as_model_error() from None
        return RoundResult(proof=Proof(layers=0, cuts=0, reason=error.message), is_failure=error.is_raised)
    finally:
        child.end()
        shutil.rmtree(folder, ignore_errors=True)


def _round(request: CheckRequest, folder: Path, connection: Connection) -> RoundResult:
    """Run a round with its own `folder`; progress is sent over `connection`."""
    # Forked before any code of the model has run here, so that module-level state is as in a new process.
    folders = [folder / str(number) for number in range(len(_ATTEMPTS))]
    works = [partial(_reference, request.loaded, each) for each in folders]
    waiting = [Child(work, limit_s=request.limit_s) for work in works]
    try:
        prepared = list(zip(folders, waiting, strict=True))
        return _compared(request, prepared, lambda text: connection.send(("progress", text)))
    finally:
        for child in waiting:
            child.end()


def _reference(loaded: LoadedModel, folder: Path, connection: Connection) -> None:
    """Train the reference with the options that `connection` sends."""
    options: ReferenceOptions = connection.recv()
    if not options.updates:
        return_large_blocks()
    folder.mkdir(exist_ok=True)
    train_reference(loaded, options, folder)


def _compared(
    request: CheckRequest, prepared: Sequence[tuple[Path, Child]], progress: Callable[[str], None]
) -> RoundResult:
    """Compare the stages with one of the references, of which each has a folder and a process."""
    progress("finding the layers")
    chain = build_structure(request.loaded)
    if len(chain.layers) == 1:
        return RoundResult(proof=Proof(layers=0, cuts=0, reason="there is a single layer"))
    first: ChildError | None = None
    has_other_values = True
    blind: RoundResult | None = None
    attempts = _ATTEMPTS_OF_LARGE if is_large(chain) else _ATTEMPTS
    for attempt, (folder, child) in zip(attempts, prepared, strict=True):
        if not attempt.lean and not has_other_values:
            break
        try:
            subject = Subject.of(request, chain, attempt.micro_batch_size, lean=attempt.lean)
            has_other_values = subject.has_other_values
            found = Round.of(request, subject, folder, child, progress=progress).compare()
        except ChildError as error:  # batch normalization, for example, needs two samples
            first = first or error
            continue
        gradient = ReferenceState.load(folder / "gradients-0").largest_gradient
        if attempt.micro_batch_size == 1 and not gradient and blind is None:
            blind = found
            continue
        if not found.wrong and request.ends is None:
            progress("repeating forwards")
            rehearse(request.loaded, chain, limit_s=request.limit_s)
        return found
    if blind is not None:
        return blind
    assert first is not None
    raise first
