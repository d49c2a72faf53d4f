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
from planner.executor.equivalence.subject import STEPS, CheckRequest, Digests, Subject, layer_starts
from planner.model.load import LoadedModel
from planner.model.reference import ReferenceOptions, train_reference


class _Attempt(NamedTuple):
    """Options of one attempt to train the model; if it fails, the next one is tried."""

    micro_batch_size: int
    lean: bool
    """True if parameters of a shortened model have random values, not those of the user's code."""


_ATTEMPTS = (_Attempt(1, True), _Attempt(2, True), _Attempt(1, False), _Attempt(2, False))


class EquivalenceResult(NamedTuple):
    """Result of the check."""

    loaded: LoadedModel
    """Model, with the layers that no stage may end with."""
    proof: Proof
    warnings: tuple[str, ...]
    """Cuts that were removed, and why."""


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
            return EquivalenceResult(loaded, found.proof, tuple(warnings))
        warnings.extend(f'the model cannot be cut behind "{end}": {why}' for end, why in found.wrong.items())
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
        return RoundResult(proof=Proof(layers=0, cuts=0, reason=error.message))
    finally:
        child.end()
        shutil.rmtree(folder, ignore_errors=True)


def _round(request: CheckRequest, folder: Path, connection: Connection) -> RoundResult:
    """Run a round with its own `folder`; progress is sent over `connection`."""
    # Forked before any code of the model has run here, so that module-level state is as in a new process.
    works = [partial(_reference, request.loaded, folder / str(number)) for number in range(len(_ATTEMPTS))]
    waiting = [Child(work, limit_s=request.limit_s) for work in works]
    try:
        return _compared(request, folder, waiting, lambda text: connection.send(("progress", text)))
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
    request: CheckRequest, folder: Path, waiting: Sequence[Child], progress: Callable[[str], None]
) -> RoundResult:
    progress("finding the layers")
    chain = build_structure(request.loaded)
    if len(chain.layers) == 1:
        return RoundResult(proof=Proof(layers=0, cuts=0, reason="there is a single layer"))
    first: ChildError | None = None
    has_other_values = True
    for number, (attempt, child) in enumerate(zip(_ATTEMPTS, waiting, strict=True)):
        if not attempt.lean and not has_other_values:
            break
        try:
            subject = Subject.of(request, chain, attempt.micro_batch_size, lean=attempt.lean)
            has_other_values = subject.has_other_values
            found = Round.of(request, subject, folder / str(number), child, progress=progress).compare()
        except ChildError as error:  # batch normalization, for example, needs two samples
            first = first or error
            continue
        if not found.wrong and request.ends is None:
            progress("repeating forwards")
            rehearse(request.loaded, chain, limit_s=request.limit_s)
        return found
    assert first is not None
    raise first
